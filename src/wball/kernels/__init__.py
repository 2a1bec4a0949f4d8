"""Kernels: the inner loops, one package for each operation, with a readable reference beside the
fast versions."""

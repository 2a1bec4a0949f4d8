"""An independent check of every claim, without code of kernels, attacks and balls."""

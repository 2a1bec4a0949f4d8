"""Exact plans by a proximal Newton method."""

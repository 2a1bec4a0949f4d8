"""The entropic path: Newton's method for the exact support function and for entropic problems."""

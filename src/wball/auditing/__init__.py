"""An independent check of what the rest of the library claims; it shares no code with kernels and solvers."""

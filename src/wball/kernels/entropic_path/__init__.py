"""The entropic path: the engine behind exact projection and exact support function."""

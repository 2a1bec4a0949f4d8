"""The entropic plan of given potentials: the attack step's oracle."""

"""Side-by-side measurements: this library, what was there before it, and the floor of the machine.

``python -m benchmarks`` runs everything that fits the device; ``python -m benchmarks --help`` says
how to run parts.
"""

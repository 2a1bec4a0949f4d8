"""Numerical torture of the public API: seeded cases over everything a caller may pass, checked by
independent sums.

``PYTHONPATH=tests python -m torture --cases 100000`` is the long run, ``test_torture.py`` a few
hundred cases of it.
"""

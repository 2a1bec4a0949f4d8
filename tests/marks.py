"""Marks of a test's parameters."""

from __future__ import annotations

import pytest


def slow(*values: object) -> list[object]:
    """Parameters that ``make test`` leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]

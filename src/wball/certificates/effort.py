"""How a certificate is computed: the methods by name, and what each of them may spend."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from wball import inputs
from wball.input_sets import Plans

Method = Literal["interval", "dual", "crown", "anchored", "alpha-crown", "complete"]
METHODS: tuple[Method, ...] = ("interval", "dual", "crown", "anchored", "alpha-crown", "complete")

STEPS = 30
"""Of ``alpha-crown``, unless given."""


@dataclass(frozen=True)
class Effort:
    """Checked settings of :func:`wball.certify`, which has their meaning."""

    method: Method
    plans: Plans
    steps: int
    reg: float
    batch_size: int | None
    time_limit: float

    @classmethod
    def read(
        cls,
        method: Method,
        plans: Plans,
        refine: bool | None,
        optimise: bool | None,
        steps: int | None,
        reg: float,
        batch_size: int | None,
        time_limit: float,
    ) -> Effort:
        """Settings as the public functions take them, the deprecated ``refine`` and ``optimise`` included."""
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        if plans not in ("full", "window"):
            raise ValueError(f'plans must be "full" or "window", got {plans!r}')
        count = inputs.check_count("steps", STEPS if steps is None else steps)
        inputs.check_positive("reg", reg)
        inputs.check_positive("time_limit", time_limit)
        if batch_size is not None:
            inputs.check_count("batch_size", batch_size)
        meant = _named(method, refine, optimise, steps)
        return cls(meant, plans, count, reg, batch_size, time_limit)


def _named(method: Method, refine: bool | None, optimise: bool | None, steps: int | None) -> Method:
    """The method that is meant, where it was said in the old way, by flags next to ``crown``."""
    if refine is None and optimise is None and (steps is None or method == "alpha-crown"):
        return method
    if method in ("interval", "dual", "complete"):
        if optimise:
            raise ValueError(
                f'optimise needs method="crown", got {method!r}, which has nothing to optimise'
            )
        return method
    if optimise or (optimise is None and (steps is not None or method == "alpha-crown")):
        meant: Method = "alpha-crown"
    else:
        meant = "crown" if refine is False else "anchored"
    if refine is not None or optimise is not None:
        said = "refine and optimise are deprecated: the methods crown, anchored and alpha-crown have names"
        warnings.warn(f"{said}; use method={meant!r}", DeprecationWarning, stacklevel=4)
    return meant

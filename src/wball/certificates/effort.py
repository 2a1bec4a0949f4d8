"""How a certificate is computed: the methods by name, and the settings of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wball import inputs
from wball.input_sets import Plans

Method = Literal["interval", "dual", "crown", "anchored", "alpha-crown", "complete"]
METHODS: tuple[Method, ...] = ("interval", "dual", "crown", "anchored", "alpha-crown", "complete")

ONE_PASS: tuple[Method, ...] = ("interval", "dual", "crown")
"""Methods that bound every image in the same way, whether or not it is certified already."""


@dataclass(frozen=True)
class Effort:
    """Checked settings of :func:`wball.certify`, which documents them."""

    method: Method
    plans: Plans
    steps: int
    reg: float
    batch_size: int | None
    time_limit: float

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.plans not in ("full", "window"):
            raise ValueError(f'plans must be "full" or "window", got {self.plans!r}')
        inputs.check_count("steps", self.steps)
        inputs.check_positive("reg", self.reg)
        inputs.check_positive("time_limit", self.time_limit)
        if self.batch_size is not None:
            inputs.check_count("batch_size", self.batch_size)

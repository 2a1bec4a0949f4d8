"""What the progress bar of an evaluation says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from wball.progress import Bar


@dataclass
class Tally:
    """Radius and robust accuracy so far, over the batches that have come to that radius."""

    name: str
    shown: Bar
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def begin(self, settings: dict[str, Any], stage: int, images: int) -> None:
        where = (
            f"up to {settings['radii'][-1]:g}"
            if settings["mode"] == "minimal"
            else f"{settings['radii'][stage]:g}"
        )
        survived, total = self.counts.get(stage, (0, 0))
        so_far = f", robust accuracy {100 * survived / total:.1f} % so far" if total else ""
        self.shown.stage(images, f"{self.name}, eps {where}{so_far}")

    def end(self, stage: int, state: dict[str, Tensor]) -> None:
        survived, total = self.counts.get(stage, (0, 0))
        left = state["distance"].isinf()
        self.counts[stage] = survived + int(left.sum()), total + len(left)
        self.shown.advance(len(left))

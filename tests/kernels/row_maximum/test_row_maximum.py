"""Row maxima: every kernel finds the bound of the torch version, for patches, whole images, charges and box prices."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from wball import WassersteinBall
from wball.input_sets import TransportSet
from wball.input_sets.charges import Charges
from wball.input_sets.rows import Rows
from wball.kernels import dispatch
from wball.kernels.row_maximum import row_maximum
from wball.kernels.row_maximum.reference import worth_of

DEVICE = os.environ.get(
    "WBALL_TEST_DEVICE", "cpu"
)  # tests/conftest.py asks for the interpreter on a CPU
ROUNDS = 10
KINDS = ("patches", "whole", "charged", "charged patches", "priced")


def images(seed: int, channels: int = 2) -> Tensor:
    """Two images with some empty pixels, and one that is nearly empty."""
    x = torch.rand(3, channels, 12, 12, generator=torch.Generator().manual_seed(seed))
    x = torch.where(x > 0.6, x, 0.0)
    x[2] = 0.0
    x[2, 0, 3, 4] = 0.7
    return x


def problem(kind: str, seed: int) -> tuple[TransportSet, Rows, Tensor | None, Charges | None]:
    draw = torch.Generator().manual_seed(100 + seed)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw, dtype=torch.float64).to(DEVICE)

    x = images(seed).to(DEVICE)
    source = WassersteinBall(0.2).input_set(x)
    image = torch.tensor([0, 1, 2, 0, 1], device=DEVICE)
    patches = kind in ("patches", "charged patches")
    shape = (5, 2, 2, 3) if patches else (5, 2, 12, 12)
    places = torch.tensor([[-1, 0, 5, 10, 3], [2, 11, 0, 4, 3]], device=DEVICE)
    rows = Rows(random(*shape) - 0.5, image, (places[0], places[1]) if patches else None)
    box, charges = None, None
    if kind == "priced":
        box = 0.3 * (random(*shape) - 0.5)
    if kind.startswith("charged"):
        count = source._field(rows).mass.shape[2]
        into = source._slice(source._targets(rows, None), 0, 0).shape
        charges = Charges(
            random(5, 2, len(source.moves) - 1, count), random(5, 2, count), random(*into)
        )
    return source, rows, box, charges


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_kernels_agree(name: str, kind: str) -> None:
    """Any price is sound, a wrong sum is not: each bound is the function at the price that comes with it."""
    if name == "cpu" and DEVICE != "cpu":
        pytest.skip("compiled loops run on a CPU")
    source, rows, box, charges = problem(kind, 0)
    made = source._problem(rows, box, charges)
    expected, _ = row_maximum(made, 40, "torch")
    found, psi = row_maximum(made, ROUNDS, name)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    again = worth_of(made.field(), psi) + psi * made.budget
    torch.testing.assert_close(found, again, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["cpu", "triton", "torch"])
def test_charges_that_are_not_numbers_bound_nothing(name: str) -> None:
    """Networks that overflow charge 0 times infinity; a kernel that leaves such a move out would be unsound."""
    if name == "cpu" and DEVICE != "cpu":
        pytest.skip("compiled loops run on a CPU")
    source, rows, box, charges = problem("charged", 0)
    assert charges is not None
    charges.moves[1, 0, 3] = math.nan
    found, _ = row_maximum(source._problem(rows, box, charges), 4, name)
    assert torch.isnan(found).tolist() == [False, True, False, False, False]


def test_the_operation_is_in_the_register() -> None:
    x = images(0)
    source = WassersteinBall(0.2).input_set(x)
    assert set(dispatch.OPERATIONS["row_maximum"]) == {"triton", "cpu", "torch"}
    assert source.kernel in dispatch.OPERATIONS["row_maximum"]

"""Findings add up by code, and the serious ones make a result unreliable."""

from __future__ import annotations

import pytest

from wball.attacks.findings import CODES, Finding, merged, reliable


@pytest.mark.parametrize("code", CODES)
def test_every_code_says_what_was_seen_and_what_to_do(code: str) -> None:
    finding = Finding(code, 3, 7)
    assert "{" not in finding.message and finding.remedy
    assert finding.serious == (CODES[code].tolerated is not None and CODES[code].tolerated < 3 / 7)


def test_findings_of_batches_add_up() -> None:
    parts = [
        Finding("probabilities", 1, 1),
        Finding("black-box-stronger", 1, 64),
        Finding("black-box-stronger", 9, 64),
    ]
    assert merged(parts) == (Finding("black-box-stronger", 10, 128), Finding("probabilities", 1, 1))
    assert not reliable(merged(parts))


@pytest.mark.parametrize(
    ("code", "images", "of", "serious"),
    [
        ("full-ball-survivors", 1, 1, False),
        ("full-ball-survivors", 2, 9, True),
        ("full-ball-survivors", 2, 16, False),
        ("loss-still-rising", 1, 1, False),
        ("loss-still-rising", 2, 20, True),
        ("masked-gradients", 1, 1000, True),
        ("black-box-stronger", 2, 100, False),
        ("black-box-stronger", 3, 100, True),
        ("probabilities", 1, 1, False),
    ],
)
def test_single_images_and_notes_do_not_make_a_result_unreliable(
    code: str, images: int, of: int, serious: bool
) -> None:
    finding = Finding(code, images, of)
    assert finding.serious == serious and reliable([finding]) != serious

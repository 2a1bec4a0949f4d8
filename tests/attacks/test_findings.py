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
        Finding("train-mode", 1, 1),
        Finding("black-box-stronger", 1, 64),
        Finding("black-box-stronger", 9, 64),
    ]
    assert merged(parts) == (Finding("black-box-stronger", 10, 128), Finding("train-mode", 1, 1))
    assert not reliable(merged(parts))


def test_notes_and_single_images_do_not_make_a_result_unreliable() -> None:
    assert reliable([]) and reliable(
        [Finding("train-mode", 1, 1), Finding("black-box-stronger", 2, 100)]
    )
    assert not reliable([Finding("masked-gradients", 1, 1000)])


def test_a_local_optimum_or_two_in_a_full_ball_are_no_reason_for_doubt() -> None:
    """One of nine survivors of a public network that hides nothing made its evaluation unreliable."""
    assert (
        not Finding("full-ball-survivors", 1, 9).serious
        and not Finding("full-ball-survivors", 2, 2).serious
    )
    assert (
        Finding("full-ball-survivors", 3, 3).serious
        and Finding("full-ball-survivors", 4, 16).serious
    )
    assert not Finding("full-ball-survivors", 3, 16).serious


def test_one_survivor_whose_loss_rises_is_no_reason_for_doubt() -> None:
    """The last of 200 digits that a public network had right at a large radius made its evaluation unreliable."""
    assert (
        not Finding("loss-still-rising", 1, 200).serious
        and not Finding("loss-still-rising", 1, 1).serious
    )
    assert (
        Finding("loss-still-rising", 2, 20).serious
        and Finding("loss-still-rising", 11, 200).serious
    )

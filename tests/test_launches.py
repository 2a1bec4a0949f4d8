"""Public calls make no more launches and reads on a GPU than ``benchmarks/launches.py`` allows
them."""

from __future__ import annotations

import pytest

from benchmarks import launches


@pytest.mark.gpu
@pytest.mark.parametrize("name", launches.MOST)
def test_launches_and_reads(name: str) -> None:
    made, read = launches.counted(launches.calls()[name])
    most, reads = launches.MOST[name]
    assert 0 < made <= most and read <= reads, f"{made} launches, {read} reads"

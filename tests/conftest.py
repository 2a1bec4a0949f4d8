"""Settings shared by all tests: reproducible examples, one thread, GPU tests only where there is a
GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import settings

ON_CPU = os.environ.get("WBALL_TEST_DEVICE", "cpu") == "cpu"

# Triton reads this when it is first imported, by whoever that is: without a GPU its kernels run in
# the interpreter.
if ON_CPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Failing examples must be the same on every machine, and a busy machine is no reason to fail.
settings.register_profile("wball", derandomize=True, deadline=None)
settings.load_profile("wball")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Where only a GPU's tests are asked for, the packages of all others need not be there."""
    if ON_CPU or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    return None if "mark.gpu" in text or "WBALL_TEST_DEVICE" in text else True


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Doctests are looked for in the package only: among tests, their collector hides files that
    fail to import."""
    found = yield
    return [collector for collector in found if not isinstance(collector, DoctestModule)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _interpreted_quickly() -> None:
    """Triton's interpreter prepares its language at every call of an inner function, which took a
    third of these tests.

    Once a launch and module does the same: preparing again what is prepared changes nothing.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    scope = getattr(interpreter, "_LangPatchScope", None)
    if scope is None:  # another Triton
        return
    patch: Callable[[Any], Any] = interpreter._patch_lang
    restore: Callable[[Any], None] = scope.restore
    prepared: set[int] = set()

    def once(fn: Any) -> Any:
        if id(fn.__globals__) in prepared:
            return scope()
        prepared.add(id(fn.__globals__))
        return patch(fn)

    def over(self: Any) -> None:
        prepared.clear()
        restore(self)

    interpreter._patch_lang, scope.restore = once, over


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Each test starts from the same random state, whatever ran before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield

"""Modules of a package that are imported when they are first named, as documentation writes
them."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def submodules(package: str) -> Callable[[str], ModuleType]:
    """A ``__getattr__`` for ``package``: after ``import wball``, ``wball.attacks.adapters.onnx``
    resolves."""

    def find(name: str) -> ModuleType:
        if name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return find

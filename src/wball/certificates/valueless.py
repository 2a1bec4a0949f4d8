"""Tensors without values: whatever a model computes with them cannot depend on an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

READERS = frozenset(
    {"numpy", "tolist", "item", "data_ptr", "storage", "untyped_storage", "__array__", "__dlpack__"}
)
"""Attributes that read values in ways that no operation of PyTorch shows."""


class Valueless(Tensor):
    """Shape, dtype and device of a tensor, and which others share its memory; asking for its values
    is an error.

    PyTorch's own ``FakeTensor`` does the same, but loads its compiler for it, and all that this
    depends on. Here zeros stand behind the shapes, where no model can read them.
    """

    behind: Tensor
    watch: Callable[..., None] | None = None  # told of every operation, in any thread

    @staticmethod
    def __new__(cls, behind: Tensor) -> Valueless:
        made: Valueless = Tensor._make_wrapper_subclass(
            cls,
            behind.shape,
            strides=behind.stride(),
            storage_offset=behind.storage_offset(),
            dtype=behind.dtype,
            device=behind.device,
        )
        made.behind = behind
        return made

    def __getattribute__(self, name: str) -> Any:
        if name in READERS and self.watch is not None:
            self.watch(name, (), {}, reads=True)
        return super().__getattribute__(name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given: dict[int, Valueless] = {}
        watch = next(
            (t.watch for t in tree_flatten((args, kwargs))[0] if isinstance(t, Valueless)), None
        )
        if watch is not None:
            watch(func, args, kwargs or {})

        def strip(value: Any) -> Any:
            if isinstance(value, Valueless):
                given[id(value.behind)] = value
                return value.behind
            return value

        def wrap(value: Any) -> Any:
            if id(value) in given:  # what works in place returns what it got
                return given[id(value)]
            made = cls(value)
            made.watch = watch
            return made

        args, kwargs = tree_map(strip, (args, dict(kwargs or {})))
        found = func(*args, **kwargs)
        if any(not isinstance(part, Tensor) for part in tree_flatten(found)[0]):
            raise RuntimeError(f"{func} asks for the values of a tensor, which depend on the image")
        return tree_map(wrap, found)


def memory(tensor: Tensor) -> int:
    """What two tensors have in common if one changes with the other."""
    held = tensor.behind if isinstance(tensor, Valueless) else tensor
    return held.untyped_storage()._cdata

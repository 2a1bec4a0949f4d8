"""Tensors without values: whatever a model computes with them cannot depend on an image."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


class Valueless(Tensor):
    """Shape, dtype and device of a tensor, and which others share its memory; asking for its values is an error.

    PyTorch's own ``FakeTensor`` does the same, but loads its compiler for it, and all that this depends on. Here zeros
    stand behind the shapes, where no model can read them.
    """

    behind: Tensor

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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given: dict[int, Valueless] = {}

        def strip(value: Any) -> Any:
            if isinstance(value, Valueless):
                given[id(value.behind)] = value
                return value.behind
            return value

        def wrap(value: Any) -> Any:
            return (
                given[id(value)] if id(value) in given else cls(value)
            )  # what works in place returns what it got

        args, kwargs = tree_map(strip, (args, dict(kwargs or {})))
        found = func(*args, **kwargs)
        if any(not isinstance(part, Tensor) for part in tree_flatten(found)[0]):
            raise RuntimeError(f"{func} asks for the values of a tensor, which depend on the image")
        return tree_map(wrap, found)


def memory(tensor: Tensor) -> int:
    """What two tensors have in common if one changes with the other."""
    held = tensor.behind if isinstance(tensor, Valueless) else tensor
    return held.untyped_storage()._cdata

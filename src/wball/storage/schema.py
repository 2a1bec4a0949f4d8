"""What plain data must look like, written as data.

A schema is a type, a set of values, a dictionary of schemas, a list with the schema of every item,
a tuple with one schema for each item of a list, :class:`Maybe`, or a function that accepts a value.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Maybe:
    """``None``, or a value of a schema."""

    schema: Any


def natural(value: Any) -> bool:
    """Whether a value is a whole number that is not negative."""
    return type(value) is int and value >= 0


def finite(value: Any) -> bool:
    """Whether a value is a finite number."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def sha256(value: Any) -> bool:
    """Whether a value is a checksum."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def check(value: Any, schema: Any, name: str) -> None:
    """Raise ``ValueError`` with the place of the first part that does not fit."""
    for place, part in _misfits(value, schema, name):
        raise ValueError(f"{place} is {str(part)[:80]!r}")


def _misfits(value: Any, schema: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, Maybe):
        if value is not None:
            yield from _misfits(value, schema.schema, name)
    elif isinstance(schema, dict):
        if not isinstance(value, dict) or value.keys() != schema.keys():
            yield name, value
            return
        for key, inner in schema.items():
            yield from _misfits(value[key], inner, f"{name}.{key}")
    elif isinstance(schema, (list, tuple)):
        if not isinstance(value, list) or (isinstance(schema, tuple) and len(value) != len(schema)):
            yield name, value
            return
        every = schema if isinstance(schema, tuple) else schema * len(value)
        for k, (item, inner) in enumerate(zip(value, every, strict=True)):
            yield from _misfits(item, inner, f"{name}[{k}]")
    elif isinstance(schema, (set, frozenset)):
        if type(value) not in {type(v) for v in schema} or value not in schema:
            yield name, value
    elif type(value) is not schema if isinstance(schema, type) else not schema(value):
        yield name, value

"""Results in a session: one line in a terminal, a small table in a notebook."""

from collections.abc import Mapping
from enum import Enum
from html import escape


class Explained(Enum):
    """Outcomes by name. The value is the explanation, with a remedy if there is one."""

    def __str__(self) -> str:
        return f"{self.name.lower()}: {self.value}"


class Summarised:
    """A result that prints a short summary instead of all its tensors. Subclasses implement
    :meth:`headline`.

    >>> class Result(Summarised):
    ...     def headline(self) -> dict[str, str]:
    ...         return {"images": "3", "robust accuracy": "66.7 %"}
    >>> Result()
    <Result: images 3, robust accuracy 66.7 %>
    """

    def headline(self) -> Mapping[str, str]:
        """The summary: short values by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(f'{name} {value}' for name, value in self.headline().items())}>"

    def _repr_html_(self) -> str:
        """The summary as an HTML table, for notebooks."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in self.headline().items()
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"


def percent(part: float) -> str:
    """A fraction as a percentage."""
    return f"{100 * part:.1f} %"

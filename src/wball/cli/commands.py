"""All commands of ``wball``, in the order in which ``--help`` lists them."""

from wball.cli.app import app

from wball.cli import evaluate, certify, train, report, lists  # isort: skip  # noqa: F401 (registers)

__all__ = ["app"]

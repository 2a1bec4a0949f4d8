"""The ``wball`` command: :func:`main` and how it fails.

Exit codes: 0 done; 2 wrong arguments or inputs; 3 done, but some claimed examples failed the audit, or a certificate
and an example contradict each other; 4 the output folder is in use; 5 a disk, file or memory error; 6 done, but an
evaluation is not reliable; 7 done, but a requirement is not met; 70 an error in this library; 130 interrupted. Errors
are one line on stderr; ``WBALL_DEBUG=1`` adds the traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TextIO

import typer

# typer brings its own copy of click or uses the installed one: its exported exception leads to the right base classes.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
ClickException: type[Exception] = typer.BadParameter.__mro__[2]

BAD_INPUT, IN_USE, NO_FILE, INTERNAL, INTERRUPTED = 2, 4, 5, 70, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from wball.cli.commands import app

    line = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = app(args=line, standalone_mode=False, prog_name="wball")
        code = code if isinstance(code, int) else 0
    except typer.Exit as done:
        code = done.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except ClickException as error:
        return _fail(_of_click(error), BAD_INPUT)
    except BrokenPipeError:  # a reader such as `head` had enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (held until the process ends)
        return 0
    except SystemExit as done:
        return (
            0 if isinstance(done.__context__, BrokenPipeError) else _ended(done)
        )  # rich's answer to a broken pipe
    except Exception as error:  # noqa: BLE001 (the last line of defence: it is sorted and reported)
        return _fail(*_sorted(error))
    if code == INTERRUPTED:
        return _fail("interrupted; rerun the same command to resume", INTERRUPTED)
    return code


def _one_line(text: str) -> str:
    from wball.storage.names import printable

    return printable(" ".join(text.split()))


def entry() -> None:
    """The console script."""
    if (
        "WORLD_SIZE" not in os.environ
    ):  # torchrun ends its processes itself, and they may be waiting for each other
        signal.signal(signal.SIGTERM, _terminated)
    code = main()
    if code == INTERRUPTED:
        # Where the signal met Python code that C code ran, Python would not end with this code but by SIGINT.
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _ended(done: SystemExit) -> int:
    """The exit code of code that ended the process by itself."""
    if done.code is None or isinstance(done.code, int):
        return done.code or 0
    return _fail(str(done.code), BAD_INPUT)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning in one line, like errors."""
    print(f"wball: warning: {_one_line(str(message))}", file=sys.stderr)


def _terminated(number: int, frame: FrameType | None) -> None:
    """A batch system's way to interrupt."""
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> int:
    if os.environ.get("WBALL_DEBUG"):
        import traceback

        traceback.print_exc()
    print(f"wball: {_one_line(message)}", file=sys.stderr)
    return code


def _of_click(error: Exception) -> str:
    said = getattr(error, "format_message", lambda: str(error))().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{said}; see `{context.command_path} --help`" if context is not None else said


def _sorted(error: Exception) -> tuple[str, int]:
    """A message and an exit code for what a command raised."""
    from wball.attacks.base import out_of_memory
    from wball.storage.atomic import FolderInUse

    if isinstance(error, MemoryError) or out_of_memory(error):
        return (
            "out of memory; use a smaller --batch-size (with --overwrite if the run has begun)",
            NO_FILE,
        )
    if isinstance(error, FolderInUse):
        return str(error), IN_USE
    if isinstance(error, (NotADirectoryError, FileExistsError)) and error.filename:
        return (
            f"{error.filename}: is a file, but a folder is needed; choose another path",
            BAD_INPUT,
        )
    if isinstance(
        error,
        (
            FileNotFoundError,
            NotADirectoryError,
            IsADirectoryError,
            ValueError,
            TypeError,
            ImportError,
        ),
    ):
        return str(error), BAD_INPUT
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        hint = (
            "; free some space, then rerun the same command to resume" if error.errno == 28 else ""
        )
        return f"{error.strerror or error}{where}{hint}", NO_FILE
    first = (str(error).strip().splitlines() or [""])[0]
    return f"unexpected {type(error).__name__}: {first} (WBALL_DEBUG=1 shows where)", INTERNAL

"""The ``wball`` command: :func:`main` and how it fails.

Exit codes: 0 done; 2 wrong arguments or inputs; 3 done, but some claimed examples failed the audit,
or a certificate and an example contradict each other; 4 the output folder is in use; 5 a disk, file
or memory error; 6 done, but an evaluation is not reliable; 7 done, but a requirement is not met; 70
an error in this library; 130 interrupted. Errors are one line on stderr; ``WBALL_DEBUG=1`` adds the
traceback.
"""

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from threading import Timer
from typing import Any

BAD_INPUT, IN_USE, NO_FILE, INTERNAL, INTERRUPTED = 2, 4, 5, 70, 130
NO_SPACE = 28
STOPPED = "interrupted; rerun the same command to resume"
_signals: list[int] = []
"""Signals to stop that this process received."""
WRONG_INPUT = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
    TypeError,
    ImportError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    line = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if "--verbose" in line:  # an option of all commands: it may follow the command's name
        line.insert(0, line.pop(line.index("--verbose")))
    try:
        import typer  # here, so that an interrupted import is reported as well

        # typer may bring its own copy of click: its exported exception leads to the base class.
        usage: type[Exception] = typer.BadParameter.__mro__[2]
        from wball.cli.commands import app
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 (an interrupted import)
        if _signals or isinstance(error, KeyboardInterrupt):
            return _fail(STOPPED, INTERRUPTED)
        return _fail(*_sorted(error))
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn  # type: ignore[assignment]
            warnings.simplefilter("ignore", FutureWarning)  # of libraries, about their own code
            code = app(args=line, standalone_mode=False, prog_name="wball")
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except typer.Exit as done:
        code = done.exit_code
    except usage as error:
        return _fail(_usage(error), BAD_INPUT)
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (held until the process ends)
        return 0
    except SystemExit as done:
        if isinstance(done.__context__, BrokenPipeError):  # rich ends the process by itself
            return 0
        if done.code is None or isinstance(done.code, int):
            return done.code or 0
        return _fail(str(done.code), BAD_INPUT)
    except Exception as error:  # noqa: BLE001 (the last line of defence: it is sorted and reported)
        if not _signals:  # commands import modules as well
            return _fail(*_sorted(error))
        code = INTERRUPTED
    if code == INTERRUPTED:
        return _fail(STOPPED, INTERRUPTED)
    return code if isinstance(code, int) else 0


def entry() -> None:
    """Entry point of the console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _interrupt)
    if "WORLD_SIZE" not in os.environ:  # torchrun ends its processes itself
        signal.signal(signal.SIGTERM, _interrupt)
    code = main()
    if code == INTERRUPTED:
        # If the signal arrived in a C callback, Python would exit by SIGINT, not with this code.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt(number: int, *_: Any) -> None:
    """Handle Ctrl-C and SIGTERM, which batch systems send.

    The first signal raises. If that is lost, in a callback or in the user's code, or if cleaning up
    takes longer than ten seconds, the process ends, as with a second signal: files are written
    atomically.
    """
    _signals.append(number)
    if len(_signals) == 1:
        Timer(10, _interrupt, [number]).start()
        raise KeyboardInterrupt
    os.write(2, f"\nwball: {STOPPED}\n".encode())
    os._exit(INTERRUPTED)


def _warn(message: Warning | str, *_: Any) -> None:
    """Print a warning on one line, in the format of errors."""
    print(f"wball: warning: {_one_line(str(message))}", file=sys.stderr)


def _fail(message: str, code: int) -> int:
    """Print an error, and return the exit code."""
    if os.environ.get("WBALL_DEBUG"):
        import traceback

        traceback.print_exc()
    print(f"wball: {_one_line(message)}", file=sys.stderr)
    return code


def _one_line(text: str) -> str:
    from wball.storage.names import printable

    return printable(" ".join(text.split()))


def _usage(error: Exception) -> str:
    """The message of a usage error, with the command's help."""
    message = getattr(error, "format_message", lambda: str(error))().rstrip(".")
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message} (see `{context.command_path} --help`)"


def _sorted(error: Exception) -> tuple[str, int]:
    """The message and exit code for an exception raised by a command."""
    from wball.attacks.attack import out_of_memory
    from wball.storage.files import FolderInUse

    if isinstance(error, MemoryError) or out_of_memory(error):
        return "out of memory; use smaller images, or another device", NO_FILE
    if isinstance(error, FolderInUse):
        return str(error), IN_USE
    if isinstance(error, (NotADirectoryError, FileExistsError)) and error.filename:
        return f"{error.filename}: is a file, but a folder is needed", BAD_INPUT
    if isinstance(error, WRONG_INPUT):
        return str(error), BAD_INPUT
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        hint = "; free some space, then rerun the same command to resume"
        return f"{error.strerror or error}{where}{hint * (error.errno == NO_SPACE)}", NO_FILE
    first = (str(error).strip().splitlines() or [""])[0]
    return f"unexpected {type(error).__name__}: {first} (WBALL_DEBUG=1 shows where)", INTERNAL

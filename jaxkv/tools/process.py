"""The process of a command: how it ends, and what it writes to.

A thread waits for SIGINT and SIGTERM, which are blocked everywhere else, and ends the
process with `os._exit`. A Python handler, or `atexit`, could not:

* A handler runs only when the main thread returns from a compiler or a device. An
  exception that it raises in an import, a destructor or a callback of C++ is printed,
  swallowed, or leaves locks held, and the process hangs.
* An exception, and `atexit`, let the interpreter take jax's client apart while
  transfers are in flight. Their threads then read freed memory: a segmentation fault.

A command that ends by itself leaves the interpreter as it is for the same reason: an
error may leave transfers in flight. All output has been written by then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, NoReturn

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
# Errors of the output: a full disk, a reader who has gone.
OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO, errno.EBADF}
_MAX_CLEAN_UP_S = 10.0
_at_end: list[Callable[[], None]] = []
_is_ending = threading.Event()
is_within_line = threading.Event()  # Whether a line of stderr is not ended yet.
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + 13  # As if SIGPIPE had ended it.


def end_on_signals(name: str) -> None:
    """Make SIGINT and SIGTERM end this process with one line and their exit code.

    Only the main thread may call it, before it starts others: they inherit its mask. A
    signal that comes before the thread waits stays pending until it does.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WORDS)
    threading.Thread(
        target=lambda: _end(signal.Signals(signal.sigwait(_WORDS)), name),
        name="jaxkv signals",
        daemon=True,
    ).start()


@contextlib.contextmanager
def at_end(call: Callable[[], None]) -> Iterator[None]:
    """Within this context, call a function before a signal ends the process."""
    _at_end.append(call)
    try:
        yield
    finally:
        if _is_ending.is_set():
            # The clean-up makes this thread fail. Its error is not worth a message.
            threading.Event().wait()
        _at_end.remove(call)


def write_lines_at_once() -> None:
    """Flush every line, and escape characters that the terminal cannot show."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(  # type: ignore[union-attr]
                line_buffering=True, errors="backslashreplace"
            )


def end_process(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if not _flush(stream) and not code:
            code = 1
    os._exit(code)


def _flush(stream: IO[str] | None) -> bool:
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        return False
    return True


def _end(number: signal.Signals, name: str) -> NoReturn:
    line = f"{name}: {_WORDS[number]}\n".encode()
    with contextlib.suppress(OSError):
        if os.isatty(2):
            # Replace the progress bar, which has hidden the cursor.
            line = b"\r\x1b[K\x1b[?25h" + line
        elif is_within_line.is_set():
            is_within_line.clear()
            line = b"\n" + line
        # Not by Python's stream, whose lock the main thread may hold.
        os.write(2, line)
    _is_ending.set()
    for call in reversed(_at_end):
        # In another thread, so that a call that hangs is abandoned.
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(_MAX_CLEAN_UP_S)
    _end_children()
    os._exit(128 + number)


def _end_children() -> None:
    """End the child processes, such as a test of a GPU."""
    folder = "/proc/self/task"
    for task in os.listdir(folder) if os.path.isdir(folder) else ():
        with contextlib.suppress(OSError):
            with open(f"{folder}/{task}/children", encoding="ascii") as file:
                children = file.read().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)

"""The process of a command: how it ends, and what it writes to.

A signal ends it at once, from a thread of its own, rather than by an exception in
whatever code happens to run:

* `KeyboardInterrupt` waits until the main thread is back from a compiler or a device.
  Raised in an import, a destructor or a callback of C++, it is printed, swallowed, or
  leaves locks held, and the process hangs.
* Behind it the interpreter takes jax's client apart while transfers are in flight. The
  threads that run them then read what is gone: a segmentation fault.

The end of a command leaves the interpreter as it is, too, for the same reason: an error
may leave transfers in flight. All output has been written by then.
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
# What the output may fail with: its disk is full, its reader has gone.
OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO, errno.EBADF}
_MAX_CLEAN_UP_S = 10.0
_at_end: list[Callable[[], None]] = []
_is_ending = threading.Event()
is_within_line = threading.Event()  # Whether a line of stderr is not ended yet.
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + 13  # As if SIGPIPE had ended it.


def end_on_signals(name: str) -> None:
    """Make SIGINT and SIGTERM end this process with one line and their exit code.

    Only the main thread may call it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Written at once, even while the main thread, which runs handlers, is blocked.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _WORDS:
        signal.signal(number, _do_nothing)
    # Last, as it takes longest: what comes before it is read from the pipe.
    threading.Thread(
        target=_wait, args=(reader, name), name="jaxkv signals", daemon=True
    ).start()


@contextlib.contextmanager
def at_end(call: Callable[[], None]) -> Iterator[None]:
    """Within this context, call a function before a signal ends the process."""
    _at_end.append(call)
    try:
        yield
    finally:
        if _is_ending.is_set():
            # What this thread fails with now is the end itself.
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
    """End this process, all output being written."""
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


def _do_nothing(number: int, frame: object) -> None:
    pass


def _wait(reader: int, name: str) -> None:
    while True:
        for number in os.read(reader, 1):
            if number in _WORDS:
                _end(signal.Signals(number), name)


def _end(number: signal.Signals, name: str) -> None:
    line = f"{name}: {_WORDS[number]}\n".encode()
    with contextlib.suppress(OSError):
        if os.isatty(2):
            # In place of a bar, which has hidden the cursor.
            line = b"\r\x1b[K\x1b[?25h" + line
        elif is_within_line.is_set():
            is_within_line.clear()
            line = b"\n" + line
        # Past Python's stream, whose lock the main thread may hold.
        os.write(2, line)
    _clean_up()
    _end_children()
    os._exit(128 + number)


def _clean_up() -> None:
    """Run the calls of `at_end`, each for at most `_MAX_CLEAN_UP_S`."""
    _is_ending.set()
    for call in reversed(_at_end):
        # In another thread, so that a call that hangs is abandoned.
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(_MAX_CLEAN_UP_S)


def _end_children() -> None:
    """End what this process has started, such as a test of a GPU."""
    folder = "/proc/self/task"
    for task in os.listdir(folder) if os.path.isdir(folder) else ():
        with contextlib.suppress(OSError):
            with open(f"{folder}/{task}/children", encoding="ascii") as file:
                children = file.read().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)

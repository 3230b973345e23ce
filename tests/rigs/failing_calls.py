"""Make one system call fail: of a file, of a socket, or the start of a thread.

Calls count if they are about a file below one folder, a connection to one port, or a
thread that jaxkv starts. Each is named by its function and by the function of jaxkv
that it is made in or for, so that threads that interleave change no numbers.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import errno
import fcntl
import io
import os
import pathlib
import socket
import sys
import threading
import weakref
from typing import NamedTuple
from unittest import mock

import zmq

import jaxkv
from tests.rigs.waiting import wait_for

_PACKAGE = str(pathlib.Path(jaxkv.__file__).parent) + os.sep
_MAX_FRAMES = 40

SHORT = "short"  # Fewer bytes are moved than were asked for, which is no error.
HANG = "hang"  # The call takes until it is let go of, and then succeeds.
NO_THREAD = "can't start new thread"
TIMED_OUT = "timed out"

_OPEN = errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE
_WRITE = errno.EIO, errno.ENOSPC, errno.ESTALE
_READ = errno.EIO, errno.ESTALE, errno.ETIMEDOUT
_NAME = errno.EACCES, errno.EIO, errno.ENOSPC, errno.ESTALE
_LOOK = errno.EACCES, errno.EIO, errno.ESTALE
_SYNC = errno.EIO, errno.ENOSPC

# Per call, what it may fail with.
ERRORS = {
    "open": (*_OPEN, errno.ENOSPC),
    "read": _READ,
    "flush": _WRITE,
    "fstat": (errno.EIO, errno.ESTALE),
    "scandir.next": (errno.EIO, errno.ESTALE),
    "flock": (errno.EAGAIN, errno.ENOLCK),
    "thread": (NO_THREAD,),
    "connect": (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.EMFILE, TIMED_OUT),
    "send": (errno.EPIPE, errno.ECONNRESET, TIMED_OUT),
    "recv": (errno.ECONNRESET, errno.EIO, TIMED_OUT),
    "zmq.socket": (errno.EMFILE, errno.ENOMEM),
    "zmq.bind": (errno.EADDRINUSE, errno.EACCES),
    "zmq.connect": (errno.EMFILE,),
    "zmq.send": (errno.EAGAIN, errno.ENOMEM),
    "zmq.send_multipart": (errno.EAGAIN, errno.ENOMEM, errno.EHOSTUNREACH),
    "zmq.recv": (errno.EAGAIN, errno.ENOMEM),
    "zmq.recv_multipart": (errno.EAGAIN, errno.ENOMEM),
    "zmq.poll": (errno.EINTR, errno.ENOMEM),
}
for _names, _errors in (
    ("readv pread preadv", (*_READ, SHORT)),
    ("write writev pwrite pwritev", (*_WRITE, SHORT)),
    ("close fsync fdatasync", _SYNC),
    ("ftruncate truncate lseek fstatvfs", (errno.EIO,)),
    ("rename replace link symlink mkdir", _NAME),
    ("rmdir unlink remove", _LOOK),
    ("stat lstat statvfs access readlink entry.stat", _LOOK),
    ("chmod fchmod utime entry.is_file entry.is_dir", (errno.EACCES, errno.EIO)),
    ("chown fchown", (errno.EPERM, errno.EIO)),
    ("scandir listdir", _OPEN),
):
    ERRORS |= dict.fromkeys(_names.split(), _errors)
# ZeroMQ makes its calls to the system in C.
_ZMQ = (
    (zmq.Context, "socket"),
    (zmq.Poller, "poll"),
    *((zmq.Socket, n) for n in ("bind", "connect", "send", "recv")),
    *((zmq.Socket, f"{n}_multipart") for n in ("send", "recv")),
)
HANGS = dict.fromkeys(
    ("open", "readv", "writev", "rename", "unlink", "scandir", "stat", "lstat"), (HANG,)
)
_PATHS = (
    *("rename", "replace", "link", "symlink", "mkdir", "rmdir", "unlink", "remove"),
    *("chmod", "chown", "utime", "stat", "lstat", "statvfs", "access", "readlink"),
    *("truncate", "listdir"),
)
_FILES = (
    *("read", "readv", "pread", "preadv", "write", "writev", "pwrite", "pwritev"),
    *("fsync", "fdatasync", "ftruncate", "lseek", "fchmod", "fchown", "fstat"),
    "fstatvfs",
)


class Fault(NamedTuple):
    call: str  # A name in `ERRORS`.
    place: str  # The function of jaxkv that needs it.
    number: int  # How many such calls in this place succeed before.
    error: int | str  # Of `errno`, or `SHORT`, `HANG`, `NO_THREAD` or `TIMED_OUT`.

    def __str__(self):
        name = (
            self.error if isinstance(self.error, str) else errno.errorcode[self.error]
        )
        return f"{name} of {self.call} no. {self.number} in {self.place}"


class FailingCalls:
    """Counts jaxkv's system calls, and makes `num_times` of them fail in one place.

    Calls count while it is armed, about files below `folder` and connections to `port`.
    """

    def __init__(self, folder, port=None, num_times=1):
        self._folder = os.path.realpath(folder)
        self._num_times = num_times
        self._port = port
        self._lock = threading.Lock()
        self._files = set()
        self._sockets = weakref.WeakSet()
        self._is_armed = False
        self._fault = None
        self._goes_on = threading.Event()
        self.counts = collections.Counter()  # By call and place.
        self.has_failed = self.is_hanging = False

    @contextlib.contextmanager
    def installed(self):
        """Replace the functions of the system for a while."""
        with contextlib.ExitStack() as stack:
            for owner, name, wrapper in self._wrappers():
                stack.enter_context(mock.patch.object(owner, name, wrapper))
            yield self

    @contextlib.contextmanager
    def armed(self):
        """Count calls, and make the fault's call fail."""
        self._is_armed = True
        try:
            yield
        finally:
            self._is_armed = False

    def begin(self, fault=None):
        """Count from zero, with a fault or none."""
        with self._lock:
            self.counts.clear()
            self._fault, self.has_failed = fault, False
            self._files.clear()
            self._goes_on.clear()

    def let_go(self):
        """Release the call that hangs, and wait until it returns."""
        self._goes_on.set()
        wait_for(lambda: not self.is_hanging)

    def _fails(self, call):
        """Count a call; return the error that it must fail with, or None."""
        if not self._is_armed:
            return None
        place = _place()
        if place is None:
            return None
        with self._lock:
            number = self.counts[call, place]
            self.counts[call, place] += 1
            fault = self._fault
            if fault is None or fault[:2] != (call, place):
                return None
            if not 0 <= number - fault.number < self._num_times:
                return None
            self.has_failed = True
            return fault.error

    def _raise(self, call, path=None):
        error = self._fails(call)
        if error == HANG:
            if threading.current_thread() is threading.main_thread():
                raise AssertionError("the driver waits for a call to the system")
            self.is_hanging = True
            self._goes_on.wait()
            self.is_hanging = False
        elif error not in (None, SHORT):
            raise _error(error, path)
        return error

    def _is_below(self, path, named=None):
        named = named or {}
        if named.get("dir_fd", named.get("src_dir_fd")) in self._files:
            return True
        if isinstance(path, int):
            return path in self._files
        try:
            text = os.fsdecode(path)
        except TypeError:
            return False
        return text.startswith(self._folder)

    def _wrappers(self):
        for name in _PATHS:
            yield os, name, self._of_path(name, getattr(os, name))
        for name in _FILES:
            yield os, name, self._of_file(name, getattr(os, name))
        yield fcntl, "flock", self._of_file("flock", fcntl.flock)
        yield os, "open", self._open(os.open)
        yield os, "close", self._close(os.close)
        yield os, "scandir", self._scandir(os.scandir)
        open_file = self._open_file(io.open)
        yield io, "open", open_file
        yield builtins, "open", open_file
        start = self._start_thread(threading._start_new_thread)
        yield threading, "_start_new_thread", start
        yield sys.modules["_thread"], "start_new_thread", start
        for owner, name in _ZMQ:
            yield owner, name, self._of_zmq(f"zmq.{name}", getattr(owner, name))
        if self._port is not None:
            yield socket.socket, "connect", self._connect(socket.socket.connect)
            for name in ("send", "sendall"):
                yield socket.socket, name, self._send(getattr(socket.socket, name))
            for name in ("recv", "recv_into"):
                yield socket.socket, name, self._recv(getattr(socket.socket, name))

    def _of_path(self, name, call):
        def wrapper(path, *args, **named):
            # `os.rename(source, target)` is about the first, if not about both.
            if self._is_below(path, named):
                self._raise(name, None if isinstance(path, int) else path)
            return call(path, *args, **named)

        return wrapper

    def _of_file(self, name, call):
        def wrapper(file, *args, **named):
            if file in self._files and self._raise(name) == SHORT:
                return _call_for_less(name, call, file, *args)
            return call(file, *args, **named)

        return wrapper

    def _open(self, call):
        def wrapper(path, *args, **named):
            if not self._is_below(path, named):
                return call(path, *args, **named)
            self._raise("open", path)
            file = call(path, *args, **named)
            self._files.add(file)
            return file

        return wrapper

    def _close(self, call):
        def wrapper(file):
            if file not in self._files:
                return call(file)
            self._files.discard(file)
            call(file)  # An error of `close` leaves nothing open.
            self._raise("close")

        return wrapper

    def _scandir(self, call):
        def wrapper(path="."):
            if not self._is_below(path):
                return call(path)
            self._raise("scandir", path)
            return _Entries(self, call(path))

        return wrapper

    def _open_file(self, call):
        def wrapper(path, mode="r", *args, **named):
            if not self._is_below(path):
                return call(path, mode, *args, **named)
            if isinstance(path, int):
                self._files.discard(path)  # The object closes it.
            else:
                self._raise("open", path)
            return _File(self, call(path, mode, *args, **named))

        return wrapper

    def _start_thread(self, call):
        def wrapper(*args, **named):
            self._raise("thread")
            return call(*args, **named)

        return wrapper

    def _of_zmq(self, name, call):
        def wrapper(*args, **named):
            # A message of several frames goes as a whole, or not at all.
            is_frame = sys._getframe(1).f_code.co_name.endswith("_multipart")
            error = None if is_frame else self._fails(name)
            if error is not None:
                raise zmq.ZMQError(error)
            return call(*args, **named)

        return wrapper

    def _connect(self, call):
        def wrapper(sock, address):
            if isinstance(address, tuple) and address[1] == self._port:
                self._sockets.add(sock)
                self._raise("connect", address)
            return call(sock, address)

        return wrapper

    def _send(self, call):
        def wrapper(sock, data, *args):
            if sock in self._sockets:
                error = self._fails("send")
                if error is not None:
                    call(sock, data[: len(data) // 2], *args)
                    self._break(sock, error)
            return call(sock, data, *args)

        return wrapper

    def _recv(self, call):
        def wrapper(sock, *args):
            if sock in self._sockets:
                error = self._fails("recv")
                if error is not None:
                    self._break(sock, error)
            return call(sock, *args)

        return wrapper

    def _break(self, sock, error):
        """Break a socket: it may still answer after a timeout, not after a reset."""
        if error != TIMED_OUT:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        raise _error(error)


class _Wrapped:
    """A file or socket whose calls may fail."""

    def __init__(self, calls, real):
        self._calls, self._real = calls, real

    def __getattr__(self, name):
        return getattr(self._real, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _File(_Wrapped):
    def __iter__(self):
        self._calls._raise("read")
        return iter(self._real)

    def read(self, *args):
        self._calls._raise("read")
        return self._real.read(*args)

    def write(self, data):
        error = self._calls._fails("write")
        if error not in (None, SHORT):  # A file object writes all, or fails.
            raise _error(error)
        return self._real.write(data)

    def flush(self):
        self._calls._raise("flush")
        return self._real.flush()

    def close(self):
        is_open = not self._real.closed
        self._real.close()
        if is_open:
            self._calls._raise("close")


class _Entries(_Wrapped):
    def __iter__(self):
        return self

    def __next__(self):
        self._calls._raise("scandir.next")
        return _Entry(self._calls, next(self._real))


class _Entry(_Wrapped):
    """A directory entry whose type may take a system call."""

    def __fspath__(self):
        return self.path

    def is_file(self, **named):
        self._calls._raise("entry.is_file", self.path)
        return self._real.is_file(**named)

    def is_dir(self, **named):
        self._calls._raise("entry.is_dir", self.path)
        return self._real.is_dir(**named)

    def stat(self, **named):
        self._calls._raise("entry.stat", self.path)
        return self._real.stat(**named)


def _call_for_less(name, call, file, data, *args):
    """Move a part of the bytes, as a signal or a full pipe may."""
    if name in ("read", "pread"):
        return call(file, max(1, data // 2), *args)
    if name in ("write", "pwrite"):
        return call(file, data[: max(1, len(data) // 2)], *args)
    pieces = [piece for piece in map(memoryview, data) if len(piece)]
    if not pieces:
        return call(file, data, *args)
    first = pieces[0].cast("B")
    return call(file, [first[: max(1, len(first) // 2)]], *args)


def _error(error, path=None):
    if error == NO_THREAD:
        return RuntimeError(NO_THREAD)
    if error == TIMED_OUT:
        return TimeoutError(TIMED_OUT)
    if path is None or isinstance(path, tuple):
        return OSError(error, os.strerror(error))
    return OSError(error, os.strerror(error), os.fsdecode(path))


def _place():
    """Return the jaxkv function that makes the call; None for other callers."""
    frame = sys._getframe(3)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            name = path[len(_PACKAGE) : -3].replace(os.sep, ".")
            return f"{name}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return None


def faults(counts, errors=ERRORS, *, all_errors=False):
    """Yield each fault of the calls that a life without faults has counted.

    Unless `all_errors`, only the first call in each place fails in each of its ways.
    """
    for (call, place), num in sorted(counts.items()):
        for number in range(num):
            ways = errors.get(call, ())
            if number and ways and not all_errors:
                ways = (ways[number % len(ways)],)
            for error in ways:
                yield Fault(call, place, number, error)

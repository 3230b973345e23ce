"""The trace file of recorded requests: rotated by size, locked, without partial lines.

If a file has no room for the next lines, FILE becomes FILE.1, FILE.1 becomes FILE.2,
and a new FILE begins. A lock keeps other processes from writing it. If a write fails
halfway, e.g. on a full disk, the file is truncated to its last whole line. Each append
to a ".gz" file is a gzip member: after a kill, all complete members can be read.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
from collections.abc import Callable

from jaxkv._util import shown
from jaxkv._util.files import open_file, resolved, write_all

try:
    import fcntl
except ImportError:  # Only Unix has it; elsewhere nothing is locked.
    fcntl = None  # type: ignore[assignment]

_IN_USE = "another engine or process records to it"
_GZIP_LEVEL = 6  # Twice as fast as the default, and the files are as small.


class TraceFile:
    """Appends lines to a file, and rotates it when it is full.

    A file that exists at the start is rotated first. `header` returns the first lines
    of a file, given the number of files before it.
    """

    def __init__(
        self, path: str, max_bytes: int, max_files: int, header: Callable[[int], bytes]
    ) -> None:
        self.path, self._header = path, header
        self._max_bytes, self._max_files = max_bytes, max_files
        self._is_zipped = path.endswith(".gz")
        self._num_begun = self._num_bytes = 0
        self._fd = -1
        try:
            # Rotate the target of a symbolic link, not the link.
            self.path = resolved(path)
            self._rotate_existing()
            self._begin()
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or errno.EINVAL
            why = getattr(error, "strerror", None) or str(error)
            raise OSError(
                number,
                f"cannot record to {shown(path)} ({why}); name a file in a folder that "
                "exists and that you may write to, and one that nobody else writes",
            ) from None

    def append(self, data: bytes) -> None:
        """Append lines: all of them, or none and raise OSError."""
        if self._fd < 0:
            # An earlier call failed to close or rotate the file, or to open the next.
            self._rotate_existing()
            self._begin()
        packed = self._pack(data)
        head = self._pack(self._header(self._num_begun))
        if len(head) + len(packed) > self._max_bytes:
            raise OSError(errno.EFBIG, "one request is larger than a file may be")
        if self._num_bytes and self._num_bytes + len(packed) > self._max_bytes:
            self.close()
            self._rotate()
            self._begin()
        if not self._num_bytes:
            packed = head + packed
        self._write(packed)

    def close(self) -> None:
        """Close the file, so that others may write it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # Even a failed close frees it.
            os.close(fd)

    def _pack(self, data: bytes) -> bytes:
        return gzip.compress(data, _GZIP_LEVEL, mtime=0) if self._is_zipped else data

    def _write(self, packed: bytes) -> None:
        try:
            write_all(self._fd, [packed])
        except OSError:
            self._truncate()
            raise
        if not self._num_bytes:
            self._num_begun += 1
        self._num_bytes += len(packed)

    def _truncate(self) -> None:
        """Truncate the file to its last whole line; close it if that fails."""
        try:
            os.ftruncate(self._fd, self._num_bytes)
            os.lseek(self._fd, self._num_bytes, os.SEEK_SET)
        except OSError:
            with contextlib.suppress(OSError):
                self.close()

    def _begin(self) -> None:
        """Create and lock the file, which must not exist."""
        # Private: a trace shows which requests share a prefix, and when they came.
        fd = open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            lock(fd)
            if not os.path.samestat(os.fstat(fd), os.stat(self.path)):
                # Another process has just rotated it.
                raise OSError(errno.EBUSY, _IN_USE)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._num_bytes = fd, 0

    def _rotate_existing(self) -> None:
        try:
            fd = open_file(self.path, os.O_WRONLY)
        except FileNotFoundError:
            return
        try:
            lock(fd)
            if os.fstat(fd).st_size:
                self._rotate()
            else:
                os.unlink(self.path)
        finally:
            os.close(fd)

    def _rotate(self) -> None:
        names = [self.path, *(f"{self.path}.{n}" for n in range(1, self._max_files))]
        # Stop at the first free name, such as one that a failed rotation has left.
        free = (n for n, name in enumerate(names) if not os.path.lexists(name))
        names = names[: next(free, len(names)) + 1]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)
        if self._max_files == 1:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def lock(fd: int, reason: str = _IN_USE) -> None:
    """Lock a file until it is closed; raise OSError if another process has the lock."""
    if fcntl is None:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, reason) from None
    except OSError:
        pass  # The file system has no locks, like some network file systems.

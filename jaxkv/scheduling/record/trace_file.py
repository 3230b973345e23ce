"""The file that requests are recorded in: of bounded size, whole, and of one process.

If a file has no room for the next part, FILE becomes FILE.1, FILE.1 becomes FILE.2, and
a new FILE begins. A lock keeps other processes from writing it. A part that could not
be written whole, as the disk is full, is cut off again. A file whose name ends in ".gz"
is a row of whole gzip members: after a kill it can be read up to its last member.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import stat
from collections.abc import Callable

from jaxkv._util import shown

try:
    import fcntl
except ImportError:  # Only Unix has it; elsewhere nothing is locked.
    fcntl = None  # type: ignore[assignment]

_LEVEL = 6  # Of gzip: twice as fast as the default, and the files are as small.


class TraceFile:
    """Appends to a file, and begins another one when it is full.

    An existing file is rotated away. `header` returns how a file begins, given how many
    came before.
    """

    def __init__(
        self,
        path: str,
        max_bytes: int,
        max_files: int,
        header: Callable[[int], bytes],
    ) -> None:
        self.path, self._header = path, header
        self._max_bytes, self._max_files = max_bytes, max_files
        self._is_zipped = path.endswith(".gz")
        self._num_begun = self._num_bytes = 0
        self._fd = -1
        try:
            # What a link points to, so that the link stays.
            self.path = os.path.realpath(path)
            self._move_old_away()
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
        """Append whole lines; all of them, or raise OSError."""
        if self._fd < 0:
            # The last file could not be closed, moved away or followed by another.
            self._move_old_away()
            self._begin()
        piece = self._pack(data)
        head = self._pack(self._header(self._num_begun))
        if len(head) + len(piece) > self._max_bytes:
            raise OSError(errno.EFBIG, "one request is larger than a file may be")
        if self._num_bytes and self._num_bytes + len(piece) > self._max_bytes:
            self.close()
            self._rotate()
            self._begin()
        if not self._num_bytes:
            piece = head + piece
        self._write(piece)

    def close(self) -> None:
        """Close the file, so that others may write it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # Closed even if that fails.
            os.close(fd)

    def _pack(self, data: bytes) -> bytes:
        return gzip.compress(data, _LEVEL, mtime=0) if self._is_zipped else data

    def _write(self, piece: bytes) -> None:
        done = 0
        try:
            while done < len(piece):
                done += os.write(self._fd, piece[done:])
        except OSError:
            self._cut_off()
            raise
        if not self._num_bytes:
            self._num_begun += 1
        self._num_bytes += done

    def _cut_off(self) -> None:
        """Cut the file behind its last whole line; if that fails, close it."""
        try:
            os.ftruncate(self._fd, self._num_bytes)
            os.lseek(self._fd, self._num_bytes, os.SEEK_SET)
        except OSError:
            with contextlib.suppress(OSError):
                self.close()

    def _begin(self) -> None:
        """Begin a file that does not exist yet."""
        # A reader would learn when who shares which prefix.
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _lock(fd)
            if not os.path.samestat(os.fstat(fd), os.stat(self.path)):
                raise _in_use()  # It has just been rotated away.
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._num_bytes = fd, 0

    def _move_old_away(self) -> None:
        try:
            # Without waiting, should it be a pipe.
            fd = os.open(self.path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no plain file")
            _lock(fd)
            if status.st_size:
                self._rotate()
            else:
                os.unlink(self.path)
        finally:
            os.close(fd)

    def _rotate(self) -> None:
        names = [self.path, *(f"{self.path}.{n}" for n in range(1, self._max_files))]
        # Up to the first free name: a rotation that failed halfway has left a gap.
        free = (n for n, name in enumerate(names) if not os.path.lexists(name))
        names = names[: next(free, len(names)) + 1]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)
        if self._max_files == 1:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def _lock(fd: int) -> None:
    """Lock a file as long as it is open; raise OSError if another has it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use() from None
    except OSError:
        pass  # A file system without locks, such as some that go over a network.


def _in_use() -> OSError:
    return OSError(errno.EBUSY, "another engine or process records to it")

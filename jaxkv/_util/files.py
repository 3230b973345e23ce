"""Files and folders where others may put links: what was opened is checked, no name."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Iterator, Sequence

_MAX_PIECES = 512  # POSIX lets `writev` refuse more than 1,024.
_MAX_LINKS = 40
# To pass through a folder takes no permission to list it.
_PASS = getattr(os, "O_PATH", os.O_RDONLY)
_ITSELF = os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(PermissionError):
    """A file or folder that another user may have written."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.EPERM, why, path)


def open_file(
    path: str | os.PathLike[str],
    flags: int,
    mode: int = 0o600,
    *,
    dir_fd: int | None = None,
    follow: bool = False,
) -> int:
    """Open a regular file; OSError for a pipe or device and, without `follow`, a link.

    A pipe without a reader would block.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise OSError(errno.EINVAL, "it is not a plain file", path) from None
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "it is not a plain file", path)


def read_file(
    path: str | os.PathLike[str],
    max_bytes: int,
    *,
    dir_fd: int | None = None,
    is_trusted: bool = False,
) -> bytes:
    """Read a regular file; OSError if it has more than `max_bytes`.

    With `is_trusted`, UntrustedError if others may have written it; with `dir_fd`, a
    link is not followed.
    """
    fd = open_file(path, os.O_RDONLY, dir_fd=dir_fd, follow=dir_fd is None)
    with os.fdopen(fd, "rb") as file:
        if is_trusted:
            check_trusted(os.fspath(path), fd)
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", path)
    return data


def read_input(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a file or pipe that the user names; ValueError beyond `max_bytes`."""
    with open(os.fspath(path), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return data


def write_all(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write all bytes; OSError if the file system accepts none of them."""
    left = [memoryview(piece) for piece in pieces if len(piece)]
    while left:
        num_bytes = os.writev(fd, left[:_MAX_PIECES])
        if num_bytes <= 0:
            raise OSError(errno.EIO, "the file system wrote 0 bytes")
        while left and num_bytes >= len(left[0]):
            num_bytes -= len(left.pop(0))
        if num_bytes:
            left[0] = left[0][num_bytes:]


def replace_file(
    path: str | os.PathLike[str],
    data: bytes,
    mode: int = 0o600,
    *,
    dir_fd: int | None = None,
    exact_mode: int | None = None,
    overwrite: bool = True,
) -> None:
    """Write a file that appears whole; after an OSError, the old one is unchanged.

    A link at `path` is replaced, not followed. The umask applies to `mode`, not to
    `exact_mode`. Without `overwrite`, a file that exists is kept.
    """
    draft = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}.draft")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ITSELF
    fd = os.open(draft, flags, mode, dir_fd=dir_fd)
    try:
        try:
            if exact_mode is not None:
                os.fchmod(fd, exact_mode)
            write_all(fd, [data])
        finally:
            os.close(fd)
        if overwrite and dir_fd is None:
            os.replace(draft, path)
            return
        if overwrite:
            os.replace(draft, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            return
        with contextlib.suppress(FileExistsError):
            os.link(draft, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        os.unlink(draft, dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=dir_fd)
        raise


def places_on(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the folders and links on a path, and on the paths of the links' targets."""
    current, num_links = "/", 0
    rest = os.path.join(os.getcwd(), path).split("/")[::-1]
    while rest:
        name = rest.pop()
        if name == "..":
            current = os.path.dirname(current)
        elif name not in ("", "."):
            place = os.path.join(current, name)
            yield place
            if not os.path.islink(place):
                current = place
                continue
            num_links += 1
            if num_links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(place)
            current = "/" if os.path.isabs(target) else current
            rest += target.split("/")[::-1]


def delete_oldest(folder: int, max_bytes: int) -> None:
    """Delete the oldest files of an open folder beyond `max_bytes`."""
    with contextlib.suppress(OSError):
        files = [(os.lstat(name, dir_fd=folder), name) for name in os.listdir(folder)]
        files.sort(key=lambda file: file[0].st_mtime_ns, reverse=True)
        sizes = itertools.accumulate(status.st_size for status, _ in files)
        for total, (_, name) in zip(sizes, files, strict=True):
            if total > max_bytes:
                os.unlink(name, dir_fd=folder)


def resolved(path: str | os.PathLike[str]) -> str:
    """Return a path without links; UntrustedError if another user has made a link."""
    has_link = False
    for place in places_on(path):
        try:
            status = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            break
        if stat.S_ISLNK(status.st_mode):
            _check_owner(place, status, "a link")
            has_link = True
    # `realpath` ignores errors.
    return os.path.realpath(path) if has_link else os.path.abspath(path)


@contextlib.contextmanager
def trusted_folder(path: str | os.PathLike[str], unchecked: str = "/") -> Iterator[int]:
    """Open a folder that only this user and root can change; make it if missing.

    Folders above may be sticky and open to all, such as /tmp. `unchecked` and folders
    above it may be anyone's. UntrustedError: others may change the folder.
    """
    names = resolved(path).split("/")[1:]
    fd, place = os.open("/", _PASS | os.O_DIRECTORY | os.O_CLOEXEC), ""
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: os.close(fd))
        for number, name in enumerate(names, 1):
            parent, place, is_above = fd, f"{place}/{name}", number < len(names)
            fd = open_folder(name, dir_fd=parent, to_pass=is_above, make_mode=0o755)
            os.close(parent)
            if unchecked == "/" or place.startswith(f"{unchecked}/"):
                check_trusted(place, fd, may_be_sticky=is_above)
        yield fd


def open_folder(
    name: str | os.PathLike[str],
    *,
    dir_fd: int | None = None,
    to_pass: bool = False,
    make_mode: int | None = None,
    is_exact: bool = False,
) -> int:
    """Open a folder, not a link to one; with `make_mode`, make it if it is missing.

    The umask applies unless `is_exact`.
    """
    flags = (_PASS if to_pass else os.O_RDONLY) | os.O_DIRECTORY | _ITSELF
    try:
        return os.open(name, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        if make_mode is None:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, make_mode, dir_fd=dir_fd)
        fd = os.open(name, flags, dir_fd=dir_fd)
        try:
            status = os.fstat(fd)
            # Another user may have put another folder of this user in its place.
            if is_exact and status.st_uid == os.geteuid() and not os.listdir(fd):
                # Keep the bit that makes files inherit the folder's group.
                os.fchmod(fd, make_mode | status.st_mode & stat.S_ISGID)
        except BaseException:
            os.close(fd)
            raise
        return fd


def check_trusted(path: str, fd: int, *, may_be_sticky: bool = False) -> None:
    """Raise UntrustedError if others may write to an open file or folder."""
    status = os.fstat(fd)
    _check_owner(path, status)
    is_sticky = may_be_sticky and bool(status.st_mode & stat.S_ISVTX)
    if status.st_mode & _OTHERS_WRITE and not is_sticky:
        raise UntrustedError(path, "other users may write to it")


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise UntrustedError if others may write to a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_trusted(os.fspath(path), fd)
    finally:
        os.close(fd)


def _check_owner(path: str, status: os.stat_result, what: str = "it") -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedError(path, f"{what} belongs to user {status.st_uid}")

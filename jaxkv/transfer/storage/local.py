"""A folder of this machine, or one that a file server mounts here."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence

from jaxkv._util import check_whole, shown
from jaxkv._util.files import open_file, open_folder, write_all
from jaxkv.transfer.storage.buffers import Buffers
from jaxkv.transfer.storage.store import (
    Blob,
    Piece,
    StoreError,
    attempt,
    check_name,
    error_of,
    is_name,
)

TEMPORARY = re.compile(r"\.[0-9a-f]{16}-[0-9]+")
"""Files that are being written. No name of an object begins with a dot."""
_STALE_S = 3600.0
_PAGE = 4096
_KEPT_BYTES = 128 << 20
# Spaces and letters of any script stay readable.
_IN_URLS = str.maketrans({mark: f"%{ord(mark):X}" for mark in "%?#@"})
# The content of links, pipes and devices, which `decode` refuses as foreign
_NO_FILE = b"no file"


class LocalStore:
    """A store in a folder: a file per object.

    A file is written under a temporary name and renamed, so that it appears whole. A
    later `list` removes what a killed writer has left. Files are not synced: after a
    power failure one may be missing or damaged, which `decode` notices.

    A missing folder is made. Files have `mode`, which must be ``0o600`` or add others,
    such as ``0o660`` for a group; folders get it with permission to enter.
    StoreError: the folder cannot be made or read.
    """

    def __init__(self, path: str, mode: int = 0o600) -> None:
        check_whole(0, 0o777, mode=mode)
        self._root = os.path.abspath(path)
        self._mode = mode
        self._folder_mode = folder_mode(mode)
        self._numbers = itertools.count()
        # Unlike a process id, it is unique among machines and later processes.
        self._token = os.urandom(8).hex()
        try:
            with self._opened(self._root), os.scandir(self._root):
                pass
        except OSError as error:
            raise StoreError(
                error_of(error).kind,
                f"storage={shown(self._root)}: {error.strerror}; name a folder that "
                "can be made and read",
            ) from error
        self._buffers = Buffers(_KEPT_BYTES)

    @property
    def url(self) -> str:
        return f"file://{self._root.translate(_IN_URLS)}"

    @property
    def path(self) -> str:
        return self._root

    @property
    def free_bytes(self) -> int:
        """Bytes that this user may still write on the file system."""
        file_system = os.statvfs(self._root)
        return file_system.f_bavail * file_system.f_frsize

    def get(
        self, names: Sequence[str], max_bytes: int
    ) -> list[Piece | StoreError | None]:
        paths = list(map(self._path, names))
        return [attempt(_read, self._buffers, max_bytes, path) for path in paths]

    def put(self, items: Sequence[tuple[str, Blob]]) -> list[StoreError | None]:
        files = [(self._path(name), blob) for name, blob in items]
        return [attempt(self._write, *file) for file in files]

    def exists(self, names: Sequence[str]) -> list[bool | StoreError]:
        return [attempt(_exists, path) for path in list(map(self._path, names))]

    def delete(self, names: Sequence[str]) -> list[StoreError | None]:
        return [attempt(_delete, path) for path in list(map(self._path, names))]

    def list(self, folder: str) -> Iterator[list[str]]:
        """List the files of a folder, without unreadable subfolders."""
        path = self._path(folder)
        time_s = functools.cache(functools.partial(self._server_time_s, path))
        try:
            yield from _pages(path, folder, time_s)
        except OSError as error:
            raise error_of(error) from error

    def times(self, names: Sequence[str]) -> Sequence[int] | None:
        """Return when files were last written, or read if that is recorded."""
        return [
            0 if status is None else max(status.st_mtime_ns, status.st_atime_ns) // 1000
            for status in map(self._status, names)
        ]

    def sizes(self, names: Sequence[str]) -> Sequence[int | None]:
        statuses = map(self._status, names)
        return [None if status is None else status.st_size for status in statuses]

    def _status(self, name: str) -> os.stat_result | None:
        try:
            return os.lstat(self._path(name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise error_of(error) from error

    def close(self) -> None:
        """Keep everything."""

    def _server_time_s(self, folder: str) -> float:
        """Return the time by the clock of the file system, perhaps a file server's."""
        with self._opened(folder) as fd:
            name, file = self._create(fd)
            try:
                return os.fstat(file).st_mtime
            finally:
                os.close(file)
                os.unlink(name, dir_fd=fd)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _write(self, path: str, blob: Blob) -> None:
        # In the same folder: renames between folders wait for one another.
        folder, name = os.path.split(path)
        with self._opened(folder) as fd:
            temporary, file = self._create(fd)
            rename = functools.partial(os.rename, src_dir_fd=fd, dst_dir_fd=fd)
            try:
                try:
                    if self._mode & 0o077:
                        os.fchmod(file, self._mode)  # Regardless of the umask.
                    write_all(file, blob)
                finally:
                    os.close(file)
                try:
                    rename(temporary, name)
                except IsADirectoryError:
                    # A folder has this name; keep it, as its content may matter.
                    rename(name, f"{temporary}.aside")
                    rename(temporary, name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=fd)
                raise

    def _create(self, folder: int) -> tuple[str, int]:
        name = f".{self._token}-{next(self._numbers)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        return name, open_file(name, flags, self._mode, dir_fd=folder)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        """Open a folder; make it and its parents if missing.

        Links below the root are not followed: others may put them into a shared folder.
        """
        fd, flags = -1, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if len(path) <= len(self._root):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, flags)
        if fd < 0:
            # `makedirs` would make the parents by the umask: anyone who can write to a
            # parent can replace this folder.
            parent, name = os.path.split(path)
            mode, is_exact = self._folder_mode, bool(self._mode & 0o077)
            with self._opened(parent) as above:
                fd = open_folder(name, dir_fd=above, make_mode=mode, is_exact=is_exact)
        try:
            yield fd
        finally:
            os.close(fd)


def folder_mode(mode: int) -> int:
    """Return the permissions of folders for those of files: readers may enter."""
    return 0o100 | mode | (mode & 0o444) >> 2


def _read(buffers: Buffers, max_bytes: int, path: str) -> Piece | None:
    # Another user may have put anything there: do not follow a link, wait for a pipe or
    # read a file of terabytes.
    try:
        file = open_file(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EISDIR):
            return _NO_FILE
        raise
    try:
        num_bytes = min(os.fstat(file).st_size, max_bytes)
        return _fill(file, buffers.take(num_bytes))
    finally:
        os.close(file)


def _fill(file: int, data: memoryview) -> memoryview:
    done = 0
    while done < len(data):
        num_bytes = os.readv(file, [data[done:]])
        if not num_bytes:
            break  # The file was truncated meanwhile.
        done += num_bytes
    return data[:done]


def _exists(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _delete(path: str) -> None:
    # A folder is not an object.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        os.unlink(path)


def _pages(
    path: str, name: str, server_time_s: Callable[[], float]
) -> Iterator[list[str]]:
    """Yield the names of the files in a folder and in those below it."""
    folders: list[str] = []
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                _remove_if_stale(entry, server_time_s)
            # The directory entry has the type; a `stat` of each file would take
            # longer than all the rest.
            elif entry.is_file(follow_symlinks=False):
                names.append(f"{name}/{entry.name}")
            elif entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
    for first in range(0, len(names), _PAGE):
        yield names[first : first + _PAGE]
    failure: OSError | None = None
    for folder in sorted(folders):
        # Other folders have no objects, and may be nested too deeply to list.
        if not is_name(f"{name}/{folder}"):
            continue
        try:
            below = f"{path}/{folder}", f"{name}/{folder}"
            yield from _pages(*below, server_time_s)
        except PermissionError:
            pass  # Its objects cannot be read either.
        except OSError as error:
            failure = failure or error  # List the other folders first.
    if failure is not None:
        raise failure


def _remove_if_stale(
    entry: os.DirEntry[str], server_time_s: Callable[[], float]
) -> None:
    """Remove a file that a killed process was writing."""
    if not TEMPORARY.fullmatch(entry.name):
        return
    with contextlib.suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and status.st_mtime < server_time_s() - _STALE_S:
            os.unlink(entry.path)

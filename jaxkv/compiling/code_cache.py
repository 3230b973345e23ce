"""A disk cache of machine code, so that only the first process on a machine compiles.

Each function has one file per signature, named by a digest of everything that
determines its code. There is no index that could contradict the files, and a file under
its final name is complete. The folder is `NUMBA_CACHE_DIR`. If that is not set, it is
in the package or, if the package is not writable, in the user's cache folder. If no
folder is writable, every process compiles.

Reading a file runs its code, so only this user and root may be able to change it and
its folder. If others can change `NUMBA_CACHE_DIR`, the user's cache folder replaces it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import pathlib
import pickle
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import types
from numba.core import config, sigutils
from numba.core.caching import NullCache, _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

from jaxkv._util.files import (
    UntrustedError,
    delete_oldest,
    read_file,
    replace_file,
    trusted_folder,
)

_log = logging.getLogger(__name__)

_FORMAT = 1  # Version of files and their names; a new number invalidates all files.
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_MAX_FOLDER_BYTES = 256 << 20  # Some ten versions of jaxkv, with all policies.
_MAX_FILE_BYTES = 16 << 20  # Sixty times the largest.
_PACKAGE = pathlib.Path(__file__).parents[1]
_done: set[object] = set()  # Folders without old files, and warnings.

# In a digest, versions of these libraries stand for their code.
_LIBRARIES = frozenset(("numba", "numpy", "llvmlite", "jax", "jaxlib"))
_VERSIONS = _FORMAT, numba.__version__, llvmlite.__version__, np.__version__

# A digest of this package's code, read at import, before its files can be replaced.
_MACHINERY = hashlib.sha256(
    b"".join(
        path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("*.py"))
    )
).digest()


def digest_of(functions: Iterable[Any]) -> bytes:
    """Return a digest of functions and of everything that they call or read.

    It covers the functions in memory, which Numba compiles, not their files, which may
    be replaced while the process runs. It does not cover `numba.extending.overload`.
    """
    hasher = hashlib.sha256()
    pending = list(functions)
    # Holds references, so that no other function gets the same id.
    visited: dict[int, Any] = {}
    for function in pending:
        function = _function_of(function)
        if id(function) not in visited:
            visited[id(function)] = function
            hasher.update(repr(tuple(_inputs(function, pending))).encode())
    return hasher.digest()


def _function_of(value: Any) -> Any:
    """Return the Python function that Numba wrapped, or the value itself."""
    for name in ("py_func", "_defn"):
        value = getattr(value, name, value)
    return value


def _inputs(function: FunctionType, pending: list[Any]) -> Iterator[object]:
    """Yield all inputs of the code; add the functions that it calls to `pending`."""
    names = _names_in(function.__code__)
    yield _of_code(function.__code__)
    for name in names:
        if name in function.__globals__:
            yield name, _describe(function.__globals__[name], names, pending)
    for cell in function.__closure__ or ():
        yield _describe(cell.cell_contents, names, pending)
    yield _describe(function.__defaults__, names, pending)


def _of_code(value: Any) -> object:
    """Describe code, or one of its constants."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, tuple(map(_of_code, value.co_consts))
    # The order of a set differs from process to process.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _names_in(code: CodeType) -> tuple[str, ...]:
    inner = (_names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return tuple(itertools.chain(code.co_names, *inner))


def _describe(value: Any, names: tuple[str, ...], pending: list[Any]) -> object:
    """Describe a value that code reads, with the same result in every process.

    The code may read any of `names` from the value. Functions are added to `pending`.
    """
    if isinstance(value, int | float | complex | str | bytes | np.generic | None):
        return type(value).__name__, repr(value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return tuple(_describe(item, names, pending) for item in value)
    if isinstance(value, types.Type):  # Such as a function of a C library.
        return str(value), str(value.key)
    kind = type(value).__name__
    function = _function_of(value)
    if isinstance(function, FunctionType):
        if not _is_of_library(function.__module__):
            pending.append(function)
            options = sorted(getattr(value, "targetoptions", {}).items())
            return kind, function.__qualname__, str(options)
    elif isinstance(value, ModuleType | type):
        where = value.__name__ if isinstance(value, ModuleType) else value.__module__
        if not _is_of_library(where):
            inner = vars(value)
            read = [name for name in names if name in inner]
            members = [(name, _describe(inner[name], names, pending)) for name in read]
            return kind, value.__name__, members
    return kind, getattr(value, "__module__", ""), getattr(value, "__name__", "")


def _is_of_library(module: str | None) -> bool:
    package = (module or "").partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


class CodeCache(_Cache):
    """The cached machine code of a Numba dispatcher, as files.

    If a file cannot be read, the function is compiled; if it cannot be written, the
    code is not cached. No call fails, and a warning is logged once per process.
    """

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher

    @property
    def cache_path(self) -> str:
        """The preferred folder."""
        return str(_folders()[0])

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Read the code for a signature; None if it is not cached."""
        target_context.refresh()
        args, _ = sigutils.normalize_signature(sig)
        name = self._file_name(args, target_context.codegen())
        for folder in _folders():
            try:
                with _opened(folder) as fd:
                    data = read_file(name, _MAX_FILE_BYTES, dir_fd=fd, is_trusted=True)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                _warn_once("read", error)
                continue
            body = data[_CHECKSUM_BYTES:]
            if data[:_CHECKSUM_BYTES] != _checksum_of(name, body):
                continue  # Damaged, such as by a power loss.
            try:
                code = CompileResult._rebuild(target_context, *pickle.loads(body))
            except Exception:  # Another program wrote the file.
                continue
            if tuple(code.signature.args) == tuple(args):
                return code
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the code for a signature to the first folder that accepts it."""
        if data.library.has_dynamic_globals:
            return  # The code contains addresses of this process.
        args, _ = sigutils.normalize_signature(sig)
        name = self._file_name(args, data.codegen)
        body = dumps(data._reduce())
        errors = []
        for folder in _folders():
            try:
                with _opened(folder) as fd:
                    content = _checksum_of(name, body) + body
                    replace_file(name, content, 0o644, dir_fd=fd)
                    if folder not in _done:
                        _done.add(folder)
                        delete_oldest(fd, _MAX_FOLDER_BYTES)
                return
            except OSError as error:
                errors.append(error)
        _warn_once("cached", errors[0])

    def enable(self) -> None:
        """Do nothing: the cache is always enabled."""

    def disable(self) -> None:
        """Remove the cache from the dispatcher."""
        self._dispatcher._cache = NullCache()

    def flush(self) -> None:
        """Do nothing: files stay valid, as their names are digests of all inputs."""

    def _file_name(self, args: tuple[Any, ...], codegen: Any) -> str:
        """Name the file of a signature by everything that determines its code."""
        function = self._dispatcher.py_func
        inputs = (
            _VERSIONS,
            sys.implementation.cache_tag,
            _MACHINERY,
            codegen.magic_tuple(),
            (config.OPT, config.BOUNDSCHECK, config.DEBUGINFO_DEFAULT),
            sorted(self._dispatcher.targetoptions.items()),
            (function.__module__, function.__qualname__),
            digest_of([function]),
            tuple(map(str, args)),
        )
        digest = hashlib.sha256(repr(inputs).encode()).hexdigest()
        return f"{function.__name__}-{digest[:40]}.code"


def _folders() -> tuple[pathlib.Path, ...]:
    """Return the possible cache folders, the preferred one first."""
    user = pathlib.Path(AppDirs("jaxkv").user_cache_dir, "code")
    if not config.CACHE_DIR:
        return _PACKAGE / "__pycache__" / "code", user
    given = pathlib.Path(config.CACHE_DIR, "jaxkv")
    return (given if _is_trusted(given) else user,)


@functools.cache
def _is_trusted(folder: pathlib.Path) -> bool:
    """Whether no other user can change a folder; otherwise warn, once per process."""
    try:
        with _opened(folder):
            return True
    except UntrustedError as error:
        _log.warning(
            "NUMBA_CACHE_DIR is not used for machine code, which others could replace "
            "(%s): set it to a folder that only this user can write.",
            error,
        )
        return False
    except OSError:  # Such as a full disk: reading and writing report it.
        return True


def _opened(folder: pathlib.Path) -> contextlib.AbstractContextManager[int]:
    """Open a folder that only this user and root can change; make it if missing."""
    # Who can change the package can change its code.
    unchecked = _PACKAGE / "__pycache__" if folder.is_relative_to(_PACKAGE) else "/"
    return trusted_folder(folder, os.path.realpath(unchecked))


def _checksum_of(name: str, body: bytes) -> bytes:
    """Return a checksum of a file's content and name."""
    return hashlib.sha256(name.encode() + body).digest()


def _warn_once(what: str, error: OSError) -> None:
    """Warn, once per process, that machine code cannot be read or cached."""
    if "warning" not in _done:
        _done.add("warning")
        _log.warning(
            "machine code cannot be %s (%s): each process compiles it again, in some "
            "seconds. Free disk space, or set NUMBA_CACHE_DIR to a writable folder.",
            what,
            error,
        )

"""Machine code kept on disk, so that only the first process on a machine compiles.

Each function has a file for each signature, named by a digest of everything that
determines its code. There is no index that could contradict the files: a file is
complete under its final name, or it does not exist. The folder is `NUMBA_CACHE_DIR`,
else beside the package or, if that is not writable, in the user's cache folder. If no
folder is writable, every process compiles.
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
import uuid
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

_log = logging.getLogger(__name__)

_FORMAT = 1  # Of a file and of its name: a new number compiles everything anew.
_SUM_BYTES = hashlib.sha256().digest_size
_MAX_FOLDER_BYTES = 256 << 20  # Some ten versions of jaxkv, with all policies.

# The versions of these stand for their code.
_LIBRARIES = frozenset(("numba", "numpy", "llvmlite", "jax", "jaxlib"))
_VERSIONS = _FORMAT, numba.__version__, llvmlite.__version__, np.__version__

# Unpickling raises these, too, if something else wrote the file.
_UNREADABLE = AttributeError, EOFError, ImportError, LookupError, TypeError, ValueError

# How functions are compiled. Read at once, while the files are what was imported.
_MACHINERY = hashlib.sha256(
    b"".join(
        path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("*.py"))
    )
).digest()


def digest_of(functions: Iterable[Any]) -> bytes:
    """Return a digest of functions and of everything that they call or read.

    It sees what is in memory, which is what is compiled: files may be replaced while
    the process runs. It does not see what code finds by `numba.extending.overload`.
    """
    hasher = hashlib.sha256()
    waiting = list(functions)
    # In the order of discovery; kept, so that no other function gets the same id.
    met: dict[int, Any] = {}
    for function in waiting:
        function = _function_of(function)
        if id(function) not in met:
            met[id(function)] = function
            hasher.update(repr(tuple(_facts(function, waiting))).encode())
    return hasher.digest()


def _function_of(value: Any) -> Any:
    """Return the Python function that Numba has wrapped, or else the value."""
    for name in ("py_func", "_defn"):
        value = getattr(value, name, value)
    return value


def _facts(function: FunctionType, waiting: list[Any]) -> Iterator[object]:
    """Yield what determines the code; add the functions that it calls to `waiting`."""
    names = _names_in(function.__code__)
    yield _of_code(function.__code__)
    for name in names:
        if name in function.__globals__:
            yield name, _of_value(function.__globals__[name], names, waiting)
    for cell in function.__closure__ or ():
        yield _of_value(cell.cell_contents, names, waiting)
    yield _of_value(function.__defaults__, names, waiting)


def _of_code(value: Any) -> object:
    """Describe code, or one of its constants."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, tuple(map(_of_code, value.co_consts))
    # The order of a set differs from process to process.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _names_in(code: CodeType) -> tuple[str, ...]:
    inner = (_names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return tuple(itertools.chain(code.co_names, *inner))


def _of_value(value: Any, names: tuple[str, ...], waiting: list[Any]) -> object:
    """Describe a value that code finds under a name, equally in every process.

    The code may look up any of `names` in the value. Functions are added to `waiting`.
    """
    if isinstance(value, int | float | complex | str | bytes | np.generic | None):
        return type(value).__name__, repr(value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return tuple(_of_value(item, names, waiting) for item in value)
    if isinstance(value, types.Type):  # Such as a function of a C library.
        return str(value), str(value.key)
    kind = type(value).__name__
    function = _function_of(value)
    if isinstance(function, FunctionType):
        if not _is_of_library(function.__module__):
            waiting.append(function)
            options = sorted(getattr(value, "targetoptions", {}).items())
            return kind, function.__qualname__, str(options)
    elif isinstance(value, ModuleType | type):
        where = value.__name__ if isinstance(value, ModuleType) else value.__module__
        if not _is_of_library(where):
            inner = vars(value)
            read = [name for name in names if name in inner]
            facts = [(name, _of_value(inner[name], names, waiting)) for name in read]
            return kind, value.__name__, facts
    return kind, getattr(value, "__module__", ""), getattr(value, "__name__", "")


def _is_of_library(module: str | None) -> bool:
    package = (module or "").partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


class CodeCache(_Cache):
    """The machine code of one of Numba's dispatchers, as files.

    If a file cannot be read, its function is compiled; if it cannot be written, the
    code is not kept. No call fails, and a warning is logged once a process.
    """

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher

    @property
    def cache_path(self) -> str:
        """The folder that is read first."""
        return str(_folders()[0])

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Read the code for a signature; None if there is none."""
        target_context.refresh()
        args, _ = sigutils.normalize_signature(sig)
        name = self._file_name(args, target_context.codegen())
        for folder in _folders():
            try:
                data = (folder / name).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                _warn_once("read", error)
                continue
            body = data[_SUM_BYTES:]
            if data[:_SUM_BYTES] != _sum_of(name, body):
                continue  # Damaged, such as by a loss of power.
            try:
                code = CompileResult._rebuild(target_context, *pickle.loads(body))
            except (pickle.UnpicklingError, *_UNREADABLE):
                continue
            if tuple(code.signature.args) == tuple(args):
                return code
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the code for a signature to the first folder that accepts it."""
        if data.library.has_dynamic_globals:
            return  # It has addresses of this process.
        args, _ = sigutils.normalize_signature(sig)
        name = self._file_name(args, data.codegen)
        body = dumps(data._reduce())
        refusal: OSError | None = None
        for folder in _folders():
            try:
                _write(folder, name, _sum_of(name, body) + body)
            except OSError as error:
                refusal = refusal or error
            else:
                _delete_oldest(folder)
                return
        assert refusal is not None
        _warn_once("kept", refusal)

    def enable(self) -> None:
        """Keep the cache, which is always enabled."""

    def disable(self) -> None:
        """Remove the cache from the dispatcher."""
        self._dispatcher._cache = NullCache()

    def flush(self) -> None:
        """Keep the files, which are valid by their names."""

    def _file_name(self, args: tuple[Any, ...], codegen: Any) -> str:
        """Name the file of a signature by everything that determines its code."""
        function = self._dispatcher.py_func
        made_by = (
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
        digest = hashlib.sha256(repr(made_by).encode()).hexdigest()
        return f"{function.__name__}-{digest[:40]}.code"


def _folders() -> tuple[pathlib.Path, ...]:
    """Return the folders that may hold code, the preferred one first."""
    if config.CACHE_DIR:
        return (pathlib.Path(config.CACHE_DIR, "jaxkv"),)
    package = pathlib.Path(__file__).parents[1]
    user = pathlib.Path(AppDirs("jaxkv").user_cache_dir, "code")
    return package / "__pycache__" / "code", user


def _sum_of(name: str, body: bytes) -> bytes:
    """Return a checksum of a file's content and name, which no other file has."""
    return hashlib.sha256(name.encode() + body).digest()


def _write(folder: pathlib.Path, name: str, data: bytes) -> None:
    """Write a draft, and rename it once it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{uuid.uuid4().hex}.draft"
    try:
        draft.write_bytes(data)
        os.replace(draft, folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


@functools.cache
def _delete_oldest(folder: pathlib.Path) -> None:
    """Delete the oldest files of a folder that has too many bytes, once a process."""
    with contextlib.suppress(OSError):
        files = [(entry.stat(), entry.path) for entry in os.scandir(folder)]
        files.sort(key=lambda file: file[0].st_mtime_ns, reverse=True)
        sizes = itertools.accumulate(stat.st_size for stat, _ in files)
        for total, (_, path) in zip(sizes, files, strict=True):
            if total > _MAX_FOLDER_BYTES:
                pathlib.Path(path).unlink(missing_ok=True)


_has_warned = False


def _warn_once(what: str, error: OSError) -> None:
    """Warn, once a process, that machine code cannot be read or kept."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        _log.warning(
            "machine code cannot be %s (%s): each process compiles it anew, for some "
            "seconds. Make room there, or set NUMBA_CACHE_DIR to a folder that can be "
            "written to.",
            what,
            error,
        )

"""How functions over a state are compiled for the host.

A state is a frozen dataclass of arrays, or of other such dataclasses: the same that
the pure functions of `jaxkv.policies` work on. Here its arrays are NumPy's, and a
compiled function writes to them. To hand a dozen arrays to Numba would cost a
microsecond a call, more than many calls take, so a state is handed over as one `Bound`
object, which holds a table of addresses; `state_of` makes the dataclass of it, inside
compiled code.

Machine code is kept on disk, so that only the first process on a machine compiles. Each
function has a file of its own for each signature, named by a digest of all that makes
its code what it is. There is no index that could contradict it: a file is there under
its final name and whole, or it is not there. The folder is what `NUMBA_CACHE_DIR` says,
else beside this file or, where that may not be written to, the user's cache folder.
Where nothing can be kept, every process compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import pathlib
import pickle
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config, sigutils
from numba.core.caching import NullCache, _Cache
from numba.core.compiler import CompileResult
from numba.core.extending import (
    NativeValue,
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    models,
    overload,
    register_model,
    unbox,
)
from numba.core.serialize import dumps
from numba.core.typing.templates import AttributeTemplate
from numba.misc.appdirs import AppDirs
from numba.np.arrayobj import make_array, populate_array

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, *, nogil: bool = False) -> Function:
    """Compile a function when it is first called, for the types it is called with.

    Neither divisions nor indices are checked: callers pass what is right. The lock of
    the interpreter is kept, so that no other thread sees a state half changed; but with
    `nogil`, for what takes long over arrays that nothing changes meanwhile.
    """
    dispatcher = numba.njit(error_model="numpy", nogil=nogil)(function)
    dispatcher._cache = CodeCache(dispatcher)
    return dispatcher


def inlined(function: Function) -> Function:
    """Put a small function into those that call it, where a call would cost more."""
    return numba.njit(inline="always")(function)


@inlined
def copy_items(target: Any, start: int, source: Any, num: int) -> None:
    """Copy the first `num` items of an array into another, from `start` on.

    An assignment to a slice would take a tenth of a second more to compile, for the
    text of an error.
    """
    for row in range(num):
        target[start + row] = source[row]


def entry_point(function: Any, *arguments: Any) -> Callable[..., Any]:
    """Give a compiled function for arguments of the types of some, ready to be called.

    It costs half a microsecond less a call, as nothing looks at types any more: what it
    is called with must be of the same types, and arrays of the same layout.
    """
    signature = tuple(map(function.typeof_pyval, arguments))
    function.compile(signature)  # Or read from disk.
    ready: Callable[..., Any] = function.overloads[signature].entry_point
    return ready


class EntryPoints:
    """The functions of a module for one state, each made ready when it is first used.

    Args:
        module: A module of compiled functions.
        samples: By their names, arguments like those that they will be called with.
    """

    def __init__(self, module: Any, samples: Mapping[str, tuple[Any, ...]]) -> None:
        self._module = module
        self._samples = samples

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ready = entry_point(getattr(self._module, name), *self._samples[name])
        setattr(self, name, ready)  # From now on found without coming here.
        return ready


class Bound:
    """A state whose arrays compiled functions may write to.

    Args:
        state: A dataclass of contiguous NumPy arrays, or of such dataclasses. It is
            the caller's no more: what holds one of its arrays sees it change.

    Attributes:
        state: As given.

    Raises:
        TypeError: If it is copied or pickled.
    """

    __slots__ = ("_address", "_numba_type_", "_table", "state")

    def __init__(self, state: Any) -> None:
        self.state = state
        self._numba_type_ = _BoundType(StateType.of(state))
        words: list[int] = []
        for array in _arrays(state):
            words += [array.ctypes.data, *array.shape]
        self._table = np.array(words, np.int64)
        self._address: int = self._table.ctypes.data

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse, as a copy would have the addresses of what this one owns."""
        raise TypeError(
            "a Bound can be neither copied nor pickled, as it has addresses of arrays: "
            "copy its state with own(bound.state), and make a new Bound of that."
        )


def own(state: Any) -> Any:
    """Copy a state into NumPy arrays of its own.

    Args:
        state: A dataclass of arrays, NumPy's or JAX's, or of such dataclasses.
    """
    if not dataclasses.is_dataclass(state):
        return np.array(state, order="C")
    make: Callable[..., Any] = type(state)
    fields = dataclasses.fields(state)
    return make(*(own(getattr(state, field.name)) for field in fields))


def state_of(bound: Any) -> Any:
    """Give the state of a `Bound`, in compiled functions and, for tests, in others."""
    return bound.state


@intrinsic
def equal_words(typing_context: Any, table: Any, row: Any, word: Any) -> Any:
    """Tell which of the 8 words of a row are equal to one: a bit each, u64.

    Args:
        typing_context: Of Numba; callers do not give it.
        table: u32[N, 8].
        row: u64.
        word: u32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word_type, wide = ir.IntType(32), ir.IntType(64)
        vector = ir.VectorType(word_type, 8)
        array = make_array(signature.args[0])(context, builder, args[0])
        start = builder.gep(array.data, [builder.mul(args[1], wide(8))])
        words = builder.load(builder.bitcast(start, vector.as_pointer()), align=4)
        undefined = ir.Constant(vector, ir.Undefined)
        each = builder.insert_element(undefined, args[2], word_type(0))
        each = builder.shuffle_vector(each, undefined, ir.Constant(vector, [0] * 8))
        bits = builder.icmp_unsigned("==", words, each)
        return builder.zext(builder.bitcast(bits, ir.IntType(8)), wide)

    return types.uint64(table, types.uint64, types.uint32), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Have the cache line with an item of an array fetched, and do not wait for it.

    Args:
        typing_context: Of Numba; callers do not give it.
        array: Contiguous.
        index: u64. Of the item, as if the array had one dimension.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = make_array(signature.args[0])(context, builder, args[0]).data
        where = builder.bitcast(builder.gep(data, [args[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(
            builder.module, kind, "llvm.prefetch.p0i8"
        )
        # To be read, and to stay in all levels of the data's cache.
        builder.call(function, [where, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


@intrinsic
def lowest_bit(typing_context: Any, bits: Any) -> Any:
    """Number the lowest bit that is set of a u64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.uint64(types.uint64), generate


@intrinsic
def highest_bit(typing_context: Any, bits: Any) -> Any:
    """Number the highest bit that is set of a u64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.IntType(1)(1))
        return builder.sub(ir.IntType(64)(63), zeros)

    return types.uint64(types.uint64), generate


@intrinsic
def count_bits(typing_context: Any, bits: Any) -> Any:
    """Count the bits of a u64 that are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


def _arrays(state: Any) -> list[Any]:
    if not dataclasses.is_dataclass(state):
        return [state]
    each = (getattr(state, field.name) for field in dataclasses.fields(state))
    return [array for value in each for array in _arrays(value)]


_labels: dict[type, str] = {}
_functions: dict[str, Mapping[str, Any]] = {}  # by the label


def label_state(state_class: type, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Tie functions to a class of states, for code that works on any such class.

    Code for a state is kept on disk under a label of the class and of all that these
    functions do and call.

    Args:
        state_class: The class.
        functions: Compiled functions, by the names that `functions_of` gives them.
    """
    label = f"{_name_of(state_class)} {digest_of(functions.values()).hex()[:16]}"
    _labels[state_class] = label
    _functions[label] = functions


def functions_of(state: Any) -> Any:
    """Give the functions that are tied to a state's class, in compiled functions.

    They are its attributes: ``functions_of(state).find(state, ...)``.
    """
    raise NotImplementedError("only compiled functions can call functions_of().")


def _name_of(state_class: type) -> str:
    return f"{state_class.__module__}.{state_class.__qualname__}"


class StateType(types.Type):
    """The type of a state: the label of its class, and the names and types of fields.

    It does not name the class itself: who reads machine code may not have it.
    """

    def __init__(self, label: str, fields: tuple[tuple[str, Any], ...]) -> None:
        self.label = label
        self.fields = fields
        inner = ", ".join(f"{name}: {type_}" for name, type_ in fields)
        super().__init__(f"{label}({inner})")

    @staticmethod
    def of(value: Any) -> Any:
        """Give the type of a state, or of one of its arrays."""
        if not dataclasses.is_dataclass(value):
            return _Borrowed(numba.from_dtype(value.dtype), value.ndim)
        names = [field.name for field in dataclasses.fields(value)]
        fields = tuple((name, StateType.of(getattr(value, name))) for name in names)
        cls = type(value)
        return StateType(_labels.get(cls, _name_of(cls)), fields)


class _Borrowed(types.Array):
    """The type of an array of a state.

    The `Bound` keeps it alive, so that nothing counts references to it: Numba would do
    that at each use, in the innermost loops.
    """

    def __init__(self, dtype: Any, ndim: int) -> None:
        super().__init__(dtype, ndim, "C", name=f"borrowed({dtype}, {ndim}d)")


@register_model(_Borrowed)
class _BorrowedModel(models.ArrayModel):
    def traverse(self, builder: Any) -> list[Any]:
        """Name the members that are counted: none."""
        return []


@register_model(StateType)
class _StateModel(models.StructModel):
    def __init__(self, manager: Any, type_: StateType) -> None:
        super().__init__(manager, type_, list(type_.fields))


@infer_getattr
class _StateFields(AttributeTemplate):
    key = StateType

    def generic_resolve(self, type_: StateType, name: str) -> Any:
        return dict(type_.fields).get(name)


@lower_getattr_generic(StateType)
def _get_field(context: Any, builder: Any, type_: Any, value: Any, name: str) -> Any:
    fields = cgutils.create_struct_proxy(type_)(context, builder, value=value)
    return getattr(fields, name)


class _FunctionsType(types.Opaque):
    """The type of what `functions_of` gives; its attributes are known by the label."""

    def __init__(self, label: str) -> None:
        self.label = label
        super().__init__(f"functions({label})")


register_model(_FunctionsType)(models.OpaqueModel)


@infer_getattr
class _FunctionsAttributes(AttributeTemplate):
    key = _FunctionsType

    def generic_resolve(self, type_: _FunctionsType, name: str) -> Any:
        return types.Dispatcher(_functions[type_.label][name])


@lower_getattr_generic(_FunctionsType)
def _get_function(context: Any, builder: Any, type_: Any, value: Any, name: str) -> Any:
    return context.get_dummy_value()  # The type says which function it is.


@intrinsic
def _give_functions(typing_context: Any, state: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return _FunctionsType(state.label)(state), generate


@overload(functions_of)
def _functions_of(state: Any) -> Any:
    def give(state: Any) -> Any:
        return _give_functions(state)

    return give


class _BoundType(types.Type):
    """The type of a `Bound`: that of its state."""

    def __init__(self, state: StateType) -> None:
        self.state = state
        super().__init__(f"Bound({state})")


@register_model(_BoundType)
class _BoundModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: _BoundType) -> None:
        super().__init__(manager, type_, ir.IntType(64).as_pointer())


@unbox(_BoundType)
def _unbox_bound(type_: _BoundType, value: Any, context: Any) -> NativeValue:
    address = context.pyapi.object_getattr_string(value, "_address")
    number = context.pyapi.long_as_longlong(address)
    context.pyapi.decref(address)
    pointer = context.context.get_value_type(type_)
    return NativeValue(context.builder.inttoptr(number, pointer))


@intrinsic
def _read_table(typing_context: Any, bound: Any) -> Any:
    """Make a state of a table of addresses and shapes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        position = 0

        def next_word() -> Any:
            nonlocal position
            position += 1
            index = context.get_constant(types.intp, position - 1)
            return builder.load(builder.gep(args[0], [index]))

        def make(type_: Any) -> Any:
            if isinstance(type_, StateType):
                fields = cgutils.create_struct_proxy(type_)(context, builder)
                for name, field in type_.fields:
                    setattr(fields, name, make(field))
                return fields._getvalue()
            array = make_array(type_)(context, builder)
            itemsize = context.get_abi_sizeof(context.get_data_type(type_.dtype))
            data = next_word()
            shape = [next_word() for _ in range(type_.ndim)]
            strides: list[Any] = []
            stride = context.get_constant(types.intp, itemsize)
            for extent in reversed(shape):
                strides.insert(0, stride)
                stride = builder.mul(stride, extent)
            populate_array(
                array,
                data=builder.inttoptr(data, array.data.type),
                shape=shape,
                strides=strides,
                itemsize=itemsize,
                meminfo=None,
            )
            return array._getvalue()

        return make(bound.state)

    return bound.state(bound), generate


@overload(state_of)
def _state_of(bound: Any) -> Any:
    if not isinstance(bound, _BoundType):
        return None

    def read(bound: Any) -> Any:
        return _read_table(bound)

    return read


_log = logging.getLogger(__name__)

# Of what is in a file, and of what its name says: a new number has all compiled anew.
_FORMAT = 1
_SUM_BYTES = hashlib.sha256().digest_size
_MOST_BYTES = 256 << 20
"""Bytes that a folder may have: some ten versions of jaxkv, with all policies."""

# Of these the versions say enough.
_LIBRARIES = frozenset(("numba", "numpy", "llvmlite", "jax", "jaxlib"))
_VERSIONS = (
    _FORMAT,
    numba.__version__,
    llvmlite.__version__,
    np.__version__,
    sys.implementation.cache_tag,
)

# What unpickling raises, for a file that something else wrote.
_UNREADABLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)


# How anything is compiled: at once, while the file is what this process has imported.
_MACHINERY = hashlib.sha256(pathlib.Path(__file__).read_bytes()).digest()


def digest_of(functions: Iterable[Any]) -> bytes:
    """Make a digest of functions and of all that they call or read, wherever it is.

    It looks at what is in memory, which is what is compiled: files may have been
    exchanged under a process that runs.

    Args:
        functions: Python functions, or such as Numba has wrapped. What they find by
            `numba.extending.overload` is not seen.
    """
    hasher = hashlib.sha256()
    waiting = list(functions)
    # In the order in which they are met; kept, so that no other gets one's id.
    met: dict[int, Any] = {}
    for function in waiting:
        function = _function_of(function)
        if id(function) not in met:
            met[id(function)] = function
            hasher.update(repr(tuple(_facts(function, waiting))).encode())
    return hasher.digest()


def _function_of(value: Any) -> Any:
    """Give the Python function that Numba has wrapped, if it has."""
    for name in ("py_func", "_defn"):
        value = getattr(value, name, value)
    return value


def _facts(function: FunctionType, waiting: list[Any]) -> Iterator[object]:
    """Say what code is made of; functions that it calls are added to `waiting`."""
    names = _names_in(function.__code__)
    yield _of_code(function.__code__)
    for name in names:
        if name in function.__globals__:
            yield name, _of_value(function.__globals__[name], names, waiting)
    for cell in function.__closure__ or ():
        yield _of_value(cell.cell_contents, names, waiting)
    yield _of_value(function.__defaults__, names, waiting)


def _of_code(code: CodeType) -> object:
    return code.co_code, code.co_names, tuple(map(_of_constant, code.co_consts))


def _of_constant(value: Any) -> object:
    if isinstance(value, CodeType):
        return _of_code(value)
    if isinstance(value, frozenset):  # Its order differs from process to process.
        return sorted(map(repr, value))
    return repr(value)


def _names_in(code: CodeType) -> tuple[str, ...]:
    inner = (_names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return tuple(itertools.chain(code.co_names, *inner))


def _of_value(value: Any, names: tuple[str, ...], waiting: list[Any]) -> object:
    """Say what a value is, in words that are the same in every process.

    Args:
        value: What code finds under a name.
        names: All names of that code, some of which it may look up in the value.
        waiting: Functions are added to it.
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
            read = [
                (name, _of_value(inner[name], names, waiting))
                for name in names
                if name in inner
            ]
            return kind, value.__name__, read
    return kind, getattr(value, "__module__", ""), getattr(value, "__name__", "")


def _is_of_library(module: str | None) -> bool:
    room = (module or "").partition(".")[0]
    return room in _LIBRARIES or room in sys.stdlib_module_names


class CodeCache(_Cache):
    """What a dispatcher of Numba keeps its machine code in.

    What cannot be read is compiled anew, and what cannot be written is not kept: no
    call fails for that. A warning is logged, once a process.

    Args:
        dispatcher: Numba's, of the function.
    """

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher

    @property
    def cache_path(self) -> str:
        """Where code is looked for first."""
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
                _warn("read", error)
                continue
            body = data[_SUM_BYTES:]
            if data[:_SUM_BYTES] != _sum_of(name, body):
                continue  # Such as after a loss of power.
            code = _rebuild(body, target_context)
            if code is not None and tuple(code.signature.args) == tuple(args):
                return code
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code for a signature, in the first folder that takes it."""
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
                _make_room(folder)
                return
        assert refusal is not None
        _warn("kept", refusal)

    def enable(self) -> None:
        """Do nothing, as it always is."""

    def disable(self) -> None:
        """Have the dispatcher go without."""
        self._dispatcher._cache = NullCache()

    def flush(self) -> None:
        """Do nothing: code that is there is right."""

    def _file_name(self, args: tuple[Any, ...], codegen: Any) -> str:
        """Name the file of a signature by what its machine code depends on."""
        function = self._dispatcher.py_func
        made_by = (
            _VERSIONS,
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
    """List where code may be, the place that is preferred first."""
    if config.CACHE_DIR:
        return (pathlib.Path(config.CACHE_DIR, "jaxkv"),)
    beside = pathlib.Path(__file__).parent / "__pycache__" / "code"
    return beside, pathlib.Path(AppDirs("jaxkv").user_cache_dir, "code")


def _sum_of(name: str, body: bytes) -> bytes:
    """Sum what a file has, so that it is taken for no other's."""
    return hashlib.sha256(name.encode() + body).digest()


def _rebuild(body: bytes, target_context: Any) -> Any:
    """Make code of what a file has; None if that does not work."""
    try:
        return CompileResult._rebuild(target_context, *pickle.loads(body))
    except _UNREADABLE:
        return None


def _write(folder: pathlib.Path, name: str, data: bytes) -> None:
    """Write a file under another name, and give it its own when it is whole."""
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
def _make_room(folder: pathlib.Path) -> None:
    """Delete what was written longest ago where there is too much, once a process."""
    with contextlib.suppress(OSError):
        files = [(entry.stat(), entry.path) for entry in os.scandir(folder)]
        files.sort(key=lambda file: file[0].st_mtime_ns, reverse=True)
        sizes = itertools.accumulate(stat.st_size for stat, _ in files)
        for total, (_, path) in zip(sizes, files, strict=True):
            if total > _MOST_BYTES:
                pathlib.Path(path).unlink(missing_ok=True)


def _warn(what: str, error: OSError) -> None:
    """Say, once a process, that machine code is not to be had from disk."""
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


_has_warned = False

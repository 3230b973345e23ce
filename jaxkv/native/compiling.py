"""How functions over a state are compiled for the host.

A state is a frozen dataclass of arrays, or of other such dataclasses: the same that
the pure functions of `jaxkv.policies` work on. Here its arrays are NumPy's, and a
compiled function writes to them. To hand a dozen arrays to Numba would cost a
microsecond a call, more than many calls take, so a state is handed over as one `Bound`
object, which holds a table of addresses; `state_of` makes the dataclass of it, inside
compiled code.

Machine code is kept on disk, where Numba finds a folder that it may write to, so that
only the first process on a machine compiles. Without such a folder every process does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache
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
from numba.core.typing.templates import AttributeTemplate
from numba.np.arrayobj import make_array, populate_array

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function when it is first called, for the types it is called with.

    Neither divisions nor indices are checked: callers pass what is right. The lock of
    the interpreter is kept, so that no other thread sees a state half changed.
    """
    dispatcher = numba.njit(error_model="numpy")(function)
    # Numba raises where it finds no folder that it may write to.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _Cache(function)
    return dispatcher


def compiled_without_lock(function: Function) -> Function:
    """Compile a function that other threads of Python may run beside.

    For what takes long over arrays that nobody changes meanwhile.
    """
    dispatcher = numba.njit(error_model="numpy", nogil=True)(function)
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _Cache(function)
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


@functools.cache
def _digest() -> str:
    """Make a digest of all code that is compiled."""
    hasher = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        hasher.update(path.name.encode() + path.read_bytes())
    return hasher.hexdigest()


class _WholeFolder:
    """Has machine code made anew when any file here changes.

    Numba looks only at the file of the function that was called, and would go on with
    old code of those that it calls.
    """

    def get_source_stamp(self) -> str:
        return _digest()


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes = tuple(
        type(locator.__name__, (_WholeFolder, locator), {})
        for locator in CompileResultCacheImpl._locator_classes
    )


class _Cache(FunctionCache):
    """Keeps machine code on disk; what cannot be read there is made anew."""

    _impl_class = _CacheImpl

    def load_overload(self, *args: Any) -> Any:
        """Read the code for a signature; None if there is none."""
        try:
            return super().load_overload(*args)
        except _UNREADABLE:
            self.flush()
            return None


# What unpickling raises, for a file that another version wrote or that was cut short.
_UNREADABLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    TypeError,
    ValueError,
)


class Bound:
    """A state whose arrays compiled functions may write to.

    Args:
        state: A dataclass of contiguous NumPy arrays, or of such dataclasses. It is
            the caller's no more: what holds one of its arrays sees it change.

    Attributes:
        state: As given.
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


def own(state: Any) -> Any:
    """Copy a state into NumPy arrays that nobody else holds.

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


def label_state(state_class: type, functions: Iterable[Callable[..., Any]]) -> str:
    """Have machine code for a class of states be of certain functions alone.

    Code that was kept on disk is found again by the label of the state that it is for.

    Args:
        state_class: The class.
        functions: What compiled functions call for its states. The label changes with
            the files that they are in.

    Returns:
        The label.
    """
    hasher = hashlib.sha256()
    for function in functions:
        code = getattr(function, "py_func", function).__code__
        path = pathlib.Path(code.co_filename)
        # Of what was not read from a file there are the instructions alone.
        hasher.update(path.read_bytes() if path.is_file() else code.co_code)
        hasher.update(code.co_qualname.encode())
    label = f"{_name_of(state_class)} {hasher.hexdigest()[:16]}"
    _labels[state_class] = label
    return label


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

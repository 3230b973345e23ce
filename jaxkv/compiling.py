"""How functions over a state are compiled for the host.

A state is a frozen dataclass of arrays, or of other such dataclasses: the same that
the pure functions of `jaxkv.policies` work on. Here its arrays are NumPy's, and a
compiled function writes to them. To hand a dozen arrays to Numba would cost a
microsecond a call, more than many calls take, so a state is handed over as one `Bound`
object, which holds a table of addresses. Compiled code has a pointer into that table
for the dataclass, and reads an array's address where it uses the array.

To compile is most of the first start on a machine. Numba by itself would make whole
machine code, callable from Python, of every function that another one calls, and
optimize all of that again wherever it is called. Here these are parts: LLVM's functions
that are linked into the entry points, which alone become machine code (`_Part`). Where
Numba is another than this file knows, all is compiled as Numba does by itself.

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
import gc
import hashlib
import itertools
import logging
import operator
import os
import pathlib
import pickle
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, TypeVar

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config, sigutils
from numba.core.caching import NullCache, _Cache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, CompileResult, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.extending import (
    NativeValue,
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    models,
    register_model,
    unbox,
)
from numba.core.registry import CPUDispatcher
from numba.core.serialize import dumps
from numba.core.typed_passes import NativeLowering
from numba.core.typing.templates import AttributeTemplate
from numba.misc.appdirs import AppDirs
from numba.np.arrayobj import make_array, populate_array

Function = TypeVar("Function", bound=Callable[..., Any])

_log = logging.getLogger(__name__)


def compiled(function: Function, *, nogil: bool = False) -> Function:
    """Compile a function when it is first called, for the types it is called with.

    Neither divisions nor indices are checked: callers pass what is right. The lock of
    the interpreter is kept, so that no other thread sees a state half changed; but with
    `nogil`, for what takes long over arrays that nothing changes meanwhile.
    """
    entry: Any = _Entry(function, nogil=nogil)
    return entry


def inlined(function: Function) -> Function:
    """Put a small function into those that call it, where a call would cost more."""
    entry: Any = _Entry(function, forceinline=True)
    return entry


class _Entry(CPUDispatcher):
    """A function as Python calls it; compiled functions call it as a `_Part`."""

    def __init__(self, function: Any, **own: bool) -> None:
        options = {"nopython": True, "error_model": "numpy", "no_cfunc_wrapper": True}
        options |= own
        super().__init__(function, targetoptions=options, pipeline_class=_EntryCompiler)
        self._cache = CodeCache(self)
        self._part = _Part(
            function,
            targetoptions=options | {"no_cpython_wrapper": True},
            pipeline_class=_PartCompiler,
        )

    @property
    def _numba_type_(self) -> Any:
        return types.Dispatcher(self._part if _has_parts() else self)

    def compile(self, sig: Any) -> Any:
        # A compiler leaves little garbage, and looking for it takes a tenth longer.
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().compile(sig)
        finally:
            if collects:
                gc.enable()


class _Part(CPUDispatcher):
    """A function as other compiled functions call it; Python cannot."""

    def add_overload(self, cres: Any) -> None:
        self.overloads[tuple(cres.signature.args)] = cres

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # A number that is known is a number, or each would have it compiled anew.
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)


class _EntryCompiler(CompilerBase):
    """Numba's compiler, with another end."""

    def __init__(self, typing_context: Any, *args: Any) -> None:
        super().__init__(_Remembering(typing_context), *args)

    @property
    def _lowering(self) -> Any:
        return _EntryLowering if _has_parts() else NativeLowering

    def define_pipelines(self) -> list[Any]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes = PassManager("jaxkv")
        for kind, text in manager.passes:
            passes.add_pass(self._lowering if kind is NativeLowering else kind, text)
        passes.finalize()
        return [passes]


class _PartCompiler(_EntryCompiler):
    @property
    def _lowering(self) -> Any:
        return _PartLowering


class _Remembering:
    """A typing context that remembers what a call with arguments of some types calls.

    Numba's asks some ten candidates for every addition, as if it were the first.
    """

    _known: ClassVar[dict[Any, Any]] = {}

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        call = func, tuple(args), tuple(sorted(kws.items()))
        found = self._known.get(call)
        if found is None:
            found = self._context.resolve_function_type(func, args, kws)
            if found is not None:
                self._known[call] = found
        return found


class _EntryLibrary(JITCodeLibrary):
    """LLVM's module of a function and its parts, which is optimized once."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class _PartLibrary(JITCodeLibrary):
    """LLVM's module of a part, which is linked into others and never run by itself."""

    def _optimize_final_module(self) -> None:
        """Leave it to those that it is linked into."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _EntryLowering(NativeLowering):
    _name = "jaxkv_entry_lowering"

    def run_pass(self, state: Any) -> bool:
        name = state.func_id.func_qualname
        state.library = _EntryLibrary(state.targetctx.codegen(), name)
        state.library.enable_object_caching()
        return bool(super().run_pass(state))


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):
    _name = "jaxkv_part_lowering"

    def run_pass(self, state: Any) -> bool:
        name = state.func_id.func_qualname
        state.library = _PartLibrary(state.targetctx.codegen(), name)
        state.flags.no_compile = True
        super().run_pass(state)
        state.library.finalize()
        lowered, key = state["cr"], object()
        # By the key a caller finds what to link.
        state.targetctx.insert_user_function(key, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=key)
        return True


_answer: bool | None = None


def _has_parts() -> bool:
    """Tell whether parts work with this version of Numba, by trying them once."""
    global _answer
    if _answer is None:
        _answer = True  # For what follows.
        part = _Entry(lambda number: number + 1)
        entry = _Entry(lambda number: part(number))
        part._cache = entry._cache = NullCache()
        try:
            _answer = entry(1) == 2
        except Exception as error:  # Another version may raise anything.
            _log.debug("all is compiled as Numba does by itself: %s", error)
            _answer = False
    return _answer


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
        self._numba_type_ = StateType.of(state)
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


@intrinsic
def empty(typing_context: Any, num: Any, dtype: Any) -> Any:
    """Make an array of `num` items of a dtype; compiled sooner than `np.empty`."""
    array_type = types.Array(dtype.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num = args[0]
        itemsize = context.get_constant(
            types.intp, context.get_abi_sizeof(context.get_data_type(dtype.dtype))
        )
        memory = context.nrt.meminfo_alloc(builder, builder.mul(num, itemsize))
        array = make_array(array_type)(context, builder)
        data = context.nrt.meminfo_data(builder, memory)
        populate_array(
            array,
            data=builder.bitcast(data, array.data.type),
            shape=[num],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=memory,
        )
        return array._getvalue()

    return array_type(types.intp, dtype), generate


def _chosen(typing_context: Any, first: Any, second: Any, comparison: Any) -> Any:
    """Type and compile the choice of a number that compares so with the other."""
    kind = typing_context.unify_types(types.unliteral(first), types.unliteral(second))
    compared = types.boolean(kind, kind)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_second = context.get_function(comparison, compared)(builder, args[::-1])
        return builder.select(is_second, args[1], args[0])

    return kind(kind, kind), generate


@intrinsic
def lesser(typing_context: Any, first: Any, second: Any) -> Any:
    """Do as `min` of two numbers; compiled sooner."""
    return _chosen(typing_context, first, second, operator.lt)


@intrinsic
def greater(typing_context: Any, first: Any, second: Any) -> Any:
    """Do as `max` of two numbers; compiled sooner."""
    return _chosen(typing_context, first, second, operator.gt)


def _words_of_row(context: Any, builder: Any, type_: Any, array: Any, row: Any) -> Any:
    """Point to the 8 words of a row of u32[N, 8], contiguous."""
    data = make_array(type_)(context, builder, array).data
    start = builder.gep(data, [builder.mul(row, ir.IntType(64)(8))])
    return builder.bitcast(start, ir.VectorType(ir.IntType(32), 8).as_pointer())


@intrinsic
def same_row(
    typing_context: Any, first: Any, first_row: Any, second: Any, second_row: Any
) -> Any:
    """Tell whether two rows of u32[..., 8] are equal."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = _words_of_row(context, builder, first, *args[:2])
        other = _words_of_row(context, builder, second, *args[2:])
        words = (builder.load(at, align=4) for at in (one, other))
        differ = builder.icmp_unsigned("!=", *words)
        byte = ir.IntType(8)
        return builder.icmp_unsigned("==", builder.bitcast(differ, byte), byte(0))

    return types.boolean(first, types.intp, second, types.intp), generate


@intrinsic
def copy_row(
    typing_context: Any, target: Any, target_row: Any, source: Any, source_row: Any
) -> Any:
    """Copy a row of u32[..., 8]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _words_of_row(context, builder, target, *args[:2])
        words = builder.load(
            _words_of_row(context, builder, source, *args[2:]), align=4
        )
        builder.store(words, to, align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), generate


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
        words = _words_of_row(context, builder, signature.args[0], *args[:2])
        words = builder.load(words, align=4)
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


_WORDS = ir.IntType(64).as_pointer()
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


@intrinsic
def functions_of(typing_context: Any, state: Any) -> Any:
    """Give the functions that are tied to a state's class, in compiled functions.

    They are its attributes: ``functions_of(state).find(state, ...)``.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return _FunctionsType(state.label)(state), generate


def _name_of(state_class: type) -> str:
    return f"{state_class.__module__}.{state_class.__qualname__}"


class StateType(types.Type):
    """The type of a state: the label of its class, and the names and types of fields.

    It does not name the class itself: who reads machine code may not have it.
    """

    def __init__(self, label: str, fields: tuple[tuple[str, Any], ...]) -> None:
        self.label = label
        self.fields = fields
        inner = hashlib.sha256(repr(fields).encode()).hexdigest()
        super().__init__(f"{label} {inner[:16]}")  # Short, as symbols are named by it.

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
class _StateModel(models.PrimitiveModel):
    """Where the words of a state begin in the table of its `Bound`."""

    def __init__(self, manager: Any, type_: StateType) -> None:
        super().__init__(manager, type_, _WORDS)


@infer_getattr
class _StateFields(AttributeTemplate):
    key = StateType

    def generic_resolve(self, type_: StateType, name: str) -> Any:
        return dict(type_.fields).get(name)


@lower_getattr_generic(StateType)
def _get_field(context: Any, builder: Any, type_: Any, value: Any, name: str) -> Any:
    """Find a state within a state, or read where an array is and of what shape."""
    fields = dict(type_.fields)
    before = itertools.takewhile(lambda other: other != name, fields)
    position = sum(_num_words(fields[other]) for other in before)
    type_ = fields[name]

    def address(position: int) -> Any:
        return builder.gep(value, [ir.IntType(64)(position)])

    def word(position: int) -> Any:
        # The table never changes: nothing written to an array has it read again.
        loaded = builder.load(address(position))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    if isinstance(type_, StateType):
        return address(position)
    shape = [word(position + 1 + axis) for axis in range(type_.ndim)]
    itemsize = context.get_constant(
        types.intp, context.get_abi_sizeof(context.get_data_type(type_.dtype))
    )
    strides: list[Any] = []
    stride = itemsize
    for extent in reversed(shape):
        strides.insert(0, stride)
        stride = builder.mul(stride, extent)
    model = context.data_model_manager[type_]
    pointer = context.get_value_type(model.get_type("data"))
    data = builder.inttoptr(word(position), pointer)
    nitems = context.get_constant(types.intp, 1)
    for extent in shape:
        nitems = builder.mul(nitems, extent)
    members = {
        "nitems": nitems,
        "itemsize": itemsize,
        "data": data,
        "shape": cgutils.pack_array(builder, shape, ty=ir.IntType(64)),
        "strides": cgutils.pack_array(builder, strides, ty=ir.IntType(64)),
    }
    array = ir.Constant(model.get_value_type(), None)
    for name, member in members.items():
        array = model.set(builder, array, member, name)
    return array


def _num_words(type_: Any) -> int:
    """Count the words of a state, or of an array, in a table."""
    if isinstance(type_, StateType):
        return sum(_num_words(field) for _, field in type_.fields)
    return 1 + int(type_.ndim)


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
        return numba.typeof(_functions[type_.label][name])


@lower_getattr_generic(_FunctionsType)
def _get_function(context: Any, builder: Any, type_: Any, value: Any, name: str) -> Any:
    return context.get_dummy_value()  # The type says which function it is.


@unbox(StateType)
def _unbox_bound(type_: StateType, value: Any, context: Any) -> NativeValue:
    address = context.pyapi.object_getattr_string(value, "_address")
    number = context.pyapi.long_as_longlong(address)
    context.pyapi.decref(address)
    return NativeValue(context.builder.inttoptr(number, _WORDS))


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


@inlined
def copy_items(target: Any, start: int, source: Any, num: int) -> None:
    """Copy the first `num` items of an array into another, from `start` on.

    An assignment to a slice would take a tenth of a second more to compile, for the
    text of an error.
    """
    for row in range(num):
        target[start + row] = source[row]


@inlined
def filled(num: int, value: Any, dtype: Any) -> Any:
    """Do as `np.full` of one dimension; compiled sooner."""
    array = empty(num, dtype)
    for row in range(num):
        array[row] = value
    return array

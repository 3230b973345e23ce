"""States as compiled functions receive them: one table of addresses for all arrays.

To pass a dozen arrays to Numba would take a microsecond a call, more than many calls
take. So a state is passed as one `Bound` object, which holds a table of addresses.
Compiled code has a pointer into that table for each dataclass, and reads an array's
address where it uses the array.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.extending import (
    NativeValue,
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    models,
    register_model,
    unbox,
)
from numba.core.typing.templates import AttributeTemplate
from numba.np.arrayobj import make_array, populate_array

from jaxkv.compiling.code_cache import digest_of


class Bound:
    """A state whose arrays compiled functions may write to.

    `state` is a dataclass of contiguous NumPy arrays, or of such dataclasses. Every
    holder of one of its arrays sees it change.
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
        """Refuse: a copy would have the addresses of this object's arrays."""
        raise TypeError(
            "a Bound can be neither copied nor pickled, as it has addresses of arrays: "
            "copy its state with own(bound.state), and make a new Bound of that."
        )


def own(state: Any) -> Any:
    """Copy a dataclass of arrays, NumPy's or JAX's, into NumPy arrays."""
    if not dataclasses.is_dataclass(state):
        return np.array(state, order="C")
    make: Callable[..., Any] = type(state)
    fields = dataclasses.fields(state)
    return make(*(own(getattr(state, field.name)) for field in fields))


def _arrays(state: Any) -> list[Any]:
    if not dataclasses.is_dataclass(state):
        return [state]
    values = (getattr(state, field.name) for field in dataclasses.fields(state))
    return [array for value in values for array in _arrays(value)]


_WORDS = ir.IntType(64).as_pointer()
_labels: dict[type, str] = {}
_functions: dict[str, Mapping[str, Any]] = {}  # By label.


def label_state(state_class: type, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Tie functions to a class of states, for code that works on any such class.

    Code for a state is kept on disk under a label of the class and of everything that
    these functions do and call. `functions_of` returns them by their names.
    """
    label = f"{_name_of(state_class)} {digest_of(functions.values()).hex()[:16]}"
    _labels[state_class] = label
    _functions[label] = functions


@intrinsic
def functions_of(typing_context: Any, state: Any) -> Any:
    """Return the functions tied to a state's class, in compiled functions.

    They are its attributes: ``functions_of(state).find(state, ...)``.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return _FunctionsType(state.label)(state), generate


def _name_of(state_class: type) -> str:
    return f"{state_class.__module__}.{state_class.__qualname__}"


class StateType(types.Type):
    """The type of a state: the label of its class, and the names and types of fields.

    It has no reference to the class, which a process that reads the code may not have.
    """

    def __init__(self, label: str, fields: tuple[tuple[str, Any], ...]) -> None:
        self.label = label
        self.fields = fields
        inner = hashlib.sha256(repr(fields).encode()).hexdigest()
        super().__init__(f"{label} {inner[:16]}")  # Short, as symbols are named by it.

    @staticmethod
    def of(value: Any) -> Any:
        """Return the type of a state, or of one of its arrays."""
        if not dataclasses.is_dataclass(value):
            return _Borrowed(numba.from_dtype(value.dtype), value.ndim)
        names = [field.name for field in dataclasses.fields(value)]
        fields = tuple((name, StateType.of(getattr(value, name))) for name in names)
        cls = type(value)
        return StateType(_labels.get(cls, _name_of(cls)), fields)


class _Borrowed(types.Array):
    """The type of a state's array, whose references are not counted.

    The `Bound` keeps the array alive. Numba would count at each use, in the innermost
    loops.
    """

    def __init__(self, dtype: Any, ndim: int) -> None:
        super().__init__(dtype, ndim, "C", name=f"borrowed({dtype}, {ndim}d)")


@register_model(_Borrowed)
class _BorrowedModel(models.ArrayModel):
    def traverse(self, builder: Any) -> list[Any]:
        """List the members whose references are counted: none."""
        return []


@register_model(StateType)
class _StateModel(models.PrimitiveModel):
    """A pointer to a state's first word in the table of its `Bound`."""

    def __init__(self, manager: Any, type_: StateType) -> None:
        super().__init__(manager, type_, _WORDS)


@infer_getattr
class _StateFields(AttributeTemplate):
    key = StateType

    def generic_resolve(self, type_: StateType, name: str) -> Any:
        return dict(type_.fields).get(name)


@lower_getattr_generic(StateType)
def _get_field(context: Any, builder: Any, type_: Any, value: Any, name: str) -> Any:
    """Point to a state within a state, or read an array's address and shape."""
    fields = dict(type_.fields)
    before = itertools.takewhile(lambda field: field != name, fields)
    position = sum(_num_words(fields[field]) for field in before)
    type_ = fields[name]

    def address(position: int) -> Any:
        return builder.gep(value, [ir.IntType(64)(position)])

    def word(position: int) -> Any:
        # The table never changes: no write to an array makes LLVM read it again.
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
    array = make_array(type_)(context, builder)
    populate_array(array, data, shape, strides, itemsize, meminfo=None)
    return array._getvalue()


def _num_words(type_: Any) -> int:
    """Count the words of a state, or of an array, in a table."""
    if isinstance(type_, StateType):
        return sum(_num_words(field) for _, field in type_.fields)
    return 1 + int(type_.ndim)


class _FunctionsType(types.Opaque):
    """The type that `functions_of` returns; the label determines its attributes."""

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
    return context.get_dummy_value()  # The type names the function.


@unbox(StateType)
def _unbox_bound(type_: StateType, value: Any, context: Any) -> NativeValue:
    address = context.pyapi.object_getattr_string(value, "_address")
    number = context.pyapi.long_as_longlong(address)
    context.pyapi.decref(address)
    return NativeValue(context.builder.inttoptr(number, _WORDS))

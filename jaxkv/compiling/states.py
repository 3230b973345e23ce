"""States as arguments of compiled functions: one pointer to a table of all arrays.

Numba takes about a microsecond per call to unbox a dozen arrays, longer than many of
these functions run. So a state, a dataclass of arrays, is passed as one `Bound`, whose
table holds each array's address and shape. In compiled code a state is a pointer into
that table, and an array's address and shape are read where the array is used.
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
    """A state that compiled functions update in place.

    `state` is a dataclass of contiguous NumPy arrays, or of such dataclasses. Its
    arrays are not copied: writes are visible through every reference to them.
    """

    __slots__ = ("_address", "_numba_type_", "_table", "state")

    def __init__(self, state: Any) -> None:
        self.state = state
        self._numba_type_ = StateType.of(state)
        entries: list[int] = []
        for array in _arrays(state):
            entries += [array.ctypes.data, *array.shape]
        self._table = np.array(entries, np.int64)
        self._address: int = self._table.ctypes.data

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise TypeError: a copy would point to the arrays of this object."""
        raise TypeError(
            "a Bound cannot be copied or pickled: it holds addresses of arrays. Copy "
            "its state with copy_to_numpy(bound.state), and make a new Bound of that."
        )


def copy_to_numpy(state: Any) -> Any:
    """Copy a state of NumPy or JAX arrays into new, contiguous NumPy arrays."""
    if not dataclasses.is_dataclass(state):
        return np.array(state, order="C")
    make: Callable[..., Any] = type(state)
    fields = dataclasses.fields(state)
    return make(*(copy_to_numpy(getattr(state, field.name)) for field in fields))


def _arrays(state: Any) -> list[Any]:
    if not dataclasses.is_dataclass(state):
        return [state]
    values = (getattr(state, field.name) for field in dataclasses.fields(state))
    return [array for value in values for array in _arrays(value)]


_ENTRY_PTR = ir.IntType(64).as_pointer()
_labels: dict[type, str] = {}
_functions: dict[str, Mapping[str, Any]] = {}  # By label.


def add_functions(cls: type, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Register the functions of a class of states, for `functions_of`.

    Compiled code for a state is cached on disk under its class's label: the name of the
    class, and a digest of these functions and of all that they call.
    """
    label = f"{_name_of(cls)} {digest_of(functions.values()).hex()[:16]}"
    _labels[cls] = label
    _functions[label] = functions


@intrinsic
def functions_of(typing_context: Any, state: Any) -> Any:
    """Return the functions of a state's class; for calls in compiled functions.

    Call them as attributes: ``functions_of(state).find(state, ...)``.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return _FunctionsType(state.label)(state), generate


def _name_of(state_class: type) -> str:
    return f"{state_class.__module__}.{state_class.__qualname__}"


class StateType(types.Type):
    """The Numba type of a state: its class's label, its fields' names and types.

    It does not refer to the class: a process that loads cached code may not have it.
    """

    def __init__(self, label: str, fields: tuple[tuple[str, Any], ...]) -> None:
        self.label = label
        self.fields = fields
        fields_digest = hashlib.sha256(repr(fields).encode()).hexdigest()
        super().__init__(f"{label} {fields_digest[:16]}")  # Short: symbols contain it.

    @staticmethod
    def of(value: Any) -> Any:
        """Return the Numba type of a state, or of one of its arrays."""
        if not dataclasses.is_dataclass(value):
            return _BorrowedArray(numba.from_dtype(value.dtype), value.ndim)
        names = [field.name for field in dataclasses.fields(value)]
        fields = tuple((name, StateType.of(getattr(value, name))) for name in names)
        cls = type(value)
        return StateType(_labels.get(cls, _name_of(cls)), fields)


class _BorrowedArray(types.Array):
    """The Numba type of a state's array: its references are not counted.

    The `Bound` keeps the array alive. Otherwise Numba would update a reference count at
    each use, in the innermost loops.
    """

    def __init__(self, dtype: Any, ndim: int) -> None:
        super().__init__(dtype, ndim, "C", name=f"borrowed({dtype}, {ndim}d)")


@register_model(_BorrowedArray)
class _BorrowedArrayModel(models.ArrayModel):
    def traverse(self, builder: Any) -> list[Any]:
        """Return the members whose references Numba counts: none."""
        return []


@register_model(StateType)
class _StateModel(models.PrimitiveModel):
    """A pointer to a state's first entry in the table of its `Bound`."""

    def __init__(self, manager: Any, type_: StateType) -> None:
        super().__init__(manager, type_, _ENTRY_PTR)


@infer_getattr
class _StateFields(AttributeTemplate):
    key = StateType

    def generic_resolve(self, type_: StateType, name: str) -> Any:
        return dict(type_.fields).get(name)


@lower_getattr_generic(StateType)
def _get_field(context: Any, builder: Any, type_: Any, value: Any, name: str) -> Any:
    """Return a pointer to a nested state, or an array made from its entries."""
    fields = dict(type_.fields)
    before = itertools.takewhile(lambda field: field != name, fields)
    offset = sum(_num_entries(fields[field]) for field in before)
    field_type = fields[name]

    def pointer_to(offset: int) -> Any:
        return builder.gep(value, [ir.IntType(64)(offset)])

    def load_entry(offset: int) -> Any:
        # The table never changes: LLVM need not reload it after a write to an array.
        entry = builder.load(pointer_to(offset))
        entry.set_metadata("invariant.load", builder.module.add_metadata([]))
        return entry

    if isinstance(field_type, StateType):
        return pointer_to(offset)
    shape = [load_entry(offset + 1 + axis) for axis in range(field_type.ndim)]
    itemsize = context.get_constant(
        types.intp, context.get_abi_sizeof(context.get_data_type(field_type.dtype))
    )
    strides: list[Any] = []
    stride = itemsize
    for extent in reversed(shape):
        strides.insert(0, stride)
        stride = builder.mul(stride, extent)
    model = context.data_model_manager[field_type]
    data_type = context.get_value_type(model.get_type("data"))
    data = builder.inttoptr(load_entry(offset), data_type)
    array = make_array(field_type)(context, builder)
    populate_array(array, data, shape, strides, itemsize, meminfo=None)
    return array._getvalue()


def _num_entries(type_: Any) -> int:
    """Count the table entries of a state, or of an array: its address and its shape."""
    if isinstance(type_, StateType):
        return sum(_num_entries(field) for _, field in type_.fields)
    return 1 + int(type_.ndim)


class _FunctionsType(types.Opaque):
    """The Numba type that `functions_of` returns; its label names its attributes."""

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
    return NativeValue(context.builder.inttoptr(number, _ENTRY_PTR))

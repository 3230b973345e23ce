"""Short functions for compiled code, which compile sooner than Numba's own.

An intrinsic's first parameter is Numba's typing context, which callers leave out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from jaxkv.compiling.parts import inlined


@intrinsic
def empty(typing_context: Any, num: Any, dtype: Any) -> Any:
    """Return `np.empty(num, dtype)`."""
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


@inlined
def filled(num: int, value: Any, dtype: Any) -> Any:
    """Return `np.full(num, value, dtype)`."""
    array = empty(num, dtype)
    for row in range(num):
        array[row] = value
    return array


@inlined
def copy_items(target: Any, start: int, source: Any, num: int) -> None:
    """Copy the first `num` items of an array into another, from `start` on.

    An assignment to a slice takes 0.1 s more to compile, for the text of its error.
    """
    for row in range(num):
        target[start + row] = source[row]


def _select(comparison: Any) -> Any:
    """Make an intrinsic: `second` if `comparison(second, first)`, else `first`."""

    def function(typing_context: Any, first: Any, second: Any) -> Any:
        kinds = types.unliteral(first), types.unliteral(second)
        kind = typing_context.unify_types(*kinds)
        compared = types.boolean(kind, kind)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            is_second = context.get_function(comparison, compared)(builder, args[::-1])
            return builder.select(is_second, args[1], args[0])

        return kind(kind, kind), generate

    return intrinsic(function)


lesser = _select(operator.lt)
"""The `min` of two numbers."""

greater = _select(operator.gt)
"""The `max` of two numbers."""


def _words_of_row(context: Any, builder: Any, type_: Any, array: Any, row: Any) -> Any:
    """Point to the 8 words of a row of a contiguous u32[N, 8]."""
    data = make_array(type_)(context, builder, array).data
    start = builder.gep(data, [builder.mul(row, ir.IntType(64)(8))])
    return builder.bitcast(start, ir.VectorType(ir.IntType(32), 8).as_pointer())


def _load_row(context: Any, builder: Any, type_: Any, array: Any, row: Any) -> Any:
    words = _words_of_row(context, builder, type_, array, row)
    return builder.load(words, align=4)


@intrinsic
def same_row(
    typing_context: Any, first: Any, first_row: Any, second: Any, second_row: Any
) -> Any:
    """Return whether two rows of u32[..., 8] are equal."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left = _load_row(context, builder, first, *args[:2])
        right = _load_row(context, builder, second, *args[2:])
        differ = builder.icmp_unsigned("!=", left, right)
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
        words = _load_row(context, builder, source, *args[2:])
        builder.store(words, to, align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), generate


@intrinsic
def equal_words(typing_context: Any, table: Any, row: Any, word: Any) -> Any:
    """Return which words of a row of u32[N, 8] equal a u32, as the bits of a u64.

    `row` is a u64.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word_type, wide = ir.IntType(32), ir.IntType(64)
        vector = ir.VectorType(word_type, 8)
        words = _load_row(context, builder, signature.args[0], *args[:2])
        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, args[2], word_type(0))
        lanes = builder.shuffle_vector(first, undefined, ir.Constant(vector, [0] * 8))
        bits = builder.icmp_unsigned("==", words, lanes)
        return builder.zext(builder.bitcast(bits, ir.IntType(8)), wide)

    return types.uint64(table, types.uint64, types.uint32), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Fetch the cache line of an item of a contiguous array, and do not wait for it.

    `index`, a u64, counts the items as if the array had one dimension.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(
            builder.module, kind, "llvm.prefetch.p0i8"
        )
        # For reading, and to be kept in all levels of the data cache.
        builder.call(function, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


def _of_bits(compute: Callable[[Any, Any], Any]) -> Any:
    """Make an intrinsic that returns a u64 for a u64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return compute(builder, args[0])

    def function(typing_context: Any, bits: Any) -> Any:
        return types.uint64(types.uint64), generate

    return intrinsic(function)


lowest_bit = _of_bits(lambda builder, bits: builder.cttz(bits, ir.IntType(1)(1)))
"""The index of the lowest set bit of a u64, which must not be 0."""

highest_bit = _of_bits(
    lambda builder, bits: builder.sub(
        ir.IntType(64)(63), builder.ctlz(bits, ir.IntType(1)(1))
    )
)
"""The index of the highest set bit of a u64, which must not be 0."""

count_bits = _of_bits(lambda builder, bits: builder.ctpop(bits))
"""The number of set bits of a u64."""

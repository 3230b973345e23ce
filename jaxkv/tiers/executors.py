"""Run the host tier's operations for callers in Python: arrays in, arrays out.

`NativeExecutor` keeps the state in NumPy arrays, which compiled functions
(`host_native`) update in place within microseconds. `XlaExecutor` keeps it in JAX
arrays and runs the pure functions (`host_state`) as XLA programs: for policies without
native functions, and for comparison. Both return the same answers and bit-identical
states. Keys are u32[n, 8], C-contiguous and read-only; n is at least 1.

`_Operations` is the table of operations over keys. To add one, write a function in
`host_state`, its in-place form in `host_native`, and a row of the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv._util import shown
from jaxkv.compiling import Bound, EntryPoints, copy_to_numpy, entry_point
from jaxkv.policies.base import Policy
from jaxkv.policies.facts import BEGIN, Facts, begun
from jaxkv.tiers import device_native, host_native, host_state
from jaxkv.tiers.base import refuse_outside
from jaxkv.tiers.host_state import HostState
from jaxkv.types import KEY_WORDS, NO_BLOCK

ExecutorName: TypeAlias = Literal["native", "xla"]
Words: TypeAlias = NDArray[np.uint32]
Ids: TypeAlias = NDArray[np.int64]
Blocks: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.bool_]
Positions: TypeAlias = NDArray[np.int32]

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer", covariant=True)

# Samples of the argument types that compiled functions get; keys are read-only.
_SAMPLE_KEYS = np.frombuffer(bytes(4 * KEY_WORDS), np.uint32).reshape(1, KEY_WORDS)
_SAMPLE_IDS = np.empty(1, np.int64)
_SAMPLE_POSITIONS = np.zeros(1, np.int32)

_MIN_BATCH_KEYS = 16
_BATCH_GROWTH = 4


class Store(NamedTuple):
    """The blocks allocated to store keys."""

    num_stored: int
    block_ids: Ids
    """i64[n]. NO_BLOCK where the key is already known or repeats an earlier one."""
    evicted_keys: Words
    """u32[m, 8]. In the order of eviction. Valid until the next call."""
    num_declined: int = 0
    """Keys that the policy does not want to store."""


class Step(NamedTuple):
    """The blocks to load for the hits of a request, and to store for its other keys."""

    num_hits: int
    """Length of the prefix to load."""
    num_stored: int
    block_ids: Ids
    """i64[n]. The blocks of the hits, then those of `Store`."""
    evicted_keys: Words | None
    """u32[m, 8]. The same as in `Store`; None if there was no room."""
    num_declined: int = 0
    """The same as in `Store`."""


def _as_store(
    counts: tuple[int, int, int], block_ids: Ids, evicted: Words
) -> Store | None:
    num_stored, num_evicted, num_declined = counts
    if num_evicted < 0:
        return None
    return Store(num_stored, block_ids, evicted[:num_evicted], num_declined)


def _as_step(counts: tuple[int, int, int, int], block_ids: Ids, evicted: Words) -> Step:
    num_hits, num_stored, num_evicted, num_declined = counts
    if num_evicted < 0:
        return Step(num_hits, num_stored, block_ids, None)
    return Step(num_hits, num_stored, block_ids, evicted[:num_evicted], num_declined)


class Op(Generic[Arguments, Answer]):
    """An operation over keys: a function in `host_state` and one in `host_native`.

    Args:
        samples: Samples of the arguments after the keys; an int is static for XLA.
        writes: The dtype of an array, one item per key, that the native function
            writes and the pure one returns; None for none.
        counts: Whether both functions also return a number, for the answer.
        evicts_as: ``(numbers that both return, array, evicted keys) -> answer`` for a
            function that also writes evicted keys, u32[n, 8]; None for others.
    """

    def __init__(
        self,
        *samples: Any,
        writes: Any = None,
        counts: bool = False,
        evicts_as: Callable[..., Any] | None = None,
    ) -> None:
        self.samples, self.writes, self.counts = samples, writes, counts
        self.evicts_as = evicts_as

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(
        self, executor: _Operations, owner: type | None = None
    ) -> Callable[Arguments, Answer]:
        return executor._bind(self)


class _Operations:
    """The operations over keys, as documented in `jaxkv.tiers.host_state`."""

    find = Op[[Words], Blocks](writes=np.int32)
    find_readable = Op[[Words], Blocks](writes=np.int32)
    lookup = Op[[Words], int]()
    touch = Op[[Words, bool], None](True)
    note = Op[[Words, int, Positions, Facts], int](
        BEGIN, _SAMPLE_POSITIONS, begun(0, 0)
    )
    prepare_load = Op[[Words], tuple[int, Ids]](writes=np.int64, counts=True)
    complete_load = Op[[Words], tuple[int, Ids]](writes=np.int64, counts=True)
    prepare_store = Op[[Words, bool], Store | None](
        True, writes=np.int64, evicts_as=_as_store
    )
    complete_store = Op[[Words, bool], Flags](True, writes=np.bool_)
    discard = Op[[Words], Flags](writes=np.bool_)
    request_step = Op[[Words], Step](writes=np.int64, evicts_as=_as_step)

    def _bind(self, op: Op[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError


class NativeExecutor(_Operations):
    """Runs compiled functions over NumPy arrays, a copy of the passed state."""

    def __init__(self, policy: Policy, state: HostState) -> None:
        assert policy.native is not None
        self.state: HostState = copy_to_numpy(state)
        self._policy = policy
        self._bound = Bound(self.state)
        self._ref_cnt = self.state.ref_cnt
        self._evicted = _EvictedKeys()
        self._by_ids = EntryPoints(
            host_native,
            {
                "pin": (self._ref_cnt, _SAMPLE_IDS),
                "complete_step": (self._ref_cnt, _SAMPLE_IDS, 0, 0),
            },
        )
        # Functions that also take the device tier, added at their first call.
        self._by_device: dict[str, Callable[..., Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return make_executor, (self._policy, "native", self.state)

    def _bind(self, op: Op[..., Any]) -> Callable[..., Any]:
        """Make the function of an operation at its first use.

        The function must not refer to the executor, which stores it: the reference
        cycle would keep the state of a replaced executor alive.
        """
        bound, buffer = self._bound, self._evicted
        dtype = op.writes
        as_answer: Any = op.evicts_as
        arrays: list[Any] = [] if dtype is None else [np.empty(1, dtype)]
        arrays += [buffer.get(1)] if as_answer else []
        function = entry_point(
            getattr(host_native, op.name), bound, _SAMPLE_KEYS, *op.samples, *arrays
        )

        def write(keys: Words) -> Any:
            array = np.empty(len(keys), dtype)
            function(bound, keys, array)
            return array

        def write_and_count(keys: Words) -> Any:
            array = np.empty(len(keys), dtype)
            return function(bound, keys, array), array

        def write_with(keys: Words, argument: Any) -> Any:
            array = np.empty(len(keys), dtype)
            function(bound, keys, argument, array)
            return array

        def write_evicted(keys: Words, *flags: bool) -> Any:
            array, evicted = np.empty(len(keys), dtype), buffer.get(len(keys))
            counts = function(bound, keys, *flags, array, evicted)
            return as_answer(counts, array, evicted)

        call: Callable[..., Any] = functools.partial(function, bound)
        if as_answer:
            call = write_evicted
        elif arrays:
            call = write_and_count if op.counts else write_with if op.samples else write
        setattr(self, op.name, call)  # Later look-ups bypass `Op.__get__`.
        return call

    def pin(self, block_ids: Ids) -> bool:
        """Pin blocks; return False if one is being stored. Raise if out of range."""
        ok: bool = self._by_ids.pin(self._ref_cnt, block_ids)
        if not ok:
            refuse_outside(block_ids, len(self._ref_cnt))
        return ok

    def complete_step(
        self, block_ids: Ids, num_hits: int, min_id: int = NO_BLOCK
    ) -> bool:
        """End the loads of the first `num_hits` blocks and the stores of the others.

        Return False if one is not in progress. Raise if there are fewer ids, or an id
        is out of range; NO_BLOCK is in range if it is `min_id`.
        """
        if not 0 <= num_hits <= len(block_ids):
            _refuse_hits(num_hits, len(block_ids))
        ok: bool = self._by_ids.complete_step(
            self._ref_cnt, block_ids, num_hits, min_id
        )
        if not ok:
            refuse_outside(block_ids, len(self._ref_cnt), min_id)
        return ok

    def place_from(
        self, device: Bound, keys: Words, sources: Ids, is_head: bool
    ) -> Store | None:
        """Allocate blocks for absent keys, and pin their device blocks (`sources`).

        If the keys begin a prefix (`is_head`), they are reordered. Return None if there
        is no room, or a device block does not have its key.
        """
        block_ids, evicted = np.empty(len(keys), np.int64), self._evicted.get(len(keys))
        counts = self._call(
            "place_from",
            device,
            self._bound,
            keys,
            sources,
            is_head,
            block_ids,
            evicted,
        )
        return _as_store(counts, block_ids, evicted)

    def next_victims(
        self, device: Bound, num: int, block_ids: Ids, copies: Ids, rows: Ids, keys: Any
    ) -> tuple[int, int]:
        """Write the device's next victims; see `host_native`.

        Return how many blocks have a key, and how many of these have no copy.
        """
        read_only = keys.view()
        read_only.flags.writeable = False
        outputs = block_ids, copies, rows, keys
        counts: tuple[int, int] = self._call(
            "next_victims", device, self._bound, num, *outputs, read_only
        )
        return counts

    def _call(self, name: str, *arguments: Any) -> Any:
        function = self._by_device.get(name)
        if function is None:
            function = entry_point(getattr(host_native, name), *arguments)
            self._by_device[name] = function
        return function(*arguments)


class _EvictedKeys:
    """The output buffer for evicted keys, reused by each call."""

    def __init__(self) -> None:
        self._words = np.empty((_MIN_BATCH_KEYS, KEY_WORDS), np.uint32)

    def get(self, num_keys: int) -> Words:
        if len(self._words) < num_keys:
            self._words = np.empty((2 * num_keys, KEY_WORDS), np.uint32)
        return self._words


class XlaExecutor(_Operations):
    """Runs the pure functions as XLA programs, with keys padded to a few sizes.

    It has all methods of `NativeExecutor` except `place_from`.
    """

    def __init__(self, policy: Policy, state: HostState) -> None:
        self._policy = policy
        self.state: HostState = jax.device_put(copy_to_numpy(state), cpu_device())

    def __reduce__(self) -> tuple[Any, ...]:
        return make_executor, (self._policy, "xla", self.state)

    def _bind(self, op: Op[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._run, op)

    def _run(self, op: Op[..., Any], keys: Words, *arguments: Any) -> Any:
        num_keys = len(keys)
        padded = np.zeros((_padded(num_keys), KEY_WORDS), np.uint32)
        padded[:num_keys] = keys
        static = tuple(value for value in arguments if type(value) is int)
        traced = map(_as_traced, arguments[len(static) :])
        self.state, result = _compiled(
            *(op.name, static, self._policy, self.state, padded, np.int32(num_keys)),
            *traced,
        )

        def as_native(value: Any) -> Any:
            if not value.ndim:
                return value.item()
            rows = np.asarray(value)[:num_keys]
            return rows.astype(op.writes) if rows.ndim == 1 else rows

        result = jax.tree.map(as_native, result)
        if not isinstance(result, tuple):
            return result
        if op.evicts_as:
            return op.evicts_as(result[:-2], *result[-2:])
        return result if op.counts else result[-1]

    def pin(self, block_ids: Ids) -> bool:
        refuse_outside(block_ids, self._policy.num_blocks)
        self.state, ok = _pin(self.state, _pad(block_ids, NO_BLOCK))
        return bool(ok)

    def complete_step(
        self, block_ids: Ids, num_hits: int, min_id: int = NO_BLOCK
    ) -> bool:
        _refuse_hits(num_hits, len(block_ids))
        refuse_outside(block_ids, self._policy.num_blocks, min_id)
        padded = _pad(block_ids, NO_BLOCK)
        self.state, ok = _complete_step(self.state, padded, np.int32(num_hits))
        return bool(ok)

    def next_victims(
        self, device: Bound, num: int, block_ids: Ids, copies: Ids, rows: Ids, keys: Any
    ) -> tuple[int, int]:
        num_victims, num_unknown = device_native.next_victims(
            device, num, block_ids, copies, rows, keys
        )
        if not num_unknown:
            return num_victims, 0
        on_host = self.find(keys[:num_unknown]).astype(np.int64)
        has_copy, unknown = on_host != NO_BLOCK, rows[:num_unknown].copy()
        copies[unknown] = on_host
        copied = block_ids[unknown[has_copy]]
        device_native.record_copies(device, copied, on_host[has_copy])
        num_uncopied = num_unknown - np.count_nonzero(has_copy)
        rows[:num_uncopied] = unknown[~has_copy]
        keys[:num_uncopied] = keys[:num_unknown][~has_copy]
        return num_victims, num_uncopied


Executor: TypeAlias = NativeExecutor | XlaExecutor


def make_executor(
    policy: Policy, name: ExecutorName = "native", state: HostState | None = None
) -> Executor:
    """Make the executor of a tier from a copy of `state`, or of an empty tier.

    A policy without native functions always gets an `XlaExecutor`.
    """
    if not isinstance(name, str) or name not in ("native", "xla"):
        raise ValueError(f"executor={shown(name)} must be 'native' or 'xla'.")
    if state is None:
        with jax.default_device(cpu_device()):
            state = host_state.init(policy)
    if name == "native" and policy.native is not None:
        return NativeExecutor(policy, state)
    if not policy.is_pure:
        name_of_policy = type(state.policy).__name__.removesuffix("State").lower()
        raise ValueError(
            "executor='xla' runs policies with pure functions, such as 'lru' and "
            f"'arc', not {name_of_policy!r}: use executor='native'."
        )
    return XlaExecutor(policy, state)


def cpu_device() -> jax.Device:
    """Return the CPU device, or the first device if the CPU backend is disabled."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _compiled(
    name: str,
    static: tuple[int, ...],
    policy: Policy,
    state: HostState,
    keys: Any,
    count: Any,
    *traced: Any,
) -> Any:
    """Run a pure function, which returns a state, an answer, or both."""
    function = getattr(host_state, name)
    result = function(policy, state, keys, count, *static, *traced)
    if isinstance(result, HostState):
        return result, None
    if isinstance(result, tuple) and isinstance(result[0], HostState):
        return result
    return state, result


_pin = jax.jit(host_state.pin, donate_argnums=0)
_complete_step = jax.jit(host_state.complete_step, donate_argnums=0)


def _refuse_hits(num_hits: int, num: int) -> None:
    if not 0 <= num_hits <= num:
        raise ValueError(f"num_hits={shown(num_hits)} must be in [0, {num}].")


def _padded(size: int) -> int:
    """Round up to a size that programs are compiled for."""
    padded = _MIN_BATCH_KEYS
    while padded < size:
        padded *= _BATCH_GROWTH
    return padded


def _as_traced(argument: Any) -> Any:
    """Pad an array with one item per key; convert facts to an array of 32 bits."""
    if isinstance(argument, np.ndarray):
        return _pad(argument, 0)
    is_facts = isinstance(argument, tuple)
    return np.array(argument, np.int64).astype(np.int32) if is_facts else argument


def _pad(numbers: NDArray[Any], padding: int) -> NDArray[np.int32]:
    padded = np.full(_padded(len(numbers)), padding, np.int32)
    padded[: len(numbers)] = numbers
    return padded

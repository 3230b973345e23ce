"""Who runs the host tier's transitions for callers in Python: arrays in, arrays out.

`NativeExecutor` has the state in NumPy arrays and updates them in place by compiled
functions (`host_native`): microseconds a call. `XlaExecutor` has it in JAX arrays and
runs the pure functions (`host_state`) as XLA programs: for policies that have no
others, and for comparison. Both give the same answers and, to the bit, the same states.
Keys are u32[n, 8], C-contiguous and read-only; n is at least 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv._util import shown
from jaxkv.compiling import Bound, EntryPoints, entry_point, own
from jaxkv.policies.base import Policy
from jaxkv.tiers import device_native as native_device
from jaxkv.tiers import host_native as native
from jaxkv.tiers import host_state
from jaxkv.tiers.base import refuse_outside
from jaxkv.tiers.host_state import HostState
from jaxkv.types import KEY_WORDS, NO_BLOCK

ExecutorName: TypeAlias = Literal["native", "xla"]
Words: TypeAlias = NDArray[np.uint32]
Ids: TypeAlias = NDArray[np.int64]
Positions: TypeAlias = NDArray[np.int32]

# What compiled functions are made ready for; keys are read-only.
_SOME_KEYS = np.frombuffer(bytes(4 * KEY_WORDS), np.uint32).reshape(1, KEY_WORDS)
_SOME_IDS = np.empty(1, np.int64)
_SOME_POSITIONS = np.zeros(1, np.int32)

_SMALLEST_BATCH = 16
_BATCH_STEP = 4


class Store(NamedTuple):
    """Where to store keys.

    Attributes:
        num_stored: How many keys to store.
        block_ids: i64[n]. NO_BLOCK where the key is known or repeats an earlier one.
        evicted_keys: u32[m, 8]. Keys that had to leave, in the order of eviction. Good
            until the next call.
    """

    num_stored: int
    block_ids: Ids
    evicted_keys: Words


class Step(NamedTuple):
    """What to load and where to store.

    Attributes:
        num_hits: Keys, from the first on, to load.
        num_stored: How many keys to store.
        block_ids: i64[n]. The blocks of the hits, then as `Store.block_ids`.
        evicted_keys: u32[m, 8]. As in `Store`; None if there was no room.
    """

    num_hits: int
    num_stored: int
    block_ids: Ids
    evicted_keys: Words | None


def make_executor(
    policy: Policy, name: ExecutorName = "native", state: HostState | None = None
) -> Executor:
    """Make the executor of a tier.

    Args:
        policy: The cache policy.
        name: "xla" to run the pure functions; "native" to run the others, where the
            policy has them.
        state: What to begin with; it is copied. None for an empty tier.

    Raises:
        ValueError: If the name is neither.
    """
    if name not in ("native", "xla"):
        raise ValueError(f"executor={shown(name)} must be 'native' or 'xla'.")
    if state is None:
        with jax.default_device(cpu_device()):
            state = host_state.init(policy)
    if name == "native" and policy.native is not None:
        return NativeExecutor(policy, state)
    return XlaExecutor(policy, state)


class NativeExecutor:
    """Runs compiled functions over NumPy arrays.

    `jaxkv.tiers.host_state` says what each transition does.

    Args:
        policy: The cache policy; it has native functions.
        state: What to begin with; it is copied.

    Attributes:
        state: The state, with arrays that calls change.
    """

    def __init__(self, policy: Policy, state: HostState) -> None:
        assert policy.native is not None
        self.state: HostState = own(state)
        self._policy = policy
        self._variant = policy.native.variant
        self._bound = Bound(self.state)
        self._ref_cnt = self.state.ref_cnt
        # Room for the keys that a call evicts, kept from call to call.
        self._evicted = np.empty((_SMALLEST_BATCH, KEY_WORDS), np.uint32)
        # What takes the device's state, too, made ready when it is first called.
        self._beside: dict[str, Callable[..., Any]] = {}
        bound, variant, evicted = self._bound, self._variant, self._evicted
        self._native = EntryPoints(
            native,
            {
                "find": (bound, _SOME_KEYS, np.empty(1, np.int32)),
                "find_readable": (bound, _SOME_KEYS, np.empty(1, np.int32)),
                "lookup": (bound, _SOME_KEYS),
                "touch": (bound, variant, _SOME_KEYS, True),
                "begin": (bound, _SOME_KEYS, _SOME_POSITIONS, 0, 0),
                "finish": (bound, _SOME_KEYS, _SOME_POSITIONS, 0, 0, 0, 0),
                "retain": (bound, _SOME_KEYS, 0, 0, 0, 0),
                "prepare_load": (bound, _SOME_KEYS, _SOME_IDS),
                "complete_load": (bound, _SOME_KEYS, _SOME_IDS),
                "pin": (self._ref_cnt, _SOME_IDS),
                "complete_step": (self._ref_cnt, _SOME_IDS, 0, 0),
                "prepare_store": (bound, variant, _SOME_KEYS, _SOME_IDS, evicted),
                "complete_store": (bound, _SOME_KEYS, True, np.empty(1, np.bool_)),
                "discard": (bound, _SOME_KEYS, np.empty(1, np.bool_)),
                "request_step": (bound, variant, _SOME_KEYS, _SOME_IDS, evicted),
            },
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return make_executor, (self._policy, "native", self.state)

    def find(self, keys: Words) -> NDArray[np.int32]:
        """Find the block of each key, one that is being stored included: i32[n]."""
        block_ids = np.empty(len(keys), np.int32)
        self._native.find(self._bound, keys, block_ids)
        return block_ids

    def find_readable(self, keys: Words) -> NDArray[np.int32]:
        """Find the block of each key whose bytes have arrived: i32[n]."""
        block_ids = np.empty(len(keys), np.int32)
        self._native.find_readable(self._bound, keys, block_ids)
        return block_ids

    def find_beside(
        self, device: Bound, keys: Words
    ) -> tuple[int, NDArray[np.int32], NDArray[np.int32]]:
        """Find a prefix of which each block is on the device or can be read here.

        Returns:
            How many keys, from the first on, have a block; and the block of each on the
            device and here: i32[n]. What these say of other keys means nothing.
        """
        on_device, on_host = np.empty((2, len(keys)), np.int32)
        num = self._call("find_beside", device, self._bound, keys, on_device, on_host)
        return num, on_device, on_host

    def place_from(
        self, device: Bound, keys: Words, sources: Ids, is_head: bool
    ) -> Store | None:
        """Give unknown keys blocks, and pin the device blocks that hold them.

        Args:
            device: The device tier.
            keys: The keys.
            sources: The device blocks that are said to hold them.
            is_head: Whether the first one begins a prefix. They are reordered then.

        Returns:
            None if there is no room, or a device block does not hold its key.
        """
        block_ids, evicted = np.empty(len(keys), np.int64), self._room(len(keys))
        num_stored, num_evicted = self._call(
            "place_from",
            device,
            self._bound,
            self._variant,
            keys,
            sources,
            is_head,
            block_ids,
            evicted,
        )
        if num_evicted < 0:
            return None
        return Store(num_stored, block_ids, evicted[:num_evicted])

    def next_victims(
        self, device: Bound, num: int, block_ids: Ids, copies: Ids, rows: Ids, keys: Any
    ) -> tuple[int, int]:
        """Find what the device evicts next; note what is here of it: see `host_native`.

        Returns:
            How many have a key; how many of them are not here.
        """
        same = keys.view()
        same.flags.writeable = False
        found: tuple[int, int] = self._call(
            "next_victims",
            device,
            self._bound,
            num,
            block_ids,
            copies,
            rows,
            keys,
            same,
        )
        return found

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call what takes the device's state, too."""
        function = self._beside.get(name)
        if function is None:
            function = entry_point(getattr(native, name), *arguments)
            self._beside[name] = function
        return function(*arguments)

    def lookup(self, keys: Words) -> int:
        """Count the keys, from the first on, that can be read."""
        num_hits: int = self._native.lookup(self._bound, keys)
        return num_hits

    def touch(self, keys: Words, counts_as_use: bool = True) -> None:
        """Record a use of each key, or only move them."""
        self._native.touch(self._bound, self._variant, keys, counts_as_use)

    def begin(
        self, keys: Words, positions: Positions, now_ms: int, num_tokens: int
    ) -> int:
        """Tell the policy that a request begins; return what `finish` takes."""
        mark: int = self._native.begin(self._bound, keys, positions, now_ms, num_tokens)
        return mark

    def finish(
        self,
        keys: Words,
        positions: Positions,
        now_ms: int,
        num_output_tokens: int,
        stop: int,
        mark: int,
    ) -> None:
        """Tell the policy that a request has finished."""
        self._native.finish(
            self._bound, keys, positions, now_ms, num_output_tokens, stop, mark
        )

    def retain(
        self,
        keys: Words,
        priority: int,
        half_life_ms: int,
        ttl_ms: int,
        given_ms: int,
    ) -> None:
        """Give blocks a priority."""
        self._native.retain(self._bound, keys, priority, half_life_ms, ttl_ms, given_ms)

    def prepare_load(self, keys: Words) -> tuple[Ids, int]:
        """Pin blocks: their ids, and the first row that cannot be read or -1."""
        block_ids = np.empty(len(keys), np.int64)
        return block_ids, self._native.prepare_load(self._bound, keys, block_ids)

    def complete_load(self, keys: Words) -> tuple[Ids, int]:
        """Unpin blocks: their ids, and the first row that is not pinned or -1."""
        block_ids = np.empty(len(keys), np.int64)
        return block_ids, self._native.complete_load(self._bound, keys, block_ids)

    def pin(self, block_ids: Ids) -> bool:
        """Pin blocks by their ids, unless one is being stored.

        Raises:
            ValueError: If one is no block's.
        """
        is_done: bool = self._native.pin(self._ref_cnt, block_ids)
        if not is_done:
            refuse_outside(block_ids, len(self._ref_cnt))
        return is_done

    def complete_step(
        self, block_ids: Ids, num_hits: int, least: int = NO_BLOCK
    ) -> bool:
        """End loads of the first blocks and stores of the others.

        Raises:
            ValueError: If there are less than `num_hits`, or one is no block's, nor
                NO_BLOCK where that is the `least`.
        """
        if not 0 <= num_hits <= len(block_ids):
            _refuse_hits(num_hits, len(block_ids))
        is_done: bool = self._native.complete_step(
            self._ref_cnt, block_ids, num_hits, least
        )
        if not is_done:
            refuse_outside(block_ids, len(self._ref_cnt), least)
        return is_done

    def prepare_store(self, keys: Words) -> Store | None:
        """Give unknown keys blocks; None if there is no room."""
        block_ids, evicted = np.empty(len(keys), np.int64), self._room(len(keys))
        num_stored, num_evicted = self._native.prepare_store(
            self._bound, self._variant, keys, block_ids, evicted
        )
        if num_evicted < 0:
            return None
        return Store(num_stored, block_ids, evicted[:num_evicted])

    def complete_store(self, keys: Words, success: bool) -> NDArray[np.bool_]:
        """End stores; tell of each key whether its store ended: bool[n]."""
        ended = np.empty(len(keys), np.bool_)
        self._native.complete_store(self._bound, keys, success, ended)
        return ended

    def discard(self, keys: Words) -> NDArray[np.bool_]:
        """Forget idle blocks; tell which keys were forgotten: bool[n]."""
        gone = np.empty(len(keys), np.bool_)
        self._native.discard(self._bound, keys, gone)
        return gone

    def request_step(self, keys: Words) -> Step:
        """Pin what is there and find room for the rest."""
        block_ids, evicted = np.empty(len(keys), np.int64), self._room(len(keys))
        num_hits, num_stored, num_evicted = self._native.request_step(
            self._bound, self._variant, keys, block_ids, evicted
        )
        gone = None if num_evicted < 0 else evicted[:num_evicted]
        return Step(num_hits, num_stored, block_ids, gone)

    def _room(self, num_keys: int) -> Words:
        if len(self._evicted) < num_keys:
            self._evicted = np.empty((2 * num_keys, KEY_WORDS), np.uint32)
        return self._evicted


class XlaExecutor:
    """Runs the pure functions as XLA programs, with keys padded to a few sizes.

    Its methods are those of `NativeExecutor`.

    Args:
        policy: The cache policy.
        state: What to begin with; it is copied.
    """

    def __init__(self, policy: Policy, state: HostState) -> None:
        self._policy = policy
        self.state: HostState = jax.device_put(own(state), cpu_device())

    def __reduce__(self) -> tuple[Any, ...]:
        return make_executor, (self._policy, "xla", self.state)

    def find(self, keys: Words) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self._run(_reading(_find), keys)
        return found

    def find_readable(self, keys: Words) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self._run(_reading(host_state.find_readable), keys)
        return found

    def find_beside(
        self, device: Bound, keys: Words
    ) -> tuple[int, NDArray[np.int32], NDArray[np.int32]]:
        on_device, on_host = np.empty(len(keys), np.int32), self.find_readable(keys)
        native_device.find(device, keys, on_device)
        is_missing = (on_device == NO_BLOCK) & (on_host == NO_BLOCK)
        num = int(is_missing.argmax()) if is_missing.any() else len(keys)
        return num, on_device, on_host

    def next_victims(
        self, device: Bound, num: int, block_ids: Ids, copies: Ids, rows: Ids, keys: Any
    ) -> tuple[int, int]:
        num_found, num_bare = native_device.next_victims(
            device, num, block_ids, copies, rows, keys
        )
        if not num_bare:
            return num_found, 0
        held = self.find(keys[:num_bare]).astype(np.int64)
        is_here, bare = held != NO_BLOCK, rows[:num_bare].copy()
        copies[bare] = held
        native_device.note_copies(device, block_ids[bare[is_here]], held[is_here])
        num_left = num_bare - np.count_nonzero(is_here)
        rows[:num_left] = bare[~is_here]
        keys[:num_left] = keys[:num_bare][~is_here]
        return num_found, num_left

    def lookup(self, keys: Words) -> int:
        return int(self._run(_reading(host_state.lookup), keys))

    def touch(self, keys: Words, counts_as_use: bool = True) -> None:
        function = host_state.touch if counts_as_use else host_state.reorder
        self._run(_writing(function), keys)

    def begin(
        self, keys: Words, positions: Positions, now_ms: int, num_tokens: int
    ) -> int:
        told = _pad_zeros(positions), np.uint32(now_ms), np.int32(num_tokens)
        return int(self._run(host_state.begin, keys, *told))

    def finish(
        self,
        keys: Words,
        positions: Positions,
        now_ms: int,
        num_output_tokens: int,
        stop: int,
        mark: int,
    ) -> None:
        numbers = map(np.int32, (num_output_tokens, stop, mark))
        told = _pad_zeros(positions), np.uint32(now_ms), *numbers
        self._run(_writing(host_state.finish), keys, *told)

    def retain(
        self,
        keys: Words,
        priority: int,
        half_life_ms: int,
        ttl_ms: int,
        given_ms: int,
    ) -> None:
        terms = map(np.uint32, (half_life_ms, ttl_ms, given_ms))
        self._run(_writing(host_state.retain), keys, np.int32(priority), *terms)

    def prepare_load(self, keys: Words) -> tuple[Ids, int]:
        return _ids_and_first(self._run(host_state.prepare_load, keys))

    def complete_load(self, keys: Words) -> tuple[Ids, int]:
        return _ids_and_first(self._run(host_state.complete_load, keys))

    def pin(self, block_ids: Ids) -> bool:
        refuse_outside(block_ids, self._policy.num_blocks)
        self.state, ok = _pin(self.state, _pad(block_ids))
        return bool(ok)

    def complete_step(
        self, block_ids: Ids, num_hits: int, least: int = NO_BLOCK
    ) -> bool:
        _refuse_hits(num_hits, len(block_ids))
        refuse_outside(block_ids, self._policy.num_blocks, least)
        self.state, ok = _complete_step(self.state, _pad(block_ids), np.int32(num_hits))
        return bool(ok)

    def prepare_store(self, keys: Words) -> Store | None:
        answer = self._run(host_state.prepare_store, keys)
        if not answer.ok:
            return None
        evicted = answer.evicted_keys[: int(answer.num_evicted)]
        num_stored = int(np.count_nonzero(answer.block_ids != NO_BLOCK))
        return Store(num_stored, answer.block_ids.astype(np.int64), evicted)

    def complete_store(self, keys: Words, success: bool) -> NDArray[np.bool_]:
        ended: NDArray[np.bool_]
        ended = self._run(host_state.complete_store, keys, np.bool_(success))
        return ended

    def discard(self, keys: Words) -> NDArray[np.bool_]:
        gone: NDArray[np.bool_] = self._run(host_state.discard, keys)
        return gone

    def request_step(self, keys: Words) -> Step:
        answer = self._run(host_state.request_step, keys)
        evicted = answer.evicted_keys[: int(answer.num_evicted)] if answer.ok else None
        num_hits = int(answer.num_hits)
        num_stored = int(np.count_nonzero(answer.block_ids[num_hits:] != NO_BLOCK))
        return Step(num_hits, num_stored, answer.block_ids.astype(np.int64), evicted)

    def _run(self, function: Callable[..., Any], keys: Words, *more: Any) -> Any:
        """Run a function; arrays of its answer that have a row a key are cut to n."""
        num_keys = len(keys)
        padded = np.zeros((_padded(num_keys), KEY_WORDS), np.uint32)
        padded[:num_keys] = keys
        self.state, answer = _compiled(
            function, self._policy, self.state, padded, np.int32(num_keys), *more
        )
        return jax.tree.map(
            lambda x: np.asarray(x)[:num_keys] if x.ndim else np.asarray(x)[()], answer
        )


Executor: TypeAlias = NativeExecutor | XlaExecutor


def cpu_device() -> jax.Device:
    """Choose the CPU backend; where it is switched off, whatever there is."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _find(policy: Policy, state: HostState, *batch: Any) -> Any:
    return policy.find(state.policy, *batch)


@functools.cache
def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function that only answers give the state as well."""
    return lambda policy, state, *batch: (state, function(policy, state, *batch))


@functools.cache
def _writing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function that only changes the state answer as well."""
    return lambda policy, state, *batch: (function(policy, state, *batch), ())


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _compiled(
    function: Callable[..., Any], policy: Policy, state: HostState, *batch: Any
) -> Any:
    return function(policy, state, *batch)


_pin = jax.jit(host_state.pin, donate_argnums=0)
_complete_step = jax.jit(host_state.complete_step, donate_argnums=0)


def _refuse_hits(num_hits: int, num: int) -> None:
    if not 0 <= num_hits <= num:
        raise ValueError(f"num_hits={shown(num_hits)} must be in [0, {num}].")


def _padded(size: int) -> int:
    """Round up to one of the sizes that programs are compiled for."""
    padded = _SMALLEST_BATCH
    while padded < size:
        padded *= _BATCH_STEP
    return padded


def _pad(block_ids: Ids) -> NDArray[np.int32]:
    padded = np.full(_padded(len(block_ids)), NO_BLOCK, np.int32)
    padded[: len(block_ids)] = block_ids
    return padded


def _pad_zeros(positions: Positions) -> NDArray[np.int32]:
    padded = np.zeros(_padded(len(positions)), np.int32)
    padded[: len(positions)] = positions
    return padded


def _ids_and_first(answer: host_state.LoadAnswer) -> tuple[Ids, int]:
    bad = np.asarray(answer.bad)
    return np.asarray(answer.block_ids, np.int64), (
        int(bad.argmax()) if bad.any() else -1
    )

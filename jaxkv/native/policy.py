"""What a cache policy does in place: the native counterpart of the pure contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core.extending import overload

from jaxkv.native.compiling import StateType, label_state


class NativePolicy(NamedTuple):
    """The functions of a policy that update its state in place.

    They are compiled by Numba (`jaxkv.native.compiling.compiled`) and do what the pure
    functions of `jaxkv.policies.base.Policy` of the same names do, to the bit. They
    take the policy's state, whose arrays are NumPy's. An entry is whatever a policy
    numbers its keys by, -1 for none; all arguments that are arrays of K rows are of
    the keys of one call.

    Attributes:
        find: ``(state, keys, entries, block_ids)``. Write the entry of each key of
            `keys` (u32[K, 8]) to `entries` (i32[K]) and its block to `block_ids`
            (i32[K]), NO_BLOCK where it has none. Changes no state.
        touch: ``(state, variant, entries, is_use)``. Record a use of each entry, the
            first as the most recent; where `is_use` (bool[K]) is false it changes no
            more than the order.
        insert: ``(state, variant, keys, block_ids)``. Add a key wherever `block_ids`
            (i32[K]) is not NO_BLOCK, which is written where there is no room for it.
        remove: ``(state, entries)``. Forget entries, each of which holds a block.
        evict: ``(state, variant, num, ref_cnt, block_ids, keys) -> bool``. Evict `num`
            blocks whose `ref_cnt` (i32[B]) is 0, write their ids to `block_ids`
            (i32[K]) and their keys to `keys` (u32[K, 8]); all or none.
        variant: A number that three of them are given, so that policies which differ
            in details share their machine code.
        begin: ``(state, keys, positions, now_ms, num_tokens) -> mark``. A request
            begins; None, as for `finish`, where the policy is not to be told.
        finish: ``(state, keys, positions, now_ms, num_output_tokens, stop, mark)``.
            It has finished.
        retain: ``(state, keys, priority, half_life_ms, ttl_ms, given_ms)``. Give
            blocks a priority; None where there are none.
        remove_blocks: ``(state, entries, block_ids)``. In place of `remove`, for a
            policy that has to know the blocks (i32[K]) of the entries; None, as a rule.
    """

    find: Callable[..., None]
    touch: Callable[..., None]
    insert: Callable[..., None]
    remove: Callable[..., None]
    evict: Callable[..., Any]
    variant: int = 0
    begin: Callable[..., Any] | None = None
    finish: Callable[..., None] | None = None
    retain: Callable[..., None] | None = None
    remove_blocks: Callable[..., None] | None = None

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """All of them, without the variant."""
        more = self.begin, self.finish, self.retain, self.remove_blocks
        return (*self[:5], *(own for own in more if own is not None))


_natives: dict[str, NativePolicy] = {}  # by the label of their states
_labels: dict[type, str] = {}


def register_native(state_class: type, native: NativePolicy) -> None:
    """Have compiled functions call a policy's own wherever they meet its state.

    Args:
        state_class: The class of the policy's state.
        native: Its functions.

    Raises:
        ValueError: If the class is known with other functions.
    """
    known = _natives.get(_labels.get(state_class, ""))
    if known is not None and known.functions != native.functions:
        raise ValueError(
            f"{state_class} has native functions already; another policy must have a "
            "state class of its own."
        )
    _labels[state_class] = label = label_state(state_class, native.functions)
    _natives[label] = native


def find(state: Any, keys: Any, entries: Any, block_ids: Any) -> None:
    """Call the policy's `find`, in compiled functions; so do the others here."""
    _natives[_labels[type(state)]].find(state, keys, entries, block_ids)


def touch(state: Any, variant: int, entries: Any, is_use: Any) -> None:
    """Call the policy's `touch`."""
    _natives[_labels[type(state)]].touch(state, variant, entries, is_use)


def insert(state: Any, variant: int, keys: Any, block_ids: Any) -> None:
    """Call the policy's `insert`."""
    _natives[_labels[type(state)]].insert(state, variant, keys, block_ids)


def remove(state: Any, entries: Any, block_ids: Any) -> None:
    """Call the policy's `remove`, or `remove_blocks` if it has that."""
    own = _natives[_labels[type(state)]]
    if own.remove_blocks is None:
        own.remove(state, entries)
    else:
        own.remove_blocks(state, entries, block_ids)


def no_remove(state: Any, entries: Any) -> None:
    """Stand for the `remove` of a policy that has `remove_blocks`."""


def evict(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """Call the policy's `evict`."""
    own = _natives[_labels[type(state)]].evict
    return own(state, variant, num, ref_cnt, block_ids, keys)


def begin(state: Any, keys: Any, positions: Any, now_ms: int, num_tokens: int) -> Any:
    """Call the policy's `begin`, if it has one."""
    own = _natives[_labels[type(state)]].begin
    return 0 if own is None else own(state, keys, positions, now_ms, num_tokens)


def finish(
    state: Any,
    keys: Any,
    positions: Any,
    now_ms: int,
    num_output_tokens: int,
    stop: int,
    mark: int,
) -> None:
    """Call the policy's `finish`, if it has one."""
    own = _natives[_labels[type(state)]].finish
    if own is not None:
        own(state, keys, positions, now_ms, num_output_tokens, stop, mark)


def retain(
    state: Any,
    keys: Any,
    priority: int,
    half_life_ms: int,
    ttl_ms: int,
    given_ms: int,
) -> None:
    """Call the policy's `retain`, if it has one."""
    own = _natives[_labels[type(state)]].retain
    if own is not None:
        own(state, keys, priority, half_life_ms, ttl_ms, given_ms)


@overload(find)
def _find(state: Any, keys: Any, entries: Any, block_ids: Any) -> Any:
    own = _native_of(state).find

    def call(state: Any, keys: Any, entries: Any, block_ids: Any) -> Any:
        own(state, keys, entries, block_ids)

    return call


@overload(touch)
def _touch(state: Any, variant: int, entries: Any, is_use: Any) -> Any:
    own = _native_of(state).touch

    def call(state: Any, variant: int, entries: Any, is_use: Any) -> Any:
        own(state, variant, entries, is_use)

    return call


@overload(insert)
def _insert(state: Any, variant: int, keys: Any, block_ids: Any) -> Any:
    own = _native_of(state).insert

    def call(state: Any, variant: int, keys: Any, block_ids: Any) -> Any:
        own(state, variant, keys, block_ids)

    return call


@overload(remove)
def _remove(state: Any, entries: Any, block_ids: Any) -> Any:
    own, of_blocks = _native_of(state).remove, _native_of(state).remove_blocks

    def call(state: Any, entries: Any, block_ids: Any) -> Any:
        own(state, entries)

    def call_of_blocks(state: Any, entries: Any, block_ids: Any) -> Any:
        of_blocks(state, entries, block_ids)  # type: ignore[misc]

    return call if of_blocks is None else call_of_blocks


@overload(evict)
def _evict(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    own = _native_of(state).evict

    def call(
        state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
    ) -> Any:
        return own(state, variant, num, ref_cnt, block_ids, keys)

    return call


@overload(begin)
def _begin(state: Any, keys: Any, positions: Any, now_ms: int, num_tokens: int) -> Any:
    own: Any = _native_of(state).begin

    def call(
        state: Any, keys: Any, positions: Any, now_ms: int, num_tokens: int
    ) -> Any:
        return own(state, keys, positions, now_ms, num_tokens)

    def ignore(
        state: Any, keys: Any, positions: Any, now_ms: int, num_tokens: int
    ) -> Any:
        return 0

    return ignore if own is None else call


@overload(finish)
def _finish(
    state: Any,
    keys: Any,
    positions: Any,
    now_ms: int,
    num_output_tokens: int,
    stop: int,
    mark: int,
) -> Any:
    own: Any = _native_of(state).finish

    def call(
        state: Any,
        keys: Any,
        positions: Any,
        now_ms: int,
        num_output_tokens: int,
        stop: int,
        mark: int,
    ) -> Any:
        own(state, keys, positions, now_ms, num_output_tokens, stop, mark)

    def ignore(
        state: Any,
        keys: Any,
        positions: Any,
        now_ms: int,
        num_output_tokens: int,
        stop: int,
        mark: int,
    ) -> Any:
        pass

    return ignore if own is None else call


@overload(retain)
def _retain(
    state: Any,
    keys: Any,
    priority: int,
    half_life_ms: int,
    ttl_ms: int,
    given_ms: int,
) -> Any:
    own: Any = _native_of(state).retain

    def call(
        state: Any,
        keys: Any,
        priority: int,
        half_life_ms: int,
        ttl_ms: int,
        given_ms: int,
    ) -> Any:
        own(state, keys, priority, half_life_ms, ttl_ms, given_ms)

    def ignore(
        state: Any,
        keys: Any,
        priority: int,
        half_life_ms: int,
        ttl_ms: int,
        given_ms: int,
    ) -> Any:
        pass

    return ignore if own is None else call


def _native_of(state: StateType) -> NativePolicy:
    return _natives[state.label]

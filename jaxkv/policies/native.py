"""The in-place functions of a cache policy, counterparts of the pure ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxkv.compiling import add_functions, compiled, functions_of


class NativePolicy(NamedTuple):
    """The functions of a policy that update its state in place.

    Numba compiles them (`jaxkv.compiling.compiled`). Their results equal those of the
    pure functions of the same names in `jaxkv.policies.base.Policy`, bit by bit. The
    state has NumPy arrays. An entry is the policy's number of a key, -1 for none.
    Arrays of K rows have one row per key of a call.

    Attributes:
        find: ``(state, keys, entries, block_ids)``. Write the entry of each key of
            `keys` (u32[K, 8]) to `entries` (i32[K]) and its block to `block_ids`
            (i32[K]), NO_BLOCK if it has none. Changes no state.
        touch: ``(state, entries, is_use)``. Record a use of each entry, the
            first as the most recent; where `is_use` (bool[K]) is false, update only the
            order of use.
        insert: ``(state, keys, block_ids)``. Add each key whose `block_ids`
            (i32[K]) is not NO_BLOCK; write NO_BLOCK there if the directory is full.
        remove: ``(state, entries)``. Forget `entries` (i32[K]), which have blocks.
        evict: ``(state, num, ref_cnt, block_ids, keys) -> bool``. Evict `num`
            blocks whose `ref_cnt` (i32[B]) is 0, write their ids to `block_ids`
            (i32[K]) and their keys to `keys` (u32[K, 8]); all or none.
        note: ``(state, kind, keys, positions, facts) -> mark``. Learn from an event of
            a request; see `Policy.note`. None if the policy ignores events.
        admit: ``(state, keys, wanted, num_free, ref_cnt) -> num``. Clear rows
            of `wanted` (bool[K]) whose keys are not to be stored, and return how many
            stay set. Called if these keys need more than the `num_free` free blocks,
            before `evict` with the same `ref_cnt`. None if all are to be stored.
        remove_blocks: ``(state, entries, block_ids)``. Replaces `remove` for a policy
            that needs the blocks (i32[K]) of the entries; usually None.
    """

    find: Callable[..., None]
    touch: Callable[..., None]
    insert: Callable[..., None]
    remove: Callable[..., None]
    evict: Callable[..., Any]
    note: Callable[..., Any] | None = None
    admit: Callable[..., Any] | None = None
    remove_blocks: Callable[..., None] | None = None

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The policy's functions by name."""
        return {name: f for name, f in self._asdict().items() if callable(f)}


_registered: dict[type, NativePolicy] = {}


def register_native(state_class: type, native: NativePolicy) -> None:
    """Register a policy's functions by its state's class, for `functions_of`.

    Args:
        state_class: The class of the policy's state.
        native: Its functions.

    Raises:
        ValueError: If the class is registered with other functions.
    """
    registered = _registered.setdefault(state_class, native)
    if registered.functions != native.functions:
        raise ValueError(
            f"{state_class} has native functions already; another policy needs another "
            "state class."
        )
    add_functions(state_class, _DEFAULTS | native.functions)


@compiled
def _note(state: Any, kind: int, keys: Any, positions: Any, facts: Any) -> Any:
    return 0


@compiled
def _admit(state: Any, keys: Any, wanted: Any, num_free: int, ref_cnt: Any) -> Any:
    num_wanted = 0
    for row in range(wanted.shape[0]):
        num_wanted += wanted[row]
    return num_wanted


@compiled
def _remove_blocks(state: Any, entries: Any, block_ids: Any) -> None:
    functions_of(state).remove(state, entries)


# For policies that do not define these functions.
_DEFAULTS: dict[str, Callable[..., Any]] = {
    "note": _note,
    "admit": _admit,
    "remove_blocks": _remove_blocks,
}

"""The in-place functions of a cache policy, counterparts of the pure ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxkv.compiling import add_functions, compiled, functions_of


class NativePolicy(NamedTuple):
    """The functions of a policy that update its state in place.

    They are compiled by Numba (`jaxkv.compiling.compiled`) and do what the pure
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
        remove: ``(state, entries)``. Forget entries; each holds a block.
        evict: ``(state, variant, num, ref_cnt, block_ids, keys) -> bool``. Evict `num`
            blocks whose `ref_cnt` (i32[B]) is 0, write their ids to `block_ids`
            (i32[K]) and their keys to `keys` (u32[K, 8]); all or none.
        variant: A number that three of them are given, so that policies which differ
            in details share their machine code.
        note: ``(state, kind, keys, positions, facts) -> mark``. Use facts about a
            request; see `Policy.note`. None where the policy uses none.
        remove_blocks: ``(state, entries, block_ids)``. In place of `remove`, for a
            policy that has to know the blocks (i32[K]) of the entries; None, as a rule.
    """

    find: Callable[..., None]
    touch: Callable[..., None]
    insert: Callable[..., None]
    remove: Callable[..., None]
    evict: Callable[..., Any]
    variant: int = 0
    note: Callable[..., Any] | None = None
    remove_blocks: Callable[..., None] | None = None

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that the policy has, by their names."""
        return {name: f for name, f in self._asdict().items() if callable(f)}


_registered: dict[type, NativePolicy] = {}


def register_native(state_class: type, native: NativePolicy) -> None:
    """Tie a policy's functions to its state, so that compiled functions find them.

    Args:
        state_class: The class of the policy's state.
        native: Its functions.

    Raises:
        ValueError: If the class is known with other functions.
    """
    before = _registered.setdefault(state_class, native)
    if before.functions != native.functions:
        raise ValueError(
            f"{state_class} has native functions already; another policy must have a "
            "state class of its own."
        )
    add_functions(state_class, _DEFAULTS | native.functions)


@compiled
def _note(state: Any, kind: int, keys: Any, positions: Any, facts: Any) -> Any:
    return 0


@compiled
def _remove_blocks(state: Any, entries: Any, block_ids: Any) -> None:
    functions_of(state).remove(state, entries)


# What is done for a policy that has no function of the name.
_DEFAULTS: dict[str, Callable[..., Any]] = {
    "note": _note,
    "remove_blocks": _remove_blocks,
}

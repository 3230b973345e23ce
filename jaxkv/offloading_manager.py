"""vLLM's `OffloadingManager`: one request a call, bytes in, Python values out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxkv.batches import bucket
from jaxkv.host_tier import HostTier
from jaxkv.policies import get_policy_maker
from jaxkv.reuse import ReuseFilter
from jaxkv.snapshot import Snapshot
from jaxkv.types import (
    HOST_MEDIUM,
    LoadStoreSpec,
    OffloadingEvent,
    Policy,
    PrepareStoreOutput,
    RequestStepOutput,
)

_LEAST_MAX_BATCH = 4096


class OffloadingManager:
    """Keeps track of which blocks are in host memory, and where.

    The methods, their order of calls and their results are those of vLLM 0.19.1's
    `CPUOffloadingManager`, with three differences, each for the better: misuse raises
    a ValueError that names the key; a call that raises changes nothing; and a key
    that is given twice to `prepare_store` takes one block (vLLM's takes two and never
    finds the first again).

    Keys are any `bytes`. Keys of 32 bytes, such as `jaxkv.hashing` makes, are used as
    they are; others cost one SHA-256 each.

    Args:
        block_size: Tokens in a block; only repeated in events.
        num_blocks: Blocks of the host tier.
        cache_policy: Which blocks to give up when it is full: a registered name, such
            as "lru", "arc" and "arc_fixed", or a `Policy` made for `num_blocks` and
            for batches of at least as many keys.
        enable_events: Whether to keep events for `take_events`.
        store_threshold: Store only what was looked up at least so often, as vLLM's
            `FilterReusedOffloadingManager` does; 0 or 1 to store whatever is offered.
        max_tracker_size: Keys whose look-ups are counted for that, the latest ones.
        warmup: Whether to compile every function now rather than at its first use.
        warmup_max_keys: Most keys of one request to compile for; see `warm_up`.

    Raises:
        ValueError: If a number is too small, or the policy is not known or was made
            for other sizes.
        TypeError: If the policy is neither a name nor a `Policy`.

    Attributes:
        many: The same methods for many requests in one call; see `HostTier`.

    Example:
        >>> m = OffloadingManager(block_size=16, num_blocks=2)
        >>> m.prepare_store([b"a", b"b"]).store_spec.block_ids.tolist()
        [0, 1]
        >>> m.complete_store([b"a", b"b"])
        >>> m.lookup([b"a", b"b", b"c"])
        2
        >>> m.prepare_store([b"c"]).block_hashes_evicted
        [b'a']
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        cache_policy: str | Policy = "lru",
        enable_events: bool = False,
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        warmup: bool = False,
        warmup_max_keys: int = 1024,
    ) -> None:
        for name, value, least in (
            ("block_size", block_size, 1),
            ("num_blocks", num_blocks, 1),
            ("store_threshold", store_threshold, 0),
            ("max_tracker_size", max_tracker_size, 1),
            ("warmup_max_keys", warmup_max_keys, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        reuse = None
        if store_threshold > 1:
            reuse = ReuseFilter(store_threshold, max_tracker_size)
        policy = _as_policy(cache_policy, num_blocks)
        self.many = HostTier(block_size, policy, enable_events, reuse)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.medium = HOST_MEDIUM
        if warmup:
            self.warm_up(warmup_max_keys)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that hold a key, stores in progress included."""
        return self.many.num_held_blocks

    @property
    def events(self) -> list[OffloadingEvent] | None:
        """What happened since `take_events`; None if that is not kept."""
        return self.many.events

    def warm_up(self, max_keys: int, max_total_keys: int = 0) -> None:
        """Compile every function, now rather than at its first use.

        Args:
            max_keys: Most keys that one request will have.
            max_total_keys: Most keys that the requests of one call of `many` will have
                together; 0 if there are to be no such calls.
        """
        self.many.warm_up(max_keys, max_total_keys)

    def lookup(self, block_hashes: Iterable[bytes]) -> int:
        """Count the keys, from the first on, that are present and ready.

        Args:
            block_hashes: Keys of a prefix, in its order.

        Returns:
            The length of the hit, in blocks.
        """
        return self.many.lookup([block_hashes])[0]

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Record a use of each key; the first ends as the most recent.

        Args:
            block_hashes: Keys of a prefix, in its order. Unknown ones are ignored.
        """
        self.many.touch([block_hashes])

    def prepare_load(self, block_hashes: Iterable[bytes]) -> LoadStoreSpec:
        """Pin blocks that are about to be read.

        Args:
            block_hashes: Keys that are present and ready.

        Returns:
            Where they are, in the order given.

        Raises:
            ValueError: If a key is absent or its bytes have not arrived.
        """
        return self.many.prepare_load([block_hashes])[0]

    def complete_load(self, block_hashes: Iterable[bytes]) -> None:
        """Unpin blocks that were read.

        Args:
            block_hashes: Keys given to `prepare_load` before, once for each time.

        Raises:
            ValueError: If a key has no load in progress.
        """
        self.many.complete_load([block_hashes])

    def prepare_store(self, block_hashes: Iterable[bytes]) -> PrepareStoreOutput | None:
        """Find room for the blocks that are not known yet.

        Blocks that are being loaded or stored are not evicted, nor are those whose
        keys are given here. With a `store_threshold`, keys that were not looked up
        often enough count as not given.

        Args:
            block_hashes: Keys of blocks that could be stored.

        Returns:
            What to store where, and what had to leave; None if there is no room, and
            then nothing has changed.
        """
        return self.many.prepare_store([block_hashes])[0]

    def complete_store(
        self, block_hashes: Iterable[bytes], success: bool = True
    ) -> None:
        """End stores in progress.

        Args:
            block_hashes: Keys that `prepare_store` listed. Absent and ready ones are
                ignored.
            success: Whether the bytes arrived. If not, the blocks are given back.
        """
        self.many.complete_store([block_hashes], success)

    def request_step(self, block_hashes: Iterable[bytes]) -> RequestStepOutput:
        """Serve a whole request: pin what is on the host and find room for the rest.

        The same as `lookup`, `touch`, `prepare_load` of the hits and `prepare_store`,
        with one call and one search for the keys.

        Args:
            block_hashes: Keys of a prefix, in its order.

        Returns:
            What to load and what to store. End it with `complete_step`, or, where
            something failed, its parts with `complete_load` and `complete_store`.

        Example:
            >>> m = OffloadingManager(block_size=16, num_blocks=2)
            >>> m.complete_step(m.request_step([b"a"]))
            >>> step = m.request_step([b"a", b"b"])
            >>> step.num_hits, step.store.block_hashes_to_store
            (1, [b'b'])
        """
        return self.many.request_step([block_hashes])[0]

    def complete_step(self, step: RequestStepOutput) -> None:
        """End the loads and stores of a request step, all of them arrived.

        Args:
            step: What `request_step` returned.

        Raises:
            ValueError: If it was ended before. Then nothing changes.
        """
        self.many.complete_step([step])

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Hand out the events since the last time, then forget them.

        Yields:
            The events, oldest first. They are forgotten when the last was taken.
        """
        if self.events is not None:
            yield from self.events
            self.events.clear()

    def snapshot(self) -> Snapshot:
        """Show the state to a reader, for tests and for debugging.

        Returns:
            The state, on the host. Keys are as they were given, but for foreign ones
            that have left and that the policy still remembers: these have 32 bytes.

        Example:
            >>> m = OffloadingManager(block_size=16, num_blocks=3)
            >>> _ = m.prepare_store([b"a", b"b"])
            >>> m.complete_store([b"a"])
            >>> m.snapshot()  # doctest: +NORMALIZE_WHITESPACE
            Snapshot(policy={'order': [b'a', b'b']}, ref_cnt={b'a': 0, b'b': -1},
                     block_ids={b'a': 0, b'b': 1}, free_ids=[2])
        """
        return self.many.snapshot()


def _as_policy(cache_policy: str | Policy, num_blocks: int) -> Policy:
    """Make the policy of a name; check that it fits a tier of `num_blocks`."""
    policy = cache_policy
    if isinstance(policy, str):
        # Twice the tier, so that more different keys than this cannot fit at all.
        max_batch = bucket(max(_LEAST_MAX_BATCH, 2 * num_blocks))
        policy = get_policy_maker(policy)(num_blocks, max_batch)
    if not isinstance(policy, Policy):
        raise TypeError(f"{cache_policy=} must be, or name, a jaxkv.Policy.")
    if policy.num_blocks != num_blocks or policy.max_batch < num_blocks:
        raise ValueError(
            f"{policy.num_blocks=}, {policy.max_batch=} of the cache policy must be "
            f"{num_blocks} and at least {num_blocks}, as {num_blocks=}."
        )
    return policy

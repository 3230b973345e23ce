"""Whether to load or to compute again: whichever is the sooner."""

from __future__ import annotations

from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stats import OffloadStats

_PROBE_INTERVAL = 32


class Gate:
    """Declines loads that would take longer than to compute the tokens again.

    It knows rates only from `note_rates`, and lets everything pass until then. Of the
    loads that it would decline one in `_PROBE_INTERVAL` passes, so that the rate of
    loads goes on being measured.

    Args:
        rules: What the engine chose.
        stats: Where declined loads are counted.
    """

    def __init__(self, rules: OffloadRules, stats: OffloadStats) -> None:
        self._stats = stats
        self._is_on = rules.skip_slow_loads
        self._block_bytes = rules.block_bytes
        self._load_bytes_per_s = 0.0
        self._prefill_tokens_per_s = 0.0
        self._storage_bytes_per_s = 0.0
        self._num_slow = 0
        self._num_slow_fetches = 0

    def note_rates(
        self,
        load_bytes_per_s: float,
        prefill_tokens_per_s: float,
        storage_bytes_per_s: float = 0.0,
    ) -> None:
        """Take note of what was measured; see `OffloadScheduler.note_rates`."""
        for name, rate in (
            ("load_bytes_per_s", load_bytes_per_s),
            ("prefill_tokens_per_s", prefill_tokens_per_s),
            ("storage_bytes_per_s", storage_bytes_per_s),
        ):
            if not 0 <= rate < float("inf"):
                raise ValueError(f"{name}={rate} must be a number of at least 0.")
        self._load_bytes_per_s = load_bytes_per_s
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._storage_bytes_per_s = storage_bytes_per_s

    def is_worth(
        self,
        *,
        num_tokens: int,
        num_blocks: int,
        num_blocks_ahead: int,
        is_preview: bool = False,
    ) -> bool:
        """Tell whether a load is to be made.

        Args:
            num_tokens: Tokens that it saves computing.
            num_blocks: Device blocks that it moves.
            num_blocks_ahead: Those in flight before it.
            is_preview: Whether nothing is counted, so that the next call answers the
                same.
        """
        if not self._is_slow(num_tokens, num_blocks, num_blocks_ahead):
            return True
        is_probe = (self._num_slow + 1) % _PROBE_INTERVAL == 0
        if not is_preview:
            self._num_slow += 1
            self._stats.num_loads_declined += not is_probe
        return is_probe

    def is_worth_fetch(
        self,
        *,
        num_tokens: int,
        num_blocks: int,
        num_blocks_ahead: int,
        is_preview: bool = False,
    ) -> bool:
        """Tell whether blocks are to be fetched from the store, and loaded then.

        Args:
            num_tokens: Tokens that it saves computing.
            num_blocks: Device blocks that it moves.
            num_blocks_ahead: Those that are being fetched before it.
            is_preview: Whether nothing is counted.
        """
        if not (
            self._is_on and self._storage_bytes_per_s and self._prefill_tokens_per_s
        ):
            return True
        num_bytes = num_blocks * self._block_bytes
        num_bytes_ahead = num_blocks_ahead * self._block_bytes
        fetch_s = (num_bytes_ahead + num_bytes) / self._storage_bytes_per_s
        if self._load_bytes_per_s:
            fetch_s += num_bytes / self._load_bytes_per_s
        if fetch_s <= num_tokens / self._prefill_tokens_per_s:
            return True
        is_probe = (self._num_slow_fetches + 1) % _PROBE_INTERVAL == 0
        if not is_preview:
            self._num_slow_fetches += 1
            self._stats.num_fetches_declined += not is_probe
        return is_probe

    def _is_slow(self, num_tokens: int, num_blocks: int, num_blocks_ahead: int) -> bool:
        """Whether a load takes longer than to compute, as far as rates are known."""
        if not (self._is_on and self._load_bytes_per_s and self._prefill_tokens_per_s):
            return False
        num_bytes = (num_blocks + num_blocks_ahead) * self._block_bytes
        load_s = num_bytes / self._load_bytes_per_s
        return load_s > num_tokens / self._prefill_tokens_per_s

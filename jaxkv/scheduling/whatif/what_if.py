"""Shadows as a listener of the scheduler: they only observe."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from jaxkv.scheduling.listening import End, Keys, Listener, Offer, Passes, Start
from jaxkv.scheduling.plan import Gate, max_hit_tokens
from jaxkv.scheduling.protocol import Request
from jaxkv.scheduling.requests import Requests, output_tokens_of
from jaxkv.scheduling.rules import OffloadRules, parse_shadows
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.scheduling.whatif.outlook import Outlook, OutlookLog
from jaxkv.scheduling.whatif.shadows import ShadowCount, Shadows
from jaxkv.scheduling.whatif.speeds import Speeds
from jaxkv.tiers.executors import ExecutorName
from jaxkv.tiers.index import BlockIndex


class WhatIf(Listener):
    """A tier without shadows; `policy` is None for a `Policy` object."""

    def __init__(self, host: BlockIndex, policy: str | None) -> None:
        self._host = host
        self.policy = policy

    @property
    def counts(self) -> tuple[ShadowCount, ...]:
        """The counts of each shadow so far."""
        return ()

    def outlook(self) -> Outlook:
        """See `OffloadScheduler.outlook`."""
        raise ValueError(
            "there are no shadows: set some, such as OffloadRules(shadow='lru*2')."
        )


class Shadowed(WhatIf):
    """A tier with shadows. It does not refer to the scheduler, which may be freed."""

    def __init__(
        self,
        host: BlockIndex,
        policy: str | None,
        rules: OffloadRules,
        stats: OffloadStats,
        gate: Gate,
        requests: Requests,
        executor: ExecutorName,
        *,
        is_alone: bool,
    ) -> None:
        super().__init__(host, policy)
        self.shadows = Shadows(
            parse_shadows(rules.shadow or ""),
            host.num_blocks,
            host.block_size,
            executor,
            is_lazy=rules.mode == "lazy",
        )
        self._rules, self._stats, self._gate = rules, stats, gate
        self._requests, self._is_alone = requests, is_alone
        self._log = OutlookLog(self.outlook)

    @property
    def counts(self) -> tuple[ShadowCount, ...]:
        """The counts of each shadow so far."""
        return self.shadows.counts

    def outlook(self) -> Outlook:
        """See `OffloadScheduler.outlook`."""
        gate, stats, speeds = self._gate, self._stats, None
        if gate.load_bytes_per_s and gate.prefill_tokens_per_s:
            bytes_per_s, tokens_per_s = gate.load_bytes_per_s, gate.prefill_tokens_per_s
            speeds = Speeds(bytes_per_s, bytes_per_s, prefill_tokens_per_s=tokens_per_s)
        return Outlook(
            self.policy or "the serving policy",
            self._host.num_blocks,
            self._rules.block_bytes,
            self.shadows.num_requests,
            stats.num_device_query_tokens,
            stats.num_device_hit_tokens,
            stats.num_host_hit_tokens,
            self.shadows.num_asked_tokens,
            self.shadows.counts,
            speeds,
            self._host.block_size,
            self._is_alone,
        )

    def close(self) -> None:
        """Log the last outlook."""
        self._log.close()

    def warm_up(self) -> None:
        """Load or compile the code of the shadows."""
        self.shadows.warm_up()

    def looked_up(
        self,
        request: Request,
        num_computed_tokens: int,
        num_tokens: int | None,
        is_awaited: bool,
        start_s: float,
    ) -> None:
        """Look up the prefix in the shadows."""
        if num_tokens is None:
            return
        size = self.shadows.block_size
        max_tokens = max(max_hit_tokens(request, num_computed_tokens), 0)
        keys = self._requests.of(request)[0]
        first, last = num_computed_tokens // size, max_tokens // size
        self.shadows.look_up(request.request_id, keys, first, last)

    def begun(self, start: Start) -> None:
        """Use the request's blocks."""
        self.shadows.begin(
            start.request.request_id,
            start.keys[0],
            start.request.num_tokens,
            start.now_ms(),
            start.kind,
            has_lookup=start.num_local is not None,
            has_load=start.has_load,
        )

    def offered(self, offer: Offer) -> None:
        """Offer the same blocks, and earlier ones that a shadow had no room for."""
        name, keys, first = offer.request_id, offer.keys, 0
        if not offer.is_end:
            first = min(
                offer.first, offer.end, self.shadows.first_open_block(name, keys)
            )
        self.shadows.offer(
            name,
            keys,
            offer.end,
            offer.placed,
            offer.passes(first),
            first,
            is_end=offer.is_end,
            can_store=offer.can_store,
        )

    def victims_offered(
        self, words: Any, placed: Container[bytes], passes: Passes
    ) -> None:
        """Offer the same victims."""
        self.shadows.offer_victims(words, placed, passes)

    def stored(self, keys: Keys, ok: bool) -> None:
        """Complete the stores of the same keys."""
        self.shadows.arrive(keys, ok=ok)

    def released(self, request_ids: Sequence[str], unloaded: Sequence[Keys]) -> None:
        """Release held blocks, and forget blocks whose load has failed."""
        for name in request_ids:
            self.shadows.release(name)
        for keys in unloaded:
            self.shadows.discard(keys)

    def loaded(self, finished: Sequence[str], failed: Sequence[str]) -> None:
        """Expect the requests whose loads have failed to recompute their blocks."""
        for name in failed:
            self.shadows.recompute(name)

    def finished(self, end: End) -> None:
        """Forget the request."""
        name = end.request.request_id
        if end.has_begun:
            num_output, now_ms = output_tokens_of(end.request), end.now_ms()
            self.shadows.finish(name, end.keys[0], now_ms, num_output, end.stop)
            self._log.note(now_ms)
        self.shadows.forget(name, is_held=end.has_load)

    def reset(self) -> None:
        """Forget all blocks."""
        self.shadows.clear()

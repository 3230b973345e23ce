"""Passes the requests of a scheduler on to a `TraceRecorder`."""

from __future__ import annotations

from typing import Any

from jaxkv.scheduling.listening import End, Listener, Start
from jaxkv.scheduling.record.record import TraceRecorder
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.search.groups import FullAttention, GroupSpec


class Recording(Listener):
    """Records the blocks of the first group with full attention, else of the first."""

    def __init__(
        self,
        recorder: TraceRecorder,
        groups: tuple[GroupSpec, ...],
        rules: OffloadRules,
        num_host_blocks: int,
        policy_name: str | None,
    ) -> None:
        self._recorder, self._rules = recorder, rules
        full = (n for n, spec in enumerate(groups) if isinstance(spec, FullAttention))
        self._group = next(full, 0)
        self._block_size = groups[self._group].block_size * rules.blocks_per_host_block
        self._policy_name, self._num_host_blocks = policy_name, num_host_blocks
        self._num_groups = len(groups)
        self._is_described = False

    def bound(self, pool: Any) -> None:
        """Describe the engine when the first pool is bound."""
        if self._is_described:
            return
        factor = self._rules.blocks_per_host_block
        self._recorder.describe(
            self._block_size,
            keys_per_id=factor,
            policy=self._policy_name,
            host_blocks=self._num_host_blocks,
            device_blocks=(pool.num_blocks - 1) // factor,
            groups=self._num_groups,
        )
        self._is_described = True

    def begun(self, start: Start) -> None:
        """Record that a request begins."""
        request = start.request
        num_prompt = getattr(request, "num_prompt_tokens", None)
        if num_prompt is None:
            num_prompt = request.num_tokens
        num_local = start.num_local
        hits = num_local, None if num_local is None else start.num_external
        keys = start.keys[self._group]
        name = request.request_id
        self._recorder.begin(name, keys, num_prompt, *hits, start.kind)

    def finished(self, end: End) -> None:
        """Record that a request has finished, and how many tokens may be stored."""
        if not end.has_begun:
            return
        request, num_computed = end.request, 0
        if not self._rules.prompt_only:
            num_ahead = getattr(request, "num_output_placeholders", 0)
            num_computed = request.num_computed_tokens - num_ahead
        keys = end.keys[self._group]
        name = request.request_id
        self._recorder.finish(name, keys, request.num_tokens, num_computed, end.stop)

"""Which blocks of a trace may be stored, by the settings of `jaxkv.OffloadRules`.

Which keys were looked up before depends neither on the policy nor on the capacity, so
that it is found once for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import settings
from jaxkv.scheduling.rules import RuleSettings
from jaxkv.tiers.key_memory import MAX_TRACKED, ReuseFilter
from jaxkv.tools.replay.device import DeviceHits
from jaxkv.tools.replay.traces import OnCount, Trace


@settings.documented
@dataclasses.dataclass(frozen=True)
class Admission(settings.Settings):
    """Settings that keep blocks out of the host tier, as in `jaxkv.OffloadConfig`."""

    store_threshold: int = settings.same(RuleSettings, "store_threshold")
    max_unseen_blocks: int | None = settings.same(RuleSettings, "max_unseen_blocks")
    prompt_only: bool = settings.same(RuleSettings, "prompt_only")
    max_offload_tokens: int | None = settings.same(RuleSettings, "max_offload_tokens")

    @property
    def changed(self) -> dict[str, int]:
        """The settings that are not the default, by name.

        >>> Admission(store_threshold=2, prompt_only=True).changed
        {'store_threshold': 2, 'prompt_only': True}
        """
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    @property
    def text(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.changed.items())


class Admitted(NamedTuple):
    """The blocks that may be stored: n blocks of R requests."""

    # bool[n]. Which of `Trace.ids` were asked for often enough.
    passes: NDArray[np.bool_]
    # i64[R]. How many blocks of each request, the first ones, are offered.
    limits: NDArray[np.int64]
    # Makes what one of several engines would let pass; None for all
    make_gate: Callable[[], AskedGate] | None = None


def find_admitted(
    trace: Trace,
    admission: Admission,
    on_progress: OnCount = lambda done, total: None,
    device: DeviceHits | None = None,
) -> Admitted:
    """Find what may be stored of each request, whatever policy serves it.

    >>> from jaxkv.tools.replay.traces import make_trace
    >>> trace = make_trace("two", [[1, 2, 3], [1, 4, 5]])
    >>> admitted = find_admitted(trace, Admission(max_unseen_blocks=1))
    >>> admitted.passes.tolist(), admitted.limits.tolist()
    ([True, False, False, True, True, False], [3, 3])
    """
    limits = (trace.num_asked if admission.prompt_only else trace.num_blocks).copy()
    if admission.max_offload_tokens is not None:
        max_blocks = admission.max_offload_tokens // trace.block_size
        limits = np.minimum(limits, max_blocks)
    passes = np.ones(len(trace.ids), np.bool_)
    counts = admission.store_threshold > 1 or admission.max_unseen_blocks is not None
    make_gate = partial(AskedGate, trace, admission, device) if counts else None
    if make_gate is not None:
        gate = make_gate()
        for request in trace.requests(on_progress):
            first, last = trace.offsets[request : request + 2]
            passes[first:last] = gate.note(request)
    for array in (passes, limits):
        array.flags.writeable = False  # All replays share them.
    return Admitted(passes, limits, make_gate)


class AskedGate:
    """Says which blocks an engine was asked for often enough to store them."""

    def __init__(
        self, trace: Trace, admission: Admission, device: DeviceHits | None
    ) -> None:
        self._trace, self._num_asked = trace, trace.num_asked
        if device is not None:
            self._num_asked = np.minimum(self._num_asked, device.usable)
        self._reuse = ReuseFilter(
            admission.store_threshold, MAX_TRACKED, admission.max_unseen_blocks
        )

    def note(self, request: int) -> list[bool]:
        ids = self._trace.blocks_of(request).tolist()
        names = [number.to_bytes(4, "little") for number in ids]
        self._reuse.count(names[: self._num_asked[request]])
        return self._reuse.passes(names)

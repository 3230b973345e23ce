"""A short measurement of how fast blocks move."""

from __future__ import annotations

import dataclasses

from jaxkv.tools.bench.transfer.plan import make_plan
from jaxkv.tools.bench.transfer.records import (
    DIRECTIONS,
    ENGINE,
    Speed,
    TransferConfig,
    speed,
)
from jaxkv.tools.bench.transfer.run import run_transfer
from jaxkv.tools.console import OnProgress
from jaxkv.tools.machine import available_memory_bytes
from jaxkv.transfer.kernels import Mode

_SIZE_BYTES = 32 << 20
_WORKING_SET_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """The speed of the transfer engine, beside the machine's limit."""

    size_bytes: int  # Bytes of a transfer
    block_bytes: int
    save: Speed  # Speed from the device to the host
    load: Speed  # Speed from the host to the device
    limit: str  # Name of the limit: ``"np.copyto"`` or ``"device_put"``
    limit_save: Speed  # Its speed from the device to the host
    limit_load: Speed  # Its speed from the host to the device


def measure_bandwidth(mode: Mode, on_progress: OnProgress) -> Bandwidth:
    """Save and load blocks for some seconds, and check all bytes."""
    config = TransferConfig(
        sizes=(_SIZE_BYTES,),
        block_sizes=(_BLOCK_BYTES,),
        rounds=_ROUNDS,
        mode=mode,
        working_set_bytes=_WORKING_SET_BYTES,
    )
    plan = make_plan(config, None, available_memory_bytes())
    if not plan.cases:
        raise MemoryError("; ".join(plan.left_out))
    record = run_transfer(config, plan, on_progress)
    (result,) = record.results
    save, load, limit_save, limit_load = (
        speed(_SIZE_BYTES, seconds[direction])
        for seconds in (result.designs_s[ENGINE], result.limit_s)
        for direction in DIRECTIONS
    )
    sizes = _SIZE_BYTES, _BLOCK_BYTES
    return Bandwidth(*sizes, save, load, record.limit, limit_save, limit_load)

"""Small models of each kind, and engines that serve them."""

import dataclasses
import functools

import numpy as np

from jaxkv.config import OffloadConfig
from jaxkv.tools.demo.engine import Engine, max_blocks_held
from jaxkv.tools.demo.model import ModelConfig
from jaxkv.tools.demo.records import EngineConfig
from jaxkv.tools.demo.steps import make_steps
from tests.rigs.extent_tables import check_table

FULL = ModelConfig(
    num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128
)
MODELS = {
    "full": FULL,
    "window": dataclasses.replace(FULL, layers="window", window_tokens=21),
    "hybrid": dataclasses.replace(
        FULL, num_layers=4, layers="hybrid", window_tokens=10
    ),
}
CONFIG = EngineConfig(  # The number of device blocks depends on the model.
    **{"block_size": 4, "device_blocks": 0, "concurrency": 4},
    **{"max_seq_tokens": 96, "weights_epoch": "test", "chunk_sizes": (16,)},
)


@functools.cache
def steps_of(model):
    """Make a model, whose programs are compiled once in a process."""
    return make_steps(MODELS[model], seed=0)


def config_of(num_host_blocks=0, **changes):
    """Make a configuration, some of whose changes are keys of `OffloadConfig`."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    keys = {key: changes.pop(key) for key in [*changes] if key not in names}
    if num_host_blocks:
        changes["offload"] = OffloadConfig(num_host_blocks=num_host_blocks, **keys)
    return dataclasses.replace(CONFIG, **changes)


def make_engine(model="full", num_spare=1, **changes):
    """Make an engine with as many blocks as one request needs, and some to spare."""
    groups = MODELS[model].groups(CONFIG.block_size)
    needed = max_blocks_held(groups, CONFIG.max_seq_tokens, chunk=16)
    config = {"device_blocks": needed + num_spare} | changes
    return Engine(steps_of(model), config_of(**config))


def check_at_rest(engine):
    """Check that nothing waits, is held or is in flight."""
    assert not engine.has_work
    assert engine.blocks.num_free == engine.config.device_blocks - 1
    offload = engine.offload
    if offload is None:
        return
    assert engine.worker.num_in_flight == 0
    assert not offload.has_pending_stores()
    assert not offload.has_pending_loads()
    for tier in (offload._manager, *(below.tier for below in offload.below)):
        assert not np.asarray(tier.executor.state.ref_cnt).any()
    assert engine.transfer._table.num_pins == 0
    check_table(engine.transfer._table)
    if engine.has_storage:
        assert engine.worker.storage.num_in_flight == 0

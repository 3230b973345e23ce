"""A general plugin of vLLM's that lets tpu-inference run on CPUs.

Both packages stay as they are on disk. What is replaced here has no counterpart on a
CPU; all else, the scheduler, the runner, the connector's calls, is what runs on a TPU.
"""

import importlib
import os

import jax
import numpy as np

from .attention import mla_ragged_paged_attention, ragged_paged_attention
from .experts import fused_moe
from .gdn import conv1d_gdn

HBM_BYTES = 2 << 30


def register():
    """Replace what needs a TPU; vLLM calls it in each of its processes."""
    replace_kernels()
    replace_options_of_the_compiler()
    replace_what_is_read_from_devices()
    copy_what_is_staged()
    keep_storage_that_is_shared()
    if os.environ.get("JAXKV_VLLM_HOSTS"):
        from .hosts import replace_what_one_machine_lacks

        replace_what_one_machine_lacks()
    spoil(os.environ.get("JAXKV_VLLM_FAULT"))


def replace_kernels():
    """Pallas kernels for TPUs do not compile for CPUs."""
    from tpu_inference.kernels.gdn.v3 import wrapper
    from tpu_inference.layers.common import attention_interface, moe

    attention_interface.ragged_paged_attention = ragged_paged_attention
    attention_interface.mla_ragged_paged_attention = mla_ragged_paged_attention
    wrapper.fused_conv1d_gdn = conv1d_gdn
    moe.fused_moe_func = fused_moe


def replace_options_of_the_compiler():
    """The CPU's compiler refuses options that begin with xla_tpu."""
    from tpu_inference.models.common import compiler_options

    compiler_options.get_step_fn_compiler_options = dict
    compiler_options.get_sampling_compiler_options = dict
    # The proposers of drafts write their own out, where they are defined.
    jit = jax.jit
    jax.jit = lambda *args, compiler_options=None, **named: jit(*args, **named)
    try:
        for name in ("eagle3", "dflash"):
            importlib.import_module(f"tpu_inference.spec_decode.jax.{name}")
    finally:
        jax.jit = jit


def replace_what_is_read_from_devices():
    """CPU devices have no place in a torus, and no memory of a known size."""
    from tpu_inference import utils

    def make_mesh(shape, names, *, devices=None):
        chosen = np.array((devices or jax.devices())[: int(np.prod(shape))])
        kinds = (jax.sharding.AxisType.Auto,) * len(shape)
        return jax.sharding.Mesh(chosen.reshape(shape), names, axis_types=kinds)

    utils.make_optimized_mesh = make_mesh
    utils.get_device_hbm_limit = lambda: HBM_BYTES


def copy_what_is_staged():
    """On a CPU JAX may share NumPy's memory instead of copying it.

    tpu-inference writes to its staging buffers again while a step still reads them. On
    several hosts it makes arrays from callbacks.
    """
    put, make = jax.device_put, jax.make_array_from_callback

    def copying(leaf):
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    def device_put(x, *args, **named):
        return put(jax.tree.map(copying, x), *args, **named)

    def make_array_from_callback(shape, sharding, callback, **named):
        return make(shape, sharding, lambda index: copying(callback(index)), **named)

    jax.device_put = device_put
    jax.make_array_from_callback = make_array_from_callback


def keep_storage_that_is_shared():
    """Weights that PyTorch shares with JAX on a CPU cannot be freed, only kept."""
    import contextlib

    import torch

    resize = torch.UntypedStorage.resize_

    def resize_if_possible(storage, num_bytes):
        with contextlib.suppress(RuntimeError):
            return resize(storage, num_bytes)
        return storage

    torch.UntypedStorage.resize_ = resize_if_possible


def spoil(fault):
    """Faults of transfers in this process: the controls of the tests.

    "zeros": each loaded block is zero after its load, which reports success.
    "zero states": the same, of states alone.
    "zero drafts": the same, of the last layer alone, which is a draft model's.
    "failures": every second load fails, and its blocks are zero.
    "lost tokens": what tpu-inference drops is not restored.
    "no ids": the scheduler does not send what it is restored from.
    "blind": changed weights go unnoticed, except for dropped caches.
    "slow": each step begins late, and the ends of transfers are seen in every fifth.
    "death": the process is killed when it has a load to start, and says when.
    """
    if not fault:
        return
    if fault == "lost tokens":
        from jaxkv.integrations.vllm.tokens import TokenRestorer

        TokenRestorer._restore = lambda restorer, cached: None
        return
    if fault == "no ids":
        from vllm.v1.core.sched.scheduler import Scheduler

        make = Scheduler._make_cached_request_data

        def make_without_ids(*args, **named):
            made = make(*args, **named)
            made.all_token_ids.clear()
            return made

        Scheduler._make_cached_request_data = make_without_ids
        return
    if fault == "blind":
        from jaxkv.integrations.vllm import adapters, scheduler, worker

        scheduler.SchedulerHalf._reset_with = lambda half, pool: None
        worker.WeightsWatch.has_changed = lambda watch: False
        worker.PHASES = ()
        adapters.Adapters.mark = lambda marks, lora: bytes(32)
        return
    from jaxkv.integrations.vllm.worker import WorkerHalf
    from jaxkv.scheduling.worker.worker import OffloadWorker

    if fault in ("slow", "death"):
        delay_or_die(WorkerHalf, fault)
        return
    poll, loads = WorkerHalf.poll, OffloadWorker.poll
    num_loads = [0]

    def fail_every_second(worker):
        output = loads(worker)
        failed = []
        for name in output.finished_recving:
            num_loads[0] += 1
            if num_loads[0] % 2 == 0:
                failed.append(name)
        done = tuple(name for name in output.finished_recving if name not in failed)
        return type(output)(
            done,
            (*output.failed_recving, *failed),
            output.completed_store_events,
            output.failed_store_events,
        )

    def zero(half):
        targets = dict(half._targets)
        output = poll(half)
        spoilt = output.failed_recving
        if fault.startswith("zero"):
            spoilt += output.finished_recving
        blocks = [block for name in spoilt for block in targets.get(name, ())]
        if blocks:
            write_zeros(half, np.array(blocks), fault == "zero states")
        return output

    def write_zeros(half, blocks, only_states):
        pools = half._pools(half._runner.kv_caches)
        if not half._caches_by_pool:
            first = len(pools) - 1 if fault == "zero drafts" else 0
            spoilt = zeroed(pools[first:], blocks[blocks > 0])
            half._put_back(half._runner, [*pools[:first], *spoilt])
            return
        for number, first in enumerate(half._worker._engine.first_blocks[:-1]):
            ids = blocks[(blocks > first) & (blocks < first + len_of(pools[number]))]
            if number or not only_states:
                pools[number] = zeroed(pools[number], ids - first)
        half._put_back(half._runner, pools)

    def len_of(pool):
        return len(jax.tree.leaves(pool)[0])

    def zeroed(pool, blocks):
        return jax.tree.map(lambda array: without(array, blocks), pool)

    def without(array, blocks):
        # No program: one of all hosts' devices cannot run on one of the hosts alone.
        shards = []
        for shard in array.addressable_shards:
            values = np.array(shard.data)
            first = shard.index[0].start or 0  # Of ranks each has some of the blocks.
            in_shard = blocks[(blocks >= first) & (blocks < first + len(values))]
            values[in_shard - first] = 0
            shards.append(jax.device_put(values, shard.device))
        return jax.make_array_from_single_device_arrays(
            array.shape, array.sharding, shards
        )

    WorkerHalf.poll = zero
    if fault == "failures":
        OffloadWorker.poll = fail_every_second


def delay_or_die(half_class, fault):
    """The faults of a host that is slow or is killed."""
    import signal
    import time

    from jaxkv.scheduling.protocol import NO_REPORTS

    start, poll = half_class.start, half_class.poll
    num_polls = [0]

    def start_late(half, step):
        if fault == "death" and step.transfers.load_device_blocks:
            print("DEATH", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)
        return start(half, step)

    def poll_seldom(half):
        num_polls[0] += 1
        return poll(half) if num_polls[0] % 5 == 0 else NO_REPORTS

    half_class.start, half_class.poll = start_late, poll_seldom

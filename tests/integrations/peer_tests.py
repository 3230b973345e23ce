"""Runs tpu-inference's tests of its offload connector against jaxkv's connector.

    PYTHONPATH=. python tests/integrations/peer_tests.py CHECKOUT [pytest arguments]

CHECKOUT is a checkout of tpu-inference; docs/internals/vllm.md has the results for its
commit b8692ff. Use the Python of the environment that .ci/vllm makes.

The tests import `tpu_inference.offload.tpu_offload_connector`. They get views here that
have its names and call jaxkv's connector. A test that has passed so far ends where it
reads private state of their connector.
"""

import collections
import itertools
import os
import subprocess
import sys
import tempfile
import types
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import ConnectorOutput
from jaxkv.integrations.vllm import OffloadConnector
from jaxkv.integrations.vllm.pool import key_in_group
from jaxkv.integrations.vllm.ranks import StepMetadata
from jaxkv.integrations.vllm.worker import WorkerReport
from jaxkv.scheduling.protocol import NO_EVENT, NO_MOVES, OffloadMetadata

WHOLE_BLOCKS = "a hit of a whole prompt lacks its last block, not its last token"
STAGING = "what finds no staging memory waits in the worker, and is moved later"
WORDS = "refused, in other words"
PINNED = "host memory is always pinned"

NOT_BEHAVIOR = {
    "test_raiden_offload_connector.py": "another connector, over mocks of tpu_raiden",
    "tpu_offload_cpu_backend_test.py": "their dictionary of host arrays",
    "tpu_offload_manager_test.py": "their counts of chunks and staging blocks",
    "tpu_offload_metrics_test.py": "their collector and logger, without a connector",
    "tpu_offload_performance_test.py": "a time on a v6e-8",
    "tpu_offload_utils_test.py": "their gather and scatter of layers",
    "test_decompose_into_buckets": "the sizes of their programs",
    "test_build_connector_meta_finished_request": "their message at a request's end",
    "test_invalid_parallel_config": "a configuration that vLLM cannot make",
}
"""Tests that say nothing about behavior: part of the id -> what they test."""

DIFFERS = {
    "num_new_matched_tokens_hit[0-4-4-10]": ("assert 48 == ", WHOLE_BLOCKS),
    "num_new_matched_tokens_hit[1-4-4-10]": ("assert 32 == ", WHOLE_BLOCKS),
    "connector_end_to_end": ("Expected 1 loads, got 0", WHOLE_BLOCKS),
    "new_prefill[0-32-64-48]": ("assert 64 == 48", STAGING),
    "new_prefill[0-32-64-16]": ("is None", STAGING),
    "unsupported_pipeline_parallel": ("pipeline_parallel_size=2 must be 1", WORDS),
    "unsupported_data_parallel": ("data_parallel_size=2 must be 1", WORDS),
    "unsupported_backend": ("'unsupported_backend' must be 'uni'", WORDS),
    "test_multihost_ray": ("distributed_executor_backend='ray' must be", "no Ray"),
    "host_memory_kind_override": ("+ unpinned_host", PINNED),
}
"""Tests that must fail: part of the id -> (part of the failure's text, why)."""

FOLDER = os.environ.get("JAXKV_PEER_FOLDER")


def main(checkout, *arguments):
    """Run the tests in a new folder, with vLLM on the CPU."""
    from vllm_cpu import lab

    with tempfile.TemporaryDirectory() as folder:
        lab.MODELS, lab.ADAPTERS = [("llama", "float32")], ()
        lab.make_lab(Path(folder))
        tests = Path(folder, "tests/offload")
        tests.parent.mkdir()
        (tests.parent / "__init__.py").touch()
        tests.symlink_to(Path(checkout, "tests/offload").resolve())
        command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem]
        command += ["-p", "no:cacheprovider", f"--rootdir={folder}", "--tb=short"]
        command += ["-o", "python_files=test_*.py *_test.py", *arguments]
        variables = lab.environ(Path(folder)) | {"JAXKV_PEER_FOLDER": folder}
        return subprocess.run(
            command, cwd=folder, env=os.environ | variables
        ).returncode


class EndOfBehavior(Exception):
    """A test reads private state of their connector."""


class PrivateState(dict):
    """State without a counterpart: tests may write it, and end where they read it."""

    def __contains__(self, key):
        raise EndOfBehavior

    __getattr__ = __getitem__ = __contains__


class Record(types.SimpleNamespace):
    """Stands for their specs, request metadata and trackers."""

    load_spec = save_spec = None


class TPUOffloadConnectorMetadata(Record):
    """The transfers of a step in their form."""


class KVOffloadConnectorStats:
    """A report of their runner: all transfers of the last step have ended."""

    def record_save(self, request_id, chunks):
        pass

    record_load = record_save


class TPUOffloadConnector(OffloadConnector):
    """jaxkv's connector, made and called as theirs is."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        block_size = vllm_config.cache_config.block_size
        spec = type("FullAttentionSpec", (Record,), {})(block_size=block_size)
        groups = [Record(kv_cache_spec=spec, layer_names=[])]
        sizes = dict(num_blocks=1, kv_cache_tensors=[Record(size=1)])
        super().__init__(
            configuration(vllm_config.parallel_config),
            role,
            Record(kv_cache_groups=groups, **sizes),
        )
        self.connector_scheduler = SchedulerView(self, block_size)
        self.connector_worker = WorkerView(self)

    def build_connector_meta(self, scheduler_output):
        moves = super().build_connector_meta(scheduler_output).transfers
        self.in_flight = moves
        return in_their_form("all", moves, moves)

    def update_connector_output(self, connector_output):
        if connector_output.kv_connector_stats is not None:
            self._scheduler.record_report(ended(self.in_flight))

    def register_runner(self, runner):
        self.connector_worker.register_runner(runner)


def configuration(parallel_config):
    """Return what jaxkv reads of a VllmConfig, set as their variables say."""
    from tpu_inference import envs

    return Record(
        parallel_config=Record(
            pipeline_parallel_size=parallel_config.pipeline_parallel_size,
            data_parallel_size=parallel_config.data_parallel_size,
            distributed_executor_backend=envs.TPU_MULTIHOST_BACKEND or None,
        ),
        cache_config=Record(enable_prefix_caching=True),
        model_config=Record(runner_type="generate"),
        scheduler_config=Record(async_scheduling=False),
        kv_transfer_config=Record(
            kv_role="kv_both",
            kv_connector_extra_config={
                "num_cpu_blocks": envs.TPU_OFFLOAD_NUM_CPU_CHUNKS,
                "store_batch_blocks": 1,  # So that each block is stored at once.
                "offload_prompt_only": not envs.TPU_OFFLOAD_DECODE_SAVE,
            },
        ),
    )


def ended(moves):
    """Return the report that all transfers of a step have succeeded."""
    loads = moves.load_event_to_reqs.get(moves.load_event, ())
    stores = (moves.store_event,) if moves.store_event != NO_EVENT else ()
    return WorkerReport(
        ConnectorOutput(finished_recving=loads, completed_store_events=stores)
    )


def in_their_form(name, loads, stores, block_size=0, table=range(1 << 30)):
    """Return a request's metadata, whose blocks are places in the table."""
    meta = Record(req_id=name)
    if loads.load_event != NO_EVENT:
        places = [*map(table.index, loads.load_device_blocks)]
        chunks = loads.load_host_blocks
        meta.load_spec = Record(can_load=True, dst_blocks=places, src_chunks=chunks)
    if stores.store_event != NO_EVENT:
        places = [*map(table.index, stores.store_device_blocks)]
        meta.save_spec = Record(
            num_skip_leading_tokens=places[0] * block_size,
            num_total_tokens=(places[-1] + 1) * block_size,
            src_blocks=places,
            dst_chunks=stores.store_host_blocks,
            skip_save=False,
            is_final_save=False,
        )
    is_any = meta.load_spec or meta.save_spec
    return TPUOffloadConnectorMetadata(requests_meta=[meta] if is_any else [])


class SchedulerView:
    """Their scheduler's half, whose tests set its state and then call it once.

    jaxkv loads before a request runs, and plans a store in the step after the one that
    computes the block: one of their calls is several steps here.
    """

    def __init__(self, connector, block_size):
        self.connector, self.block_size = connector, block_size
        self.half = connector._scheduler
        self.offload_manager = self
        self.requests, self.load_specs = {}, {}
        self._unfinished_requests, self._request_trackers = {}, PrivateState()
        self._pre_load_specs = self._external_cache_hits = PrivateState()
        self._reqs_being_saved = self._reqs_being_loaded = PrivateState()
        self.staging_buffer_manager = PrivateState()

    @classmethod
    def make(cls, vllm_config):
        """Make a half with a block pool of vLLM's."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.block_pool import BlockPool

        block_size = vllm_config.cache_config.block_size
        made = TPUOffloadConnector(vllm_config, KVConnectorRole.SCHEDULER)
        made.connector_scheduler.pool = pool = BlockPool(64, True, block_size)
        made.bind_gpu_block_pool(pool)
        return made.connector_scheduler

    def allocate_for_save(self, hashes):
        """Store blocks on the host."""
        donor = self._request("donor", hashes)
        self._compute(donor, range(len(hashes)), 0, [donor.num_tokens])
        self.half.finish(donor, ([],))
        return (), ()

    def complete_save(self, hashes):
        pass

    def get_num_new_matched_tokens(self, theirs, num_computed_tokens):
        request = self._request(theirs.request_id, theirs.block_hashes)
        return self.half.query(request, num_computed_tokens)

    def update_state_after_alloc(self, theirs, blocks, num_external_tokens):
        request = self._request(theirs.request_id, theirs.block_hashes)
        table = [block + 1 for block in blocks.get_block_ids()[0]]
        planned = self._pre_load_specs.get(request.request_id)
        self.half.query(request, planned.num_skip_leading_tokens)
        self.half.record_blocks(request, (table,), num_external_tokens)
        (meta,) = in_their_form("", self._step(), NO_MOVES, 0, table).requests_meta
        self.load_specs[request.request_id] = meta.load_spec

    def build_connector_meta(self, output):
        for new in output.scheduled_new_reqs:
            request = self._request(new.req_id, new.block_hashes)
            num_tokens = output.num_scheduled_tokens[new.req_id]
            num_local = request.num_tokens - num_tokens
            return self._compute(request, new.block_ids[0], num_local, [num_tokens])
        for name in output.scheduled_cached_reqs.req_ids:
            tracker = self._request_trackers.get(name)
            request = self._request(name, self._unfinished_requests[name].block_hashes)
            request.num_prompt_tokens = tracker.prompt_len
            before = len(tracker.token_ids)
            return self._compute(request, tracker.block_ids, 0, [before, 1])

    def _request(self, name, hashes):
        num_tokens = len(hashes) * self.block_size
        new = Record(
            request_id=name,
            block_hashes=[block_hash.ljust(32) for block_hash in hashes],
            num_tokens=num_tokens,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
        )
        return self.requests.setdefault(name, new)

    def _compute(self, request, blocks, num_local, scheduled):
        """Load what the host has, compute the rest; return what the last step moved."""
        table = [block + 1 for block in blocks]  # vLLM's block 0 holds nothing.
        for block, block_hash in zip(table, request.block_hashes, strict=True):
            self.pool.blocks[block].reset_hash()
            key = key_in_group(block_hash, 0)
            self.pool.blocks[block].set_block_hash(key, self.block_size)
        num_loaded, _ = self.half.query(request, num_local)
        self.half.record_blocks(request, (table,), num_loaded)
        loads = self._step()
        request.num_computed_tokens = num_local + num_loaded
        for num_tokens in scheduled:
            num_left = request.num_tokens - request.num_computed_tokens
            self._step({request.request_id: min(num_tokens, num_left)})
            stores = self._step()
        return in_their_form(request.request_id, loads, stores, self.block_size, table)

    def _step(self, scheduled=None):
        scheduled = scheduled or {}
        cached = Record(req_ids=[], new_block_ids=[])
        output = Record(
            num_scheduled_tokens=scheduled,
            scheduled_cached_reqs=cached,
            preempted_req_ids=(),
        )
        moves = self.half.build_metadata(output).transfers
        self.half.record_report(ended(moves))
        for name, num_tokens in scheduled.items():
            self.requests[name].num_computed_tokens += num_tokens
        return moves


class WorkerView:
    """Their worker's half, which is given the blocks to move."""

    def __init__(self, connector):
        self.connector, self.half = connector, connector._worker
        self.cpu_backend = self
        self.events = itertools.count()
        self.chunks = {"finished_save_chunks": {}, "finished_load_chunks": {}}
        self.offload_stats = Record(data=self.chunks)
        self._pending_save_futures = []

    def register_runner(self, runner):
        self.half.register_runner(runner)
        self.runner, self.engine = runner, self.half._worker._engine
        shapes = [cache.shape for cache in runner.kv_caches]
        self.grouped_layer_indices = [
            [index for index, layer_shape in enumerate(shapes) if layer_shape == shape]
            for shape in dict.fromkeys(shapes)
        ]
        # Where chunks are read back.
        self.scratch = [jnp.zeros_like(cache) for cache in runner.kv_caches]

    def _precompile_kv_swap_operations(self):
        self.engine.warm_up()

    def start_save_kv(self):
        metas = self.connector._metadata.requests_meta
        saves = {meta.req_id: meta.save_spec for meta in metas}
        saves = {name: spec for name, spec in saves.items() if spec.src_blocks}
        blocks, chunks = pairs(
            (spec.src_blocks, spec.dst_chunks) for spec in saves.values()
        )
        if blocks:
            self._start(
                OffloadMetadata(
                    NO_EVENT, (), (), {}, next(self.events), blocks, chunks, False
                )
            )
            self._pending_save_futures.append(saves)

    def _process_completed_saves(self):
        self._start(NO_MOVES)
        if self.half.poll().completed_store_events:
            saves = self._pending_save_futures.pop(0)
            self._note("save", {name: spec.dst_chunks for name, spec in saves.items()})

    def start_load_kv(self, fwd_ctx):
        metas = self.connector._metadata.requests_meta
        loads = {meta.req_id: meta.load_spec for meta in metas}
        chunks, blocks = pairs(
            (spec.src_chunks, spec.dst_blocks) for spec in loads.values()
        )
        event = next(self.events)
        sizes = tuple(len(spec.src_chunks) for spec in loads.values())
        moves = OffloadMetadata(
            event,
            blocks,
            chunks,
            {event: tuple(loads)},
            NO_EVENT,
            (),
            (),
            False,
            load_sizes=sizes,
        )
        self._start(moves)
        missing = set(loads)
        while missing:
            self._start(NO_MOVES)
            output = self.half.poll()
            assert not output.failed_recving
            missing -= set(output.finished_recving)
        self._note("load", {name: spec.src_chunks for name, spec in loads.items()})

    def _start(self, moves):
        self.half.start(StepMetadata(moves, self.half._num_lost_pools))

    def _note(self, kind, chunks):
        process = jax.process_index()
        for name, ids in chunks.items():
            self.chunks[f"finished_{kind}_chunks"][name] = [[c, process] for c in ids]

    @property
    def num_saved_cpu_chunks(self):
        return sum(map(len, self.chunks["finished_save_chunks"].values()))

    def get(self, chunk):
        """Read a chunk back, through the device: a stack of each group of layers."""
        pool, _ = self.engine.load(self.scratch, [chunk], [0])
        self.scratch, _ = self.engine.drain(pool)
        stacks = [
            np.stack([self.scratch[layer][0] for layer in group])
            for group in self.grouped_layer_indices
        ]
        return stacks if len(stacks) > 1 else stacks[0]

    @property
    def host_sharding(self):
        return self.engine._queue.host_bytes._memory.get(0)[0].sharding

    flatten_host_sharding = expanded_host_sharding = host_sharding


def pairs(lists):
    """Join the first and the second lists."""
    first, second = zip(*lists, strict=True) if (lists := [*lists]) else ((), ())
    return tuple(itertools.chain(*first)), tuple(itertools.chain(*second))


def small_engine():
    """Return a class like vLLM's LLM, of a small model, one chip and jaxkv."""
    import vllm
    from vllm_cpu.run import transfer_config

    class SmallLLM(vllm.LLM):
        def __init__(self, async_scheduling, **options):
            os.environ["SKIP_JAX_PRECOMPILE"] = "1"
            extra = {
                "num_cpu_blocks": int(os.environ["TPU_OFFLOAD_NUM_CPU_CHUNKS"]),
                "offload_prompt_only": os.environ["TPU_OFFLOAD_DECODE_SAVE"] == "0",
                "keep_on_device_reset": True,
                "transfer_deadline_s": 600,  # A CPU may compute a step for minutes.
            }
            super().__init__(
                model=f"{FOLDER}/llama-float32",
                dtype="float32",
                block_size=128,
                num_gpu_blocks_override=64,
                max_model_len=2560,
                max_num_batched_tokens=512,
                max_num_seqs=4,
                async_scheduling=async_scheduling,
                disable_log_stats=False,
                kv_transfer_config=transfer_config(extra),
            )
            self.num_passes = 0

        def generate(self, prompts, sampling_params):
            tokens = [
                [zlib.crc32(w.encode()) % 256 for w in p.split()] for p in prompts
            ]
            inputs = [{"prompt_token_ids": ids} for ids in tokens]
            before = self.count_loaded()
            outputs = super().generate(inputs, sampling_params, use_tqdm=False)
            loaded = self.count_loaded() - before
            print(f"of {sum(map(len, tokens))} tokens {loaded} came from the host")
            self.num_passes += 1
            assert (loaded > 0) == (self.num_passes == 3), "loads in the last pass only"
            return outputs

        def count_loaded(self):
            name = "vllm:external_prefix_cache_hits"
            return sum(
                metric.value for metric in self.get_metrics() if metric.name == name
            )

    return SmallLLM


def pytest_configure():
    """Serve the views under the names that their tests import."""
    import tpu_inference.offload
    import vllm
    from tpu_inference import envs
    from vllm_cpu import plugin

    plugin.register()  # Before their tests import what it replaces.
    name = "tpu_inference.offload.tpu_offload_connector"
    views = types.ModuleType(name)
    views.TPUOffloadConnector = TPUOffloadConnector
    views.TPUOffloadConnectorMetadata = TPUOffloadConnectorMetadata
    views.KVOffloadConnectorStats = KVOffloadConnectorStats
    views.TPUOffloadConnectorScheduler = SchedulerView.make
    views.SaveSpec = views.LoadSpec = views.TPUReqMeta = views.RequestTracker = Record
    views.envs = envs
    sys.modules[name] = tpu_inference.offload.tpu_offload_connector = views
    vllm.LLM = small_engine()


def pytest_collection_modifyitems(items):
    """Skip tests that say nothing about behavior; set up the others."""
    for item in items:
        for part, reason in NOT_BEHAVIOR.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
        if hasattr(item.cls, "create_mesh") and item.cls.setUp.__name__ != "set_up":
            item.cls.setUp = with_fewer_layers(item.cls.setUp)
    utils = sys.modules.get("tests.offload.utils")
    if utils is None:
        return
    make_config, run = utils.ModelConfig, utils.TPURequestRunner.run

    def run_a_step_later(runner, decoded_tokens, expected_stored_blocks, **named):
        """Expect the stores of the last call: they are planned a step later here."""
        due = getattr(runner, "due", 0)
        runner.due = expected_stored_blocks
        run(runner, decoded_tokens, expected_stored_blocks=due, **named)

    utils.ModelConfig = lambda model, **named: make_config(
        f"{FOLDER}/llama-float32", **named
    )
    utils.TPURequestRunner.run = run_a_step_later


def with_fewer_layers(set_up_all):
    """Return the set-up of their worker's tests with 8 layers in place of 64."""

    def set_up(test):
        set_up_all(test)
        test.num_layers = 8

    return set_up


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Judge a test by its behavior."""
    report = yield
    if report.when != "call":
        return report
    if report.failed and "EndOfBehavior" in report.longreprtext:
        report.outcome = "passed"
    for part, (text, reason) in DIFFERS.items():
        if part in item.nodeid and report.failed and text in report.longreprtext:
            report.outcome, report.wasxfail = "skipped", reason
        elif part in item.nodeid and report.passed:
            report.outcome, report.longrepr = "failed", f"passes, though {reason}"
    return report


def pytest_terminal_summary(terminalreporter):
    """Count the results of each file."""
    counts = collections.Counter(
        (report.nodeid.partition("::")[0], outcome)
        for outcome in ("passed", "xfailed", "skipped", "failed", "error")
        for report in terminalreporter.getreports(outcome)
    )
    for (path, outcome), number in sorted(counts.items()):
        terminalreporter.write_line(f"{path}: {number} {outcome}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

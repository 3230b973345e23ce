"""vLLM's own scheduler with the connector, over the runner of `fake_engine`.

vLLM's factory, scheduler, block pool and connector calls are the real ones.
"""

import functools
import importlib.util
import json
import pickle
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.integrations.vllm.tokens import TokenRestorer
from tests.integrations.vllm_cpu.lab import environ
from tests.rigs.fake_engine import Runner, slot

NEEDS_VLLM = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed (pip install vllm-tpu and a torch for CPUs)",
    ),
    pytest.mark.filterwarnings("ignore"),
]
BLOCK_SIZE = 4
# Of states: their blocks, and the shapes of a layer's two arrays.
NUM_STATES, STATE_SHAPES = 17, ((2, 8), (2, 2))
# One of the names that the TPU platform of vllm-tpu lets in.
CONNECTOR = "TPUOffloadConnector"
MODEL = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    vocab_size=256,
    max_position_embeddings=256,
    head_dim=16,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    dtype="bfloat16",
)


def engine_maker(folder, monkeypatch):
    """Prepare this process and a folder; return a maker of `RealEngine`s there."""
    for name, value in environ(folder).items():
        if name != "PYTHONPATH":  # This process has no use for the plugin.
            monkeypatch.setenv(name, value)
    # This runner loses no tokens, and has nothing that they could be restored in.
    monkeypatch.setattr(TokenRestorer, "install", lambda runner: None)
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return lambda **options: RealEngine(str(folder), **options)


def tensors_of(layers, size, num_blocks):
    """Describe the caches of a group to vLLM, in the format of 0.32 or of 0.25."""
    from vllm.v1.kv_cache_interface import KVCacheTensor

    if "shared_by" in KVCacheTensor.__dataclass_fields__:
        return [KVCacheTensor(size=size, shared_by=[layer]) for layer in layers]
    return [
        KVCacheTensor(
            size=len(layers) * size,
            layers=layers,
            layer_stride=size,
            block_stride=size // num_blocks,
        )
    ]


class RealEngine:
    def __init__(
        self,
        model,
        *,
        is_async=False,
        windows=(None,),
        num_blocks=24,
        num_drafts=0,
        extra=None,
        make_runner=None,
        num_state_groups=0,
        retention_tokens=0,
        num_hosts=1,
    ):
        """Make one, with windows of some groups, and groups of states after them.

        States are kept at the end of a prompt, and every `retention_tokens`, if any.
        """
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVTransferConfig,
            ModelConfig,
            ParallelConfig,
            SchedulerConfig,
            SpeculativeConfig,
            VllmConfig,
        )
        from vllm.distributed.kv_transfer.kv_connector.factory import (
            KVConnectorFactory,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
        )
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        model_config = ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64
        )
        cache_config = CacheConfig(
            block_size=BLOCK_SIZE,
            gpu_memory_utilization=0.9,
            enable_prefix_caching=True,
        )
        cache_config.num_gpu_blocks = num_blocks
        if num_state_groups:
            hybrid_coordinator = pytest.importorskip(
                "tpu_inference.core.hybrid_coordinator"
            )
            cache_config.mamba_cache_mode = "align"
            cache_config.mamba_block_size = BLOCK_SIZE
            cache_config.prefix_cache_retention_interval = retention_tokens
            hybrid_coordinator.install_hybrid_coordinator_hooks()
            hybrid_coordinator.set_mamba_num_blocks(NUM_STATES)
        self.config = VllmConfig(
            model_config=model_config,
            cache_config=cache_config,
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=16,
                max_num_seqs=4,
                max_model_len=64,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=is_async,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector=CONNECTOR,
                kv_connector_module_path="jaxkv.integrations.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"num_cpu_blocks": 32} | (extra or {}),
            ),
        )
        if num_hosts > 1:
            self.config.parallel_config.placement_group = SimpleNamespace(
                bundle_specs=[{"TPU": 4}] * num_hosts
            )
        if num_drafts:
            # Afterwards, as vLLM refuses some ways asynchronously that make no
            # difference to its scheduler.
            self.config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=num_drafts,
                prompt_lookup_max=2,
                target_model_config=model_config,
                target_parallel_config=self.config.parallel_config,
            )
        shape = dict(
            block_size=BLOCK_SIZE, num_kv_heads=2, head_size=16, dtype=torch.bfloat16
        )
        size = num_blocks * BLOCK_SIZE * 128
        # A layer of each group shares an array with one of every other.
        groups = [
            KVCacheGroupSpec(
                [f"group{number}.layer{layer}" for layer in range(2)],
                SlidingWindowSpec(**shape, sliding_window=window)
                if window
                else FullAttentionSpec(**shape),
            )
            for number, window in enumerate(windows)
        ]
        groups += [
            KVCacheGroupSpec(
                [f"states{number}.layer{layer}" for layer in range(2)],
                MambaSpec(
                    BLOCK_SIZE,
                    shapes=STATE_SHAPES,
                    dtypes=(torch.float32,) * 2,
                    mamba_cache_mode="align",
                ),
            )
            for number in range(num_state_groups)
        ]
        kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[
                tensor
                for group in groups
                for tensor in tensors_of(group.layer_names, size, num_blocks)
            ],
            kv_cache_groups=groups,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        worker = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, kv_cache_config
        )
        if make_runner is None:
            make_runner = RealRunner
            if num_state_groups:
                make_runner = functools.partial(StatesRunner, groups)
        self.runner = make_runner(worker, num_blocks, windows, newer=True)
        self.is_async, self.num_drafts = is_async, num_drafts
        self.in_flight = []
        self.num_external_tokens = 0
        take = self.scheduler.connector.update_state_after_alloc

        def count(request, blocks, num_external_tokens):
            self.num_external_tokens += num_external_tokens
            take(request, blocks, num_external_tokens)

        self.scheduler.connector.update_state_after_alloc = count

    def add(self, name, prompt, num_output):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=num_output, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self):
        from vllm.distributed.kv_transfer import kv_transfer_state

        # The runners' mixin looks for it here.
        kv_transfer_state._KV_CONNECTOR_AGENT = self.runner.connector
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        output.kv_connector_metadata = pickle.loads(pickle.dumps(meta))
        self.in_flight.append((output, self.runner.execute_model(output)))
        while len(self.in_flight) > self.is_async:
            planned, done = self.in_flight.pop(0)
            self.scheduler.update_from_output(planned, done)
            self.draft(done)
        return output.total_num_scheduled_tokens > 0

    def draft(self, done):
        """Send drafts to the scheduler; the runner makes as many."""
        from vllm.v1.outputs import DraftTokenIds

        if self.num_drafts and not self.is_async:
            drafts = [
                [0] * self.num_drafts * bool(ids) for ids in done.sampled_token_ids
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(done.req_ids, drafts))

    def run(self, max_steps=600):
        for _ in range(max_steps):
            if self.scheduler.has_requests():
                if not self.step():
                    time.sleep(0.01)  # Transfers land in their own time.
            elif self.in_flight:
                self.scheduler.update_from_output(*self.in_flight.pop(0))
            else:
                return
        alive = self.scheduler.requests.values()
        raise AssertionError(
            f"after {max_steps} steps there are "
            f"{[(r.request_id, r.status.name, r.num_computed_tokens) for r in alive]}"
        )


class RealRunner(Runner):
    """Takes vLLM's outputs, and lets vLLM call the connector around the model."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.tables = {}

    def execute_model(self, output):
        from vllm.forward_context import override_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import (
            KVConnectorModelRunnerMixin,
        )

        starts = {}
        for new in output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(
                new.prefill_token_ids or new.prompt_token_ids
            )
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            ids = cached.new_block_ids[index]
            starts[name] = cached.num_computed_tokens[index]
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(group_ids) for group_ids in ids]
                self.tokens[name] = list(cached.all_token_ids[name])
            elif ids is not None:
                for table, new_ids in zip(self.tables[name], ids, strict=True):
                    table += new_ids
        step = SimpleNamespace(
            all_tokens={},
            work={
                name: (starts[name], num, self.tables[name])
                for name, num in output.num_scheduled_tokens.items()
            },
            drafts={
                name: len(drafts)
                for name, drafts in output.scheduled_spec_decode_tokens.items()
            },
        )
        mixin = KVConnectorModelRunnerMixin
        sampled = {}
        with (
            override_forward_context(SimpleNamespace()),
            mixin._get_kv_connector_output(output) as connector_output,
        ):
            if step.work:
                sampled = self.forward(step)
        report = connector_output.kv_connector_worker_meta
        connector_output.kv_connector_worker_meta = pickle.loads(pickle.dumps(report))
        names = list(step.work)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled.get(name, []) for name in names],
            kv_connector_output=connector_output,
        )


class StatesRunner(RealRunner):
    """Has layers with states, too, in arrays of their own, two for each layer.

    A step reads each request's state where its last one has left it, and writes it
    where its own tokens end, as tpu-inference's `gdn_attention` does.
    """

    def __init__(self, groups, connector, num_blocks, windows, **options):
        self.first_state = len(windows)
        self.state_groups = groups[len(windows) :]
        names = [name for group in self.state_groups for name in group.layer_names]
        # Layers of attention share the first arrays.
        self.layer_name_to_kvcache_index = {
            name: layer
            for group in groups[: len(windows)]
            for layer, name in enumerate(group.layer_names)
        } | {name: 2 + number for number, name in enumerate(names)}
        super().__init__(connector, num_blocks, windows, **options)

    def more_caches(self):
        shapes = [(NUM_STATES, *shape) for shape in STATE_SHAPES]
        return [
            tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
            for group in self.state_groups
            for _ in group.layer_names
        ]

    def spoil(self, blocks):
        caches = list(self.kv_caches)
        num_blocks = len(caches[0])
        for block in blocks:
            if block < num_blocks:
                for layer in range(2):
                    caches[layer] = caches[layer].at[block].set(jnp.nan)
                continue
            group, state = divmod(block - num_blocks, NUM_STATES)
            for layer in self.layers_of(group):
                caches[layer] = tuple(
                    part.at[state].set(jnp.nan) for part in caches[layer]
                )
        self.kv_caches = caches

    def layers_of(self, group):
        names = self.state_groups[group].layer_names
        return [self.layer_name_to_kvcache_index[name] for name in names]

    def state_of(self, so_far, layer):
        values = slot(so_far, "state", (self.weights, layer)).astype(np.float32).ravel()
        sizes = [int(np.prod(shape)) for shape in STATE_SHAPES]
        flat = np.resize(values, sum(sizes))
        arrays = np.split(flat, sizes[:1])
        return [p.reshape(s) for p, s in zip(arrays, STATE_SHAPES, strict=True)]

    def forward(self, step):
        writes = []
        for name, (start, num, tables) in step.work.items():
            so_far = tuple(self.tokens[name])
            start = min(start, len(so_far) - 1)
            for group in range(len(self.state_groups)):
                table = tables[self.first_state + group]
                for layer in self.layers_of(group):
                    if start:
                        block = table[(start - 1) // BLOCK_SIZE]
                        self.check_state(name, so_far[:start], layer, block)
                    end = start + num
                    state = self.state_of(so_far[:end], layer)
                    writes.append((layer, table[(end - 1) // BLOCK_SIZE], state))
        num_layers = 2
        caches = list(self.kv_caches)
        for layer, block, state in writes:
            assert block, "a state would be written to the null block"
            caches[layer] = tuple(
                part.at[block].set(value)
                for part, value in zip(caches[layer], state, strict=True)
            )
        # The layers of attention are the same as ever.
        self.kv_caches = caches[:num_layers]
        step.work = {
            name: (start, num, tables[: self.first_state])
            for name, (start, num, tables) in step.work.items()
        }
        try:
            return super().forward(step)
        finally:
            self.kv_caches = [*self.kv_caches, *caches[num_layers:]]

    def check_state(self, name, so_far, layer, block):
        expected = self.state_of(so_far, layer)
        about = f"{name}, state after {len(so_far)} tokens, {block=}, {layer=}"
        for actual, wanted in zip(self.kv_caches[layer], expected, strict=True):
            np.testing.assert_array_equal(np.asarray(actual[block]), wanted, about)

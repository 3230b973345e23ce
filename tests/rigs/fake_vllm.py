"""The interface of vLLM that its connectors see, written from its documentation.

The names and the order of the calls follow vLLM 0.19 and 0.32, which differ in
three points: 0.32 starts asynchronous loads after the model, also accepts failed loads
by request, and reuses freed blocks without a hash first. The assertions are what vLLM
relies on.
"""

import abc
import dataclasses
import enum
import hashlib
import importlib
import sys
import types
from collections import deque

import numpy as np
import prometheus_client

BLOCK_SIZE = 4


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class SupportsHMA(abc.ABC):
    @abc.abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...


class KVConnectorBase_V1(abc.ABC):  # noqa: N801
    def __init__(self, vllm_config, role, kv_cache_config):
        self._role = role

    @property
    def role(self):
        return self._role

    @abc.abstractmethod
    def start_load_kv(self, forward_context, **kwargs): ...

    @abc.abstractmethod
    def wait_for_layer_load(self, layer_name): ...

    @abc.abstractmethod
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    @abc.abstractmethod
    def wait_for_save(self): ...

    @abc.abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...

    @abc.abstractmethod
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...

    @abc.abstractmethod
    def build_connector_meta(self, scheduler_output): ...


@dataclasses.dataclass
class KVConnectorTransferResults:
    finished_sending: set = dataclasses.field(default_factory=set)
    finished_recving: set = dataclasses.field(default_factory=set)
    failed_recving: set = dataclasses.field(default_factory=set)


class NewerBase(KVConnectorBase_V1):
    """The methods that 0.32 adds."""

    @property
    def requires_kv_delivery(self):
        return True

    def bind_kv_cache_manager(self, kv_cache_manager):
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def get_transfer_results(self, finished_req_ids):
        sending, recving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(set(sending or ()), set(recving or ()))


@dataclasses.dataclass
class KVConnectorStats:
    data: dict = dataclasses.field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._gauge_cls = metric_types[prometheus_client.Gauge]
        self._counter_cls = metric_types[prometheus_client.Counter]
        self._histogram_cls = metric_types[prometheus_client.Histogram]
        self.per_engine_labelvalues = per_engine_labelvalues


class CacheHitSource(str, enum.Enum):  # noqa: UP042
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


@dataclasses.dataclass
class BlockStored:
    block_hashes: list
    parent_block_hash: bytes | None
    token_ids: list
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


@dataclasses.dataclass
class BlockRemoved:
    block_hashes: list
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


def _older(event, num_fields):
    """The event of a version that knew neither groups nor extra keys."""
    names = [field.name for field in dataclasses.fields(event)[:num_fields]]
    return dataclasses.make_dataclass(f"Older{event.__name__}", names)


OlderBlockStored, OlderBlockRemoved = _older(BlockStored, 7), _older(BlockRemoved, 2)


@dataclasses.dataclass
class AllBlocksCleared:
    pass


def generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, mm_idx):
    keys = []
    if request.lora_request:
        keys.append(("lora", request.lora_request.name))
    if request.cache_salt and start_token_idx == 0:
        keys.append(("cache_salt", request.cache_salt))
    return tuple(keys) or None, mm_idx


def to_event_extra_keys(extra_keys):
    return [
        None if keys is None else tuple(key[1] for key in keys) for keys in extra_keys
    ]


class VllmScheduler:
    """Only its methods are wrapped: engines here have another scheduler."""

    def reset_prefix_cache(self):
        raise NotImplementedError


def install(monkeypatch, generation):
    """Make `import vllm` find this module, and reload the connector's modules."""
    newer = generation == "0.32"
    contents = {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": dict(
            KVConnectorBase_V1=NewerBase if newer else KVConnectorBase_V1,
            SupportsHMA=SupportsHMA,
            KVConnectorRole=KVConnectorRole,
        ),
        "vllm.distributed.kv_events": dict(
            BlockStored=BlockStored if newer else OlderBlockStored,
            BlockRemoved=BlockRemoved if newer else OlderBlockRemoved,
            AllBlocksCleared=AllBlocksCleared,
        ),
        "vllm.v1.core.sched.scheduler": dict(Scheduler=VllmScheduler),
        "vllm.v1.core.kv_cache_utils": dict(
            maybe_convert_block_hash=bytes,
            generate_block_hash_extra_keys=generate_block_hash_extra_keys,
        )
        | (
            dict(
                to_event_extra_keys=to_event_extra_keys,
                DEFAULT_NONE_HASH_SEED="vllm-none-hash",
            )
            if newer
            else {}
        ),
    }
    if newer:
        contents["vllm.v1.metrics.cache_hit_source"] = dict(
            CacheHitSource=CacheHitSource
        )
        contents["vllm.distributed.kv_transfer.kv_connector.v1.metrics"] = dict(
            KVConnectorStats=KVConnectorStats,
            KVConnectorPromMetrics=KVConnectorPromMetrics,
        )
    for path, names in contents.items():
        segments = path.split(".")
        for length in range(1, len(segments) + 1):
            name = ".".join(segments[:length])
            if not isinstance(sys.modules.get(name), FakeModule):
                monkeypatch.setitem(sys.modules, name, FakeModule(name))
        vars(sys.modules[path]).update(names)
    for name in ("", ".connector", ".scheduler", ".worker", ".stats"):
        monkeypatch.delitem(
            sys.modules, f"jaxkv.integrations.vllm{name}", raising=False
        )


class FakeModule(types.ModuleType):
    __path__ = ()


def create_connector(config, role, kv_cache_config):
    transfer = config.kv_transfer_config
    module = importlib.import_module(transfer.kv_connector_module_path)
    connector = getattr(module, transfer.kv_connector)(
        config, role, kv_cache_config=kv_cache_config
    )
    base = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.base"]
    assert isinstance(connector, base.KVConnectorBase_V1)
    assert isinstance(connector, base.SupportsHMA)
    return connector


class FullAttentionSpec(types.SimpleNamespace):
    sliding_window = None


class SlidingWindowSpec(types.SimpleNamespace):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(types.SimpleNamespace):
    pass


def make_configs(
    *,
    extra=None,
    windows=(None,),
    num_blocks=24,
    num_layers=2,
    model="model",
    **overrides,
):
    """A VllmConfig and a KVCacheConfig. `other` overrides "config.name=value" pairs."""
    groups = []
    for window in windows:
        sizes = dict(block_size=BLOCK_SIZE, head_size=8, dtype=np.dtype(np.float16))
        spec = FullAttentionSpec(**sizes)
        if window:
            spec = SlidingWindowSpec(**sizes, sliding_window=window)
        groups.append(types.SimpleNamespace(kv_cache_spec=spec, layer_names=[]))
    # bf16[block, 2, 2, 8] for each layer.
    tensor = types.SimpleNamespace(size=num_blocks * BLOCK_SIZE * 64)
    kv_cache_config = types.SimpleNamespace(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor] * num_layers,
        kv_cache_groups=groups,
    )
    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, tensor_parallel_size=1
        ),
        cache_config=types.SimpleNamespace(
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
            cache_dtype="auto",
            gpu_memory_utilization=0.95,
            num_gpu_blocks_override=None,
        ),
        model_config=types.SimpleNamespace(
            max_model_len=48,
            runner_type="generate",
            model=str(model),
            revision=None,
            dtype="bfloat16",
            quantization=None,
            seed=0,
            hf_config=types.SimpleNamespace(
                to_dict=lambda: {"_name_or_path": str(model), "num_hidden_layers": 2}
            ),
        ),
        load_config=types.SimpleNamespace(load_format="auto", download_dir=None),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=16),
        speculative_config=None,
        additional_config={},
        kv_events_config=types.SimpleNamespace(enable_kv_cache_events=True),
        kv_transfer_config=types.SimpleNamespace(
            kv_connector="OffloadConnector",
            kv_connector_module_path="jaxkv.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"num_cpu_blocks": 32} | (extra or {}),
        ),
    )
    for name, value in overrides.items():
        section, _, key = name.partition("__")
        setattr(getattr(config, section) if key else config, key or section, value)
    return config, kv_cache_config


@dataclasses.dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    is_null: bool = False


class BlockPool:
    """vLLM's block pool: reference counts, a free queue, a map of hashes."""

    def __init__(self, num_blocks, *, newer):
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_queue = deque(self.blocks[1:])
        self.cached = {}
        self._newer = newer

    def get_num_free_blocks(self):
        return len(self.free_queue)

    def get_cached_block(self, block_hash, group):
        blocks = self.cached.get(block_hash + group.to_bytes(4, "big"))
        return next(iter(blocks.values())) if blocks else None

    def get_new_blocks(self, num):
        assert num <= len(self.free_queue)
        blocks = [self.free_queue.popleft() for _ in range(num)]
        for block in blocks:
            assert block.ref_cnt == 0
            self.forget(block)
            block.ref_cnt = 1
        return blocks

    def forget(self, block):
        if block.block_hash is not None:
            same_key = self.cached[block.block_hash]
            del same_key[block.block_id]
            if not same_key:
                del self.cached[block.block_hash]
            block.block_hash = None

    def cache(self, block, block_hash, group):
        if not block.is_null and block.block_hash is None:
            block.block_hash = block_hash + group.to_bytes(4, "big")
            self.cached.setdefault(block.block_hash, {})[block.block_id] = block

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks):
        freed = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                freed.append(block)
            assert block.ref_cnt >= 0 or block.is_null
        first = [b for b in freed if self._newer and b.block_hash is None]
        self.free_queue.extendleft(reversed(first))
        self.free_queue.extend(b for b in freed if b not in first)

    def reset_prefix_cache(self):
        """Forget all hashes; refused while blocks are in use."""
        if self.get_num_free_blocks() != len(self.blocks) - 1:
            return False
        self.overwrite_all()
        return True

    def overwrite_all(self):
        for block in list(self.free_queue):
            self.forget(block)


@dataclasses.dataclass
class KVCacheBlocks:
    blocks: tuple

    def get_block_ids(self):
        return tuple([block.block_id for block in table] for table in self.blocks)


class Request:
    """A request; its block hashes are chained as vLLM's."""

    def __init__(self, request_id, prompt, num_output, lora=None, salt=None):
        self.request_id = request_id
        self.lora_request = lora
        self.cache_salt = salt
        self.tokens = []
        self.block_hashes = []
        self.append(*prompt)
        self.num_prompt_tokens = len(prompt)
        self.max_tokens = len(prompt) + num_output
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_hits = 0  # Blocks that the device had when it was looked up.
        self.status = "WAITING"
        self.kv_transfer_params = None
        # Of a request whose input streams: more tokens, and how many to answer each.
        self.inputs = deque()
        self.has_streamed = False

    @property
    def all_token_ids(self):
        return self.tokens

    @property
    def num_tokens(self):
        return len(self.tokens)

    def append(self, *tokens):
        self.tokens += tokens
        for end in range(
            (len(self.block_hashes) + 1) * BLOCK_SIZE, len(self.tokens) + 1, BLOCK_SIZE
        ):
            text = repr(
                (self.tokens[:end], self.lora_request, self.cache_salt)
            ).encode()
            self.block_hashes.append(hashlib.sha256(text).digest())

    def stream(self, tokens, num_output):
        """Append input; sampled tokens without KV are dropped."""
        self.has_streamed = True
        num_computed = self.num_computed_tokens
        del self.tokens[num_computed:]
        del self.block_hashes[num_computed // BLOCK_SIZE :]
        self.append(*tokens)
        self.num_prompt_tokens = len(self.tokens)
        self.max_tokens = self.num_prompt_tokens + num_output


@dataclasses.dataclass
class CachedRequestData:
    req_ids: list
    resumed_req_ids: set
    new_block_ids: list


@dataclasses.dataclass
class SchedulerOutput:
    scheduled_new_reqs: list
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict
    finished_req_ids: set
    preempted_req_ids: set | None
    has_sync_kv_loads: bool = False
    kv_connector_metadata: object = None


@dataclasses.dataclass
class KVConnectorOutput:
    finished_sending: set | None = None
    finished_recving: set | None = None
    failed_recving: set = dataclasses.field(default_factory=set)
    invalid_block_ids: set = dataclasses.field(default_factory=set)
    kv_connector_worker_meta: object = None

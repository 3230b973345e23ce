"""Configurations that vLLM's connector accepts and refuses."""

import dataclasses
import re
import sys
import types
from collections import namedtuple
from types import SimpleNamespace

import pytest

import jaxkv
from jaxkv import ConfigError, FullAttention, Mamba, OffloadConfig, SlidingWindow
from jaxkv.integrations.vllm import OffloadConnector
from jaxkv.integrations.vllm.config import (
    FIELDS,
    ConnectorConfig,
    read_extra_config,
    table_of_keys,
)
from jaxkv.policies import registry
from tests.rigs.fake_vllm import BLOCK_SIZE, MambaSpec, MLAAttentionSpec, make_configs


def read(**options):
    return ConnectorConfig.of(*make_configs(**options))


@pytest.fixture
def own_policies(tmp_path, monkeypatch):
    """A module with a policy of one's own, which is forgotten after the test."""
    (tmp_path / "own_policies.py").write_text(
        "import jaxkv\n"
        "from jaxkv.policies.lru import make_lru as newest_last\n"
        "number = 3\n"
        "if 'by_itself' not in jaxkv.policy_names():\n"
        "    jaxkv.register_policy('by_itself', newest_last)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_makers", dict(registry._makers))
    yield
    sys.modules.pop("own_policies", None)


def test_a_policy_may_come_from_a_module_that_has_it(own_policies):
    module = {"cache_policy_module_path": "own_policies"}
    for extra, message in [
        ({"cache_policy_module_path": "no.such_module"}, "No module named 'no'"),
        ({"cache_policy_module_path": "not a path"}, "must be the path of a module"),
        (
            module | {"eviction_policy": "number"},
            "eviction_policy='number' must be a function of cache_policy_module_path=",
        ),
        (module, "eviction_policy=None must be"),
        ({"eviction_policy": "newest_last"}, "must be one of lru, arc, "),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            read(extra=extra)
    for name in ("newest_last", "by_itself", "arc"):
        for _ in range(2):  # Each half of the connector reads it.
            config = read(extra=module | {"eviction_policy": name})
            assert config.offload.cache_policy == name


def test_the_keys_set_rules_and_sizes(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    same = {  # Under the names of the library's configuration.
        "store_threshold": 2,
        "max_unseen_blocks": 8,
        "max_offload_tokens": 64,
        "delay_shared_loads": True,
        "retention": True,
        "record": "/nowhere/requests.jsonl",
        "record_max_files": 1,
        "record_key_file": "/nowhere/key",
        "storage": "redis://:password@host:1",
        "storage_write": "through",
        "max_storage_blocks": 9,
        "storage_deadline_s": 2,
        "storage_list_s": None,
        "storage_probe_s": 0.5,
        "storage_await_s": 7,
        "storage_label": "",
        "storage_secret": "0123456789abcdef",
    }
    sizes = {"staging_bytes": "1MiB", "record_max_bytes": "2MiB"}
    renamed = {
        "num_cpu_blocks": 7,
        "eviction_policy": "arc",
        "offload_prompt_only": True,
        "transfer_deadline_s": 5,
        "storage_bytes": "1MiB",
        "storage_namespace": "weights of Monday",
        "storage_keep_on_reset": True,
    }
    config = read(windows=(None, 6), extra=same | sizes | renamed)
    assert config.groups == (FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 6))
    assert config.num_host_blocks == 7
    assert dataclasses.asdict(config.offload) == OffloadConfig().to_dict() | same | {
        "num_host_blocks": 7,
        "cache_policy": "arc",
        "prompt_only": True,
        "deadline_s": 5.0,
        "staging_bytes": 1 << 20,
        "record_max_bytes": 2 << 20,
        "storage_bytes": 1 << 20,
    }
    labelled = read(extra={"storage": "kv", "storage_namespace": "weights"})
    assert labelled.offload.storage_label == (
        f"model, bfloat16, {BLOCK_SIZE} tokens a block, jaxkv {jaxkv.__version__}"
    )
    storage = config.storage
    # A block is 2 layers of 4 tokens of 64 bytes, and a header of 192 bytes.
    assert storage.num_blocks == (1 << 20) // (512 + 192)
    assert config.vllm.storage_keep_on_reset
    assert not storage.is_folder
    assert storage.shown_url == "redis://host:1"
    assert "0123456789abcdef" not in repr(config)
    assert "password" not in repr(config)


def test_faults_name_vllms_keys_and_leave_values_alone():
    for extra, message in [
        (
            {"shadow": "lru*2", "blocks_per_chunk": 2},
            "shadow='lru*2' and blocks_per_chunk=2 exclude one another",
        ),
        (
            {"record": "host_bytes={mode}", "record_key_file": "host_bytes={mode}"},
            "record='host_bytes={mode}' and record_key_file must be two files",
        ),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            read(extra=extra)
    vllm_config, cache_config = make_configs(
        windows=(None, 6), extra={"blocks_per_chunk": 2}
    )
    role = SimpleNamespace(name="SCHEDULER")
    with pytest.raises(ConfigError, match="blocks_per_chunk=2 needs a model with"):
        OffloadConnector(vllm_config, role, cache_config)


def test_null_is_no_choice_of_a_size():
    extra = {"num_cpu_blocks": None, "cpu_bytes_to_use": None, "staging_bytes": None}
    assert read(extra=extra).offload == read(extra={"num_cpu_blocks": None}).offload


def test_a_secret_may_come_from_the_environment(monkeypatch):
    secret, store = "0123456789abcdef", {"storage": "/kv"}
    expected = read_extra_config(store | {"storage_secret": secret})[0]
    for text in (secret, secret + "\n"):
        monkeypatch.setenv("JAXKV_STORAGE_SECRET", text)
        assert read_extra_config(store)[0] == expected
        assert read_extra_config({})[0].storage_secret is None
    monkeypatch.setenv("JAXKV_STORAGE_SECRET", "")
    assert read_extra_config({})[0].storage_secret is None
    with pytest.raises(ValueError, match="JAXKV_STORAGE_SECRET is set but empty"):
        read_extra_config(store)


def test_cpu_bytes_become_blocks_of_all_layers():
    # 2 layers of 4 tokens of 64 bytes; 8 GiB by default.
    extra = {"num_cpu_blocks": None}
    assert read(extra=extra).num_host_blocks == (8 << 30) // 512
    extra |= {"cpu_bytes_to_use": "1MiB", "blocks_per_chunk": 4}
    assert read(extra=extra).num_host_blocks == (1 << 20) // 2048
    # A byte for two, and two scales for each head.
    extra |= {"compression": "int8", "blocks_per_chunk": 1}
    config = read(extra=extra)
    assert config.num_host_blocks == (1 << 20) // (256 + 2 * 16)
    assert config.planned_bytes <= 1 << 20
    assert config.block_bytes == 512
    extra |= {"compression": None, "blocks_per_chunk": 4}
    # vLLM 0.32: every tensor repeats the size of their common allocation.
    config, cache_config = make_configs(extra=extra)
    cache_config.kv_cache_tensors = [
        SimpleNamespace(size=24 * 512, layer_stride=24 * 256) for _ in range(2)
    ]
    assert ConnectorConfig.of(config, cache_config).num_host_blocks == (1 << 20) // 2048


def test_a_draft_model_is_served_beside_one_group_of_full_attention():
    for drops in (False, True):
        drafts = SimpleNamespace(
            method="eagle3", use_eagle_block_drop=lambda drops=drops: drops
        )
        assert read(speculative_config=drafts).drops_last_block == drops
        with pytest.raises(ValueError, match=r"'eagle3' cannot be used with .*Sliding"):
            read(speculative_config=drafts, windows=(None, 6))
        sharding = SimpleNamespace(total_dp_size=2)
        with pytest.raises(ValueError, match="needs one host and total_dp_size=1, not"):
            read(speculative_config=drafts, sharding_config=sharding)
    ngram = SimpleNamespace(method="ngram")
    assert not read(speculative_config=ngram, windows=(None, 6)).drops_last_block


def test_the_flag_that_leaves_more_device_memory_has_its_value():
    devices = [
        SimpleNamespace(memory_stats=lambda size=size: {"bytes_limit": size << 30})
        for size in (32, 16)
    ]
    flag = read().flag_that_leaves(312 << 20, devices)
    assert flag == "--gpu-memory-utilization=0.93"
    # A block of all layers has 512 bytes, on both.
    fixed = read(cache_config__num_gpu_blocks_override=9000)
    flag = fixed.flag_that_leaves(1 << 20, devices)
    assert flag == "--num-gpu-blocks-override=4904"


STORE = {"storage": "/kv"}
BAD_KEYS = [
    ({"cpu_byte_to_use": 1}, "no key 'cpu_byte_to_use': did you mean cpu_bytes_to_use"),
    ({"zzz": 1}, "has no key 'zzz': choose from cpu_bytes_to_use, "),
    ({"cpu_bytes_to_use": "much"}, "cpu_bytes_to_use='much' must be a size such as"),
    ({"num_cpu_blocks": 0}, "num_cpu_blocks=0 must be a whole number from 1"),
    (
        {"num_cpu_blocks": None, "cpu_bytes_to_use": 2047, "blocks_per_chunk": 4},
        "cpu_bytes_to_use=2047 must be at least 2048: a",
    ),
    (
        {"cpu_bytes_to_use": 1 << 20},
        "cpu_bytes_to_use=1048576 and num_cpu_blocks=32 exclude one another",
    ),
    ({"offload_prompt_only": "no"}, "'no' must be true or false"),
    ({"transfer_deadline_s": 0}, "must be a number of seconds above 0"),
    ({"storage_bytes": "1GiB"}, "storage_bytes needs a storage, such as storage='file"),
    (STORE | {"storage_bytes": 703}, "=703 must be at least 704, what one host block"),
    (STORE | {"storage_namespace": " "}, "=' ' must be a text that is not empty"),
    (
        STORE | {"storage_write": "on_evict", "eviction_policy": "arc"},
        "storage_write='on_evict' needs eviction_policy='lru'",
    ),
    ({"eviction_policy": 3}, "eviction_policy=3 must be one of lru, arc, "),
]
PARALLEL = "parallel_config__{}".format
BAD_ENGINES = [
    (PARALLEL("pipeline_parallel_size"), 2, "parallel_size=2 must be"),
    (PARALLEL("data_parallel_size"), 2, "data_parallel_size=2 must be 1: this vLLM's"),
    (PARALLEL("decode_context_parallel_size"), 2, "must be 1"),
    (
        PARALLEL("distributed_executor_backend"),
        type("RayDistributedExecutorV2", (), {}),
        "backend='RayDistributedExecutorV2' must be 'uni', which TPU_MULTIHOST",
    ),
    ("cache_config__enable_prefix_caching", False, "must be True: the keys of blocks"),
    ("cache_config__prefix_match_unit", 2, r"\[4\] tokens .* of \[2\]"),
    (
        "speculative_config",
        SimpleNamespace(method="medusa"),
        "speculative_config: method='medusa' must be one of ngram, eagle3, dflash",
    ),
    ("model_config__runner_type", "pooling", "has no KV cache to load"),
    ("additional_config", {"enable_continue_decode": True}, "must be false"),
    ("kv_transfer_config__kv_role", "kv_producer", "must be 'kv_both'"),
]


def test_invalid_keys_and_unsupported_engines_are_refused():
    cases = [({"extra": extra}, message) for extra, message in BAD_KEYS]
    cases += [({name: value}, message) for name, value, message in BAD_ENGINES]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            read(**options)


SINGLE = {
    "sharding_config": SimpleNamespace(total_dp_size=1),
    "parallel_config__data_parallel_index": 0,
    "kv_transfer_config__engine_id": "0b5e",
}
# vLLM's configuration of an engine of rank 2, in its own process.
DENSE = {
    "sharding_config": SimpleNamespace(total_dp_size=1),
    "parallel_config__data_parallel_index": 2,
    "kv_transfer_config__engine_id": "0b5e_dp2",
}
EXPERTS = DENSE | {"parallel_config__data_parallel_size": 4}
FIRST = {
    "sharding_config": SimpleNamespace(total_dp_size=1),
    "parallel_config__data_parallel_index": 0,
    "kv_transfer_config__engine_id": "0b5e_dp0",
}


def hazard(path):
    return {"eviction_policy": "hazard", "policy_state": path}


@pytest.mark.parametrize(
    ("engine", "rank"), [(SINGLE, 0), (FIRST, 0), (DENSE, 2), (EXPERTS, 2)]
)
def test_each_engine_of_data_parallelism_is_served_and_writes_its_own_files(
    engine, rank
):
    extra = hazard("/kv/{rank}/learned") | {"record": "/kv/asked-{rank}.jsonl.gz"}
    offload = read(extra=extra, **engine).offload
    assert offload.policy_state == f"/kv/{rank}/learned"
    assert offload.record == f"/kv/asked-{rank}.jsonl.gz"


def test_a_file_that_several_engines_would_share_is_refused():
    for extra, right in [
        ({"record": "/kv.d/asked.jsonl.gz"}, "record='/kv.d/asked-{rank}.jsonl.gz'"),
        (hazard("learned"), "policy_state='learned-{rank}'"),
    ]:
        (_, path) = list(extra.items())[-1]
        name, _, example = right.partition("=")
        message = f"{name}={path!r} must contain {{rank}}, such as {example}: --data"
        for engine in (FIRST, DENSE, EXPERTS):
            with pytest.raises(ValueError, match=re.escape(message)):
                read(extra=extra, **engine)
        assert getattr(read(extra=extra, **SINGLE).offload, name) == path


ASYNC = {"scheduler_config__async_scheduling": True}
SENT = "req_ids resumed_req_ids num_output_tokens all_token_ids"


@pytest.fixture
def install_vllm(monkeypatch):
    """Replace vLLM's output of a step by one with some fields."""

    def install(fields):
        output = types.ModuleType("vllm.v1.core.sched.output")
        output.CachedRequestData = namedtuple("CachedRequestData", fields)
        monkeypatch.setitem(sys.modules, output.__name__, output)

    return install


def test_async_scheduling_is_refused_where_lost_tokens_cannot_be_restored(
    install_vllm, monkeypatch
):
    def check(missing, **options):
        with pytest.raises(ValueError, match=re.escape(missing)) as caught:
            read(**ASYNC, **options)
        assert "Add --no-async-scheduling (async_scheduling=False)." in str(
            caught.value
        )
        # Synchronous scheduling is served: set, by default, or with an older vLLM.
        for is_async in (False, None):
            config = read(scheduler_config__async_scheduling=is_async)
            assert not config.restore_tokens
        assert not read(**options).restore_tokens

    install_vllm(SENT)
    assert read(**ASYNC).restore_tokens
    check("restore_tokens=true is missing", extra={"restore_tokens": False})
    install_vllm("req_ids resumed_req_ids")
    check("Data: num_output_tokens, CachedRequestData: all_token_ids is missing")
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.output", None)
    check("CachedRequestData (import of vllm.v1.core.sched.output halted")


def test_the_newer_model_runner_of_vllm_is_refused(install_vllm):
    install_vllm(SENT)
    assert read(use_v2_model_runner=False).num_host_blocks == 32
    for is_async in (False, True):
        with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            read(use_v2_model_runner=True, scheduler_config__async_scheduling=is_async)


def test_latents_are_blocks_like_any_other_but_not_compressed():
    config, cache_config = make_configs()
    (group,) = cache_config.kv_cache_groups
    group.kv_cache_spec = MLAAttentionSpec(block_size=BLOCK_SIZE, tokens_per_state=1)
    assert ConnectorConfig.of(config, cache_config).groups == (FullAttention(4),)
    config.kv_transfer_config.kv_connector_extra_config["compression"] = "int8"
    with pytest.raises(ValueError, match="compression='int8' cannot be used with MLA"):
        ConnectorConfig.of(config, cache_config)


def with_states(**extra):
    """Configurations of a model with a group of attention between two of states."""
    config, cache_config = make_configs(extra=extra, windows=(None, None, None))
    for number, group in enumerate(cache_config.kv_cache_groups):
        group.layer_names = [f"group{number}.layer{layer}" for layer in range(2)]
        group.kv_cache_spec.page_size_bytes = 200
        if number != 1:
            group.kv_cache_spec = MambaSpec(
                block_size=BLOCK_SIZE, mamba_cache_mode="align", page_size_bytes=300
            )
    return config, cache_config


def test_a_host_block_has_a_block_of_one_group_beside_states():
    config = ConnectorConfig.of(*with_states(num_cpu_blocks=10))
    assert config.groups == (Mamba(4), FullAttention(4), Mamba(4))
    assert config.state_groups == (0, 2)
    assert config.layers[1] == ("group1.layer0", "group1.layer1")
    assert (config.block_bytes, config.planned_bytes) == (600, 6000)


def test_what_cannot_be_done_with_states_is_refused():
    for key, value in (("compression", "int8"), ("blocks_per_chunk", 2)):
        message = f"^{key}={value!r} cannot be used .* states"
        with pytest.raises(ValueError, match=message):
            ConnectorConfig.of(*with_states(**{key: value}))
    config, cache_config = with_states()
    cache_config.kv_cache_groups[0].kv_cache_spec.mamba_cache_mode = "none"
    with pytest.raises(ValueError, match="mamba_cache_mode=none must be 'align'"):
        ConnectorConfig.of(config, cache_config)


def test_unsupported_layers_are_refused():
    config, cache_config = make_configs()
    (group,) = cache_config.kv_cache_groups
    group.kv_cache_spec = MLAAttentionSpec(block_size=BLOCK_SIZE, tokens_per_state=4)
    with pytest.raises(
        ValueError, match=r"group 0 is of MLAAttentionSpec .* never tested"
    ):
        ConnectorConfig.of(config, cache_config)
    full, window = make_configs(windows=(None, 6))[1].kv_cache_groups
    # Layers of one kind and several sizes are wrapped.
    layers = {"a": window.kv_cache_spec, "b": window.kv_cache_spec}
    group.kv_cache_spec = SimpleNamespace(kv_cache_specs=layers, block_size=BLOCK_SIZE)
    assert ConnectorConfig.of(config, cache_config).groups == (SlidingWindow(4, 6),)
    layers["b"] = full.kv_cache_spec
    with pytest.raises(ValueError, match="FullAttentionSpec, SlidingWindowSpec"):
        ConnectorConfig.of(config, cache_config)
    cache_config.kv_cache_groups = []
    with pytest.raises(ValueError, match="has no KV cache group"):
        ConnectorConfig.of(config, cache_config)
    second = SimpleNamespace(kv_cache_spec=type(full.kv_cache_spec)(block_size=8))
    cache_config.kv_cache_groups = [full, second]
    with pytest.raises(ValueError, match=r"blocks of \[4, 8\] tokens"):
        ConnectorConfig.of(config, cache_config)


def test_the_table_of_the_docs_is_what_is_declared(request):
    text = (request.config.rootpath / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert table_of_keys() in text, f"the table must be:\n{table_of_keys()}"
    _, listed = text.split("These keys mean the same as in", 1)
    names = re.findall(r"`(\w+)`", listed.split("\n\n", 1)[0])
    assert names == [name for name in FIELDS if f"| `{name}` |" not in table_of_keys()]


def test_experts_of_prompts_are_refused_because_loaded_ones_are_unknown():
    assert read(aux_output_config=SimpleNamespace()).num_host_blocks == 32
    with pytest.raises(ValueError, match="enable_return_routed_experts=True must be"):
        read(aux_output_config=SimpleNamespace(enable_return_routed_experts=True))

"""Configurations that vLLM's connector accepts and refuses."""

import importlib
import re
import sys
from types import SimpleNamespace

import pytest

from jaxkv import FullAttention, SlidingWindow
from jaxkv.integrations.vllm.config import EXTRA_KEYS, ConnectorConfig
from tests.rigs.fake_vllm import BLOCK_SIZE, MLAAttentionSpec, make_configs


def read(**options):
    return ConnectorConfig.of(*make_configs(**options))


def test_the_keys_set_rules_and_sizes(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config = read(
        windows=(None, 6),
        extra={
            "num_cpu_blocks": 7,
            "eviction_policy": "arc",
            "store_threshold": 2,
            "max_unseen_blocks": 8,
            "offload_prompt_only": True,
            "max_offload_tokens": 64,
            "delay_shared_loads": True,
            "retention": True,
            "staging_bytes": "1MiB",
            "transfer_deadline_s": 5,
            "record": "/nowhere/requests.jsonl",
            "record_max_bytes": "2MiB",
            "record_max_files": 1,
            "record_key_file": "/nowhere/key",
            "storage": "redis://:password@host:1",
            "storage_bytes": "1MiB",
            "storage_write": "through",
            "max_storage_blocks": 9,
            "storage_deadline_s": 2,
            "storage_list_s": None,
            "storage_secret": "0123456789abcdef",
            "storage_namespace": "weights of Monday",
            "storage_keep_on_reset": True,
        },
    )
    assert config.groups == (FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 6))
    assert (config.num_host_blocks, config.cache_policy) == (7, "arc")
    rules = config.rules
    assert (rules.store_threshold, rules.prompt_only) == (2, True)
    assert (rules.max_unseen_blocks, rules.retention) == (8, True)
    assert (rules.max_offload_tokens, rules.delay_shared_loads) == (64, True)
    assert (config.staging_bytes, config.deadline_s) == (1 << 20, 5.0)
    assert (config.record, config.record_key_file) == (
        "/nowhere/requests.jsonl",
        "/nowhere/key",
    )
    assert (config.record_max_bytes, config.record_max_files) == (2 << 20, 1)
    assert (rules.storage_write, rules.max_storage_blocks) == ("through", 9)
    storage = config.storage
    # A block is 2 layers of 4 tokens of 64 bytes, and a header of 192 bytes.
    assert storage.num_blocks == (1 << 20) // (512 + 192)
    assert (storage.deadline_s, storage.list_every_s) == (2.0, None)
    assert (storage.max_blocks, storage.keep_on_reset) == (9, True)
    assert (storage.secret, storage.is_folder) == ("0123456789abcdef", False)
    assert storage.shown_url == "redis://host:1"
    assert "0123456789abcdef" not in repr(config)


def test_cpu_bytes_become_blocks_of_all_layers():
    # 2 layers of 4 tokens of 64 bytes; 8 GiB by default.
    extra = {"num_cpu_blocks": None}
    assert read(extra=extra).num_host_blocks == (8 << 30) // 512
    extra |= {"cpu_bytes_to_use": "1MiB", "blocks_per_chunk": 4}
    assert read(extra=extra).num_host_blocks == (1 << 20) // 2048
    # vLLM 0.32: every tensor repeats the size of their common allocation.
    config, cache_config = make_configs(extra=extra)
    cache_config.kv_cache_tensors = [
        SimpleNamespace(size=24 * 512, layer_stride=24 * 256) for _ in range(2)
    ]
    assert ConnectorConfig.of(config, cache_config).num_host_blocks == (1 << 20) // 2048


BAD_KEYS = {
    "a slip": (
        {"cpu_byte_to_use": 1},
        "has no key 'cpu_byte_to_use': did you mean 'cp",
    ),
    "nothing like it": ({"zzz": 1}, r"has no key 'zzz'\. Known are cpu_bytes_to_use, "),
    "no size": (
        {"num_cpu_blocks": None, "cpu_bytes_to_use": "much"},
        "cpu_bytes_to_use",
    ),
    "too small": (
        {"num_cpu_blocks": None, "cpu_bytes_to_use": 511},
        "at least 512, the",
    ),
    "no block": ({"num_cpu_blocks": 0}, "num_cpu_blocks=0 must be at least 1"),
    "both": ({"cpu_bytes_to_use": 1 << 20}, "both set the size"),
    "no number": (
        {"store_threshold": "2"},
        "store_threshold='2' must be a whole number",
    ),
    "negative": ({"store_threshold": -1}, "store_threshold=-1 must be a whole number"),
    "no flag": ({"offload_prompt_only": "no"}, "'no' must be true or false"),
    "lazy": (
        {"lazy_offload": True},
        "lazy_offload=true is not supported: vLLM's block pool",
    ),
    "no chunk": ({"blocks_per_chunk": 0}, "blocks_per_chunk=0 must be at least 1"),
    "no time": ({"transfer_deadline_s": 0}, "must be a number of seconds above 0"),
    "no file": ({"record": ""}, "record='' must be the name of a file"),
    "a small file": (
        {"record_max_bytes": "1KiB"},
        "record_max_bytes='1KiB' must be at least 1048576",
    ),
    "no files": ({"record_max_files": 0}, "record_max_files=0 must be at least 1"),
    "no store": (
        {"storage": ""},
        "storage='' must be a folder or a URL such as file:///var/cache/kv",
    ),
    "a small store": (
        {"storage": "/kv", "storage_bytes": 703},
        "storage_bytes=703 must be at least 704, what one host block takes",
    ),
    "no such write": (
        {"storage": "/kv", "storage_write": "on_reus"},
        "storage_write='on_reus' must be one of .* did you mean on_reuse",
    ),
    "a short secret": (
        {"storage": "/kv", "storage_secret": "short"},
        r"storage_secret=\.\.\. must be a text of at least 16 bytes",
    ),
    "no namespace": (
        {"storage": "/kv", "storage_namespace": " "},
        "storage_namespace=' ' must be a text that is not empty",
    ),
    "a store that is missing": (
        {"storage_bytes": "1GiB"},
        "storage_bytes needs a storage, such as storage='file:///var/cache/kv'",
    ),
    "no victims": (
        {"storage": "/kv", "storage_write": "on_evict", "eviction_policy": "arc"},
        "storage_write='on_evict' needs eviction_policy='lru'",
    ),
    "no name": (
        {"eviction_policy": 3},
        "eviction_policy=3 must be the name of a cache",
    ),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_invalid_keys_are_refused(case):
    extra, message = BAD_KEYS[case]
    with pytest.raises(ValueError, match=message):
        read(extra=extra)


BAD_ENGINES = {
    "pipelines": (
        "parallel_config__pipeline_parallel_size",
        2,
        "parallel_size=2 must be",
    ),
    "data": (
        "parallel_config__data_parallel_size",
        2,
        "data_parallel_size=2 must be 1",
    ),
    "context": ("parallel_config__decode_context_parallel_size", 2, "must be 1"),
    "ranks": ("sharding_config", SimpleNamespace(total_dp_size=2), "total_dp_size=2"),
    "no hashes": (
        "cache_config__enable_prefix_caching",
        False,
        "must be true: blocks have",
    ),
    "finer hashes": ("cache_config__prefix_match_unit", 2, r"\[4\] tokens .* of \[2\]"),
    "drafts": (
        "speculative_config",
        SimpleNamespace(),
        "speculative_config must be none",
    ),
    "pooling": ("model_config__runner_type", "pooling", "has no KV cache to load"),
    "its loop": (
        "additional_config",
        {"enable_continue_decode": True},
        "must be false",
    ),
    "role": ("kv_transfer_config__kv_role", "kv_producer", "must be 'kv_both'"),
}


@pytest.mark.parametrize("case", BAD_ENGINES)
def test_unsupported_engines_are_refused(case):
    name, value, message = BAD_ENGINES[case]
    with pytest.raises(ValueError, match=message):
        read(**{name: value})


@pytest.fixture
def install_tpu_inference(tmp_path, monkeypatch):
    """Replace the installed tpu-inference by one with a version, or none."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tpu_inference", raising=False)
    importlib.invalidate_caches()

    def install(version):
        (tmp_path / "tpu_inference").mkdir()
        (tmp_path / "tpu_inference" / "__init__.py").touch()
        if version is not None:
            folder = tmp_path / f"tpu_inference-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: tpu-inference\nVersion: {version}\n"
            )
        importlib.invalidate_caches()

    return install


@pytest.mark.parametrize(
    ("version", "named"),
    [
        ("0.32.0", "tpu-inference 0.32.0 gives wrong tokens: a request that is left"),
        ("0.32.1.dev20261101", "tpu-inference 0.32.1.dev20261101 gives wrong tokens"),
        ("0.19.1", "tpu-inference 0.19.1 gives wrong tokens"),
        ("0.9", "tpu-inference 0.9 gives wrong tokens"),
        ("main", "tpu-inference main gives wrong tokens"),
        (None, "tpu-inference of unknown version gives wrong tokens"),
    ],
)
def test_async_scheduling_is_refused_where_tpu_inference_loses_tokens(
    version, named, install_tpu_inference
):
    install_tpu_inference(version)
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        read(scheduler_config__async_scheduling=True)
    assert "Add --no-async-scheduling (async_scheduling=False)." in str(caught.value)
    # Synchronous scheduling is served: set, by default, or with an older vLLM.
    for is_async in (False, None):
        assert read(scheduler_config__async_scheduling=is_async).num_host_blocks == 32
    assert read().num_host_blocks == 32


@pytest.mark.parametrize("version", ["0.33.0", "0.100.0", "1.0"])
def test_async_scheduling_is_served_with_a_newer_tpu_inference(
    version, install_tpu_inference
):
    install_tpu_inference(version)
    assert read(scheduler_config__async_scheduling=True).num_host_blocks == 32


@pytest.mark.usefixtures("install_tpu_inference")
def test_async_scheduling_is_served_without_tpu_inference():
    assert read(scheduler_config__async_scheduling=True).num_host_blocks == 32


def test_unsupported_layers_are_refused():
    config, cache_config = make_configs()
    (group,) = cache_config.kv_cache_groups
    group.kv_cache_spec = MLAAttentionSpec(block_size=BLOCK_SIZE)
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
    other = SimpleNamespace(kv_cache_spec=type(full.kv_cache_spec)(block_size=8))
    cache_config.kv_cache_groups = [full, other]
    with pytest.raises(ValueError, match=r"blocks of \[4, 8\] tokens"):
        ConnectorConfig.of(config, cache_config)


def test_every_key_is_in_the_documentation(request):
    text = (request.config.rootpath / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert [name for name in EXTRA_KEYS if f"`{name}`" not in text] == []

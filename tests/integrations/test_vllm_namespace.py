"""The namespace of a store in vLLM: what makes another one, and what is refused."""

import json
import re
from types import SimpleNamespace

import pytest

from jaxkv.integrations.vllm import namespace
from jaxkv.integrations.vllm.namespace import (
    _versions,
    encode,
    namespace_of,
    summary,
)
from tests.rigs import fake_vllm
from tests.rigs.fake_vllm import make_configs

ENVIRON = {"PYTHONHASHSEED": "0"}


@pytest.fixture(autouse=True)
def no_versions(monkeypatch):
    monkeypatch.setattr(namespace, "_versions", lambda sharding: {})


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(namespace.weights_of, "process_started_s", lambda: 1e12)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def space(model, environ=None, weights=None, **options):
    configs = make_configs(model=model, **options)
    return namespace_of(*configs, weights, ENVIRON if environ is None else environ)


def test_it_is_the_same_for_the_same_engine(model):
    """It depends neither on the process nor on the devices."""

    class Thing:
        """JSON does not know it."""

    def encoded(home):
        sharding = {"sharding_strategy": {"device_indexes": [home]}}
        options = {"sharding": sharding, "thing": Thing()}
        environ = {**ENVIRON, "HOME": home}
        return encode(space(model, environ, additional_config=options))

    assert encoded("a") == encoded("b")
    assert str(model) not in encoded("a").decode()


def hf_config(**values):
    return SimpleNamespace(to_dict=lambda: {"num_hidden_layers": 2} | values)


OTHERS = {
    "overrides": {"model_config__hf_config": hf_config(rope_theta=1e6)},
    "dtype": {"model_config__dtype": "float32"},
    "quantization": {"model_config__quantization": "fp8"},
    "length": {"model_config__max_model_len": 96},
    "cache dtype": {"cache_config__cache_dtype": "fp8"},
    "cache layout": {"cache_config__kv_cache_layout": "LBNHC"},
    "shards": {"parallel_config__tensor_parallel_size": 2},
    "windows": {"windows": (6,)},
    "groups": {"windows": (None, 6)},
    "hash": {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
    "options": {"additional_config": {"quantization": {"qwix": {"rules": []}}}},
    "images": {
        "model_config__multimodal_config": SimpleNamespace(
            mm_processor_kwargs={"num_crops": 4}
        )
    },
    "seed": {"environ": {"PYTHONHASHSEED": "1"}},
    "implementation": {"environ": {**ENVIRON, "MODEL_IMPL_TYPE": "vllm"}},
    "random weights": {"load_config__load_format": "dummy"},
    "named weights": {"weights": "v2"},
}


def test_whatever_changes_the_bytes_of_blocks_makes_another(model, monkeypatch):
    spaces = {name: encode(space(model, **options)) for name, options in OTHERS.items()}
    spaces["first"] = encode(space(model))
    versions = {"tpu-inference": "0.33"}
    monkeypatch.setattr(namespace, "_versions", lambda sharding: versions)
    spaces["versions"] = encode(space(model))
    assert len(set(spaces.values())) == len(spaces)


def test_the_summary_shows_which_part_differs(model):
    def entries(**options):
        described = space(model, {"PYTHONHASHSEED": "a secret seed"}, **options)
        assert "a secret seed" not in json.dumps(described, default=str)
        return dict(entry.split() for entry in summary(described).split(", "))

    before, after = entries(), entries(cache_config__cache_dtype="fp8")
    assert [name for name in before if before[name] != after[name]] == ["cache"]


def test_the_version_of_the_runners_package_counts_whatever_its_name(
    tmp_path, monkeypatch
):
    metadata = tmp_path / "renamed_runner-7.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: renamed_runner\nVersion: 7.5\n"
    )
    (metadata / "top_level.txt").write_text("renamed_modules\n")
    monkeypatch.syspath_prepend(tmp_path)
    sharding = type("Sharding", (), {"__module__": "renamed_modules.sharding"})()
    assert _versions(sharding)["renamed-runner"] == "7.5"
    assert "renamed-runner" not in _versions(None)


def test_without_a_seed_versions_with_one_of_their_own_are_served(model, monkeypatch):
    fake_vllm.install(monkeypatch, "0.32")
    assert (
        space(model, {})["hashes"]
        == space(model, {"PYTHONHASHSEED": "vllm-none-hash"})["hashes"]
    )
    fake_vllm.install(monkeypatch, "0.19")
    vars(__import__("sys").modules["vllm.v1.core.kv_cache_utils"]).pop(
        "DEFAULT_NONE_HASH_SEED", None
    )
    with pytest.raises(ValueError, match="storage needs the same PYTHONHASHSEED"):
        space(model, {})


REFUSED = {
    "a hash with collisions": (
        {"cache_config__prefix_caching_hash_algo": "xxhash_cbor"},
        "storage needs --prefix-caching-hash-algo sha256 or sha256_cbor, not 'xxhash_",
    ),
    "weights from elsewhere": (
        {"load_config__load_format": "tensorizer"},
        "load_format='tensorizer' may read .* Name them by storage_namespace",
    ),
    "a bucket": (
        {"model_config__model_weights": "s3://bucket/model"},
        "model='s3://bucket/model' is neither a folder",
    ),
    "modelscope": (
        {"environ": {**ENVIRON, "VLLM_USE_MODELSCOPE": "True"}},
        "weights of ModelScope have no known version",
    ),
    "no snapshot": (
        {"model_config__model": "org/name", "environ": {**ENVIRON, "HF_HOME": "/no"}},
        "no snapshot of model='org/name', revision='main', is in /no/hub, so that its",
    ),
}


def test_indistinguishable_namespaces_are_refused_in_one_line(model):
    for case, (options, message) in REFUSED.items():
        with pytest.raises(ValueError, match=message) as caught:
            space(model, **options)
        assert "\n" not in str(caught.value)
        if case != "a hash with collisions":
            assert space(model, weights="v1", **options)["weights"] == {"named": "v1"}


def test_weights_that_changed_while_they_were_read_are_refused(model, monkeypatch):
    monkeypatch.setattr(namespace.weights_of, "process_started_s", lambda: 0.0)
    with pytest.raises(ValueError, match="changed since this process began"):
        space(model)


@pytest.mark.parametrize("hf_config_path", [None, "org/other"])
def test_a_branch_that_moved_while_its_weights_were_read_is_refused(
    model, tmp_path, hf_config_path
):
    old, new = "0" * 40, "1" * 40
    hub = tmp_path / "models--org--name"
    for commit in old, new:
        (hub / "snapshots" / commit).mkdir(parents=True)
    (hub / "refs").mkdir()
    config = hf_config()
    config._commit_hash = old
    options = {
        "environ": {**ENVIRON, "HF_HUB_CACHE": str(tmp_path)},
        "model_config__model": "org/name",
        "model_config__hf_config": config,
        "model_config__hf_config_path": hf_config_path,
    }
    (hub / "refs" / "main").write_text(old)
    weights = {"hub": "org/name", "commit": old}
    assert space(model, **options)["weights"] == weights
    (hub / "refs" / "main").write_text(new)
    if hf_config_path is not None:  # Its commits are others.
        assert space(model, **options)["weights"] == weights | {"commit": new}
        return
    message = f"revision='main' was {old} when .* is {new} now. Name them by storage_n"
    with pytest.raises(ValueError, match=message):
        space(model, **options)
    assert space(model, weights="v1", **options)["weights"] == {"named": "v1"}
    config._commit_hash = None
    assert space(model, **options)["weights"] == weights | {"commit": new}


def test_a_configuration_of_another_form_is_refused(model):
    configs = make_configs(model=model)
    del configs[0].model_config.quantization
    expected = "its configuration has an unknown form, .*'quantization'"
    with pytest.raises(ValueError, match=re.compile(expected)):
        namespace_of(*configs, None, ENVIRON)

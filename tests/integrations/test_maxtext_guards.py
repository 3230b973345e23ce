"""The guards fix what they name in their versions, and nothing else."""

import importlib.metadata
import sys
import types

import jax
import pytest

from jaxkv.integrations import maxtext_guards
from jaxkv.integrations.maxtext import REQUIRED, check_config


class Array:
    """The attributes that the guard reads."""

    def __init__(self, length):
        self.shape = (1, length, 2, 4)


@pytest.fixture
def fake_maxtext(monkeypatch):
    """Replace MaxText's modules at a version; return its cache class."""

    def make(version, stub=True):
        class KVCache:
            key_seq_len = value_seq_len = 1

            def kv_cache_chunked_prefill(self, key, value, segments, previous=None):
                assert self.key_seq_len == segments.shape[1], "should match"
                return key, value, segments, previous

        class ResultTokens:
            def __init__(self, data=None, tokens_idx=None, log_prob=None, **rest):
                self.data, self.tokens_idx, self.log_prob = data, tokens_idx, log_prob
                self.valid_idx, self.length_idx = rest.get("valid_idx"), None
                self.samples_per_slot = rest.get("samples_per_slot")

        def fake_version(name):
            assert name == "maxtext"
            return version

        monkeypatch.setattr(importlib.metadata, "version", fake_version)
        kvcache = types.SimpleNamespace(KVCache=KVCache)
        engine_api = types.SimpleNamespace(ResultTokens=ResultTokens, _IS_STUB=stub)
        maxengine = types.SimpleNamespace(engine_api=engine_api)
        name = "maxtext.inference.maxengine.maxengine"
        monkeypatch.setitem(sys.modules, "maxtext.inference.kvcache", kvcache)
        monkeypatch.setitem(sys.modules, name, maxengine)
        return KVCache, ResultTokens

    return make


@pytest.mark.parametrize("version", sorted(maxtext_guards.ASSERTION_VERSIONS))
def test_the_guard_sets_the_key_length_during_the_call(fake_maxtext, version):
    cache_class, _ = fake_maxtext(version)
    segments = types.SimpleNamespace(shape=(1, 24))
    cache = cache_class()
    with pytest.raises(AssertionError):
        cache.kv_cache_chunked_prefill(Array(24), Array(24), segments)
    assert maxtext_guards.guard_chunked_prefill()
    guarded = cache_class.kv_cache_chunked_prefill
    assert maxtext_guards.guard_chunked_prefill()  # Once is enough.
    assert cache_class.kv_cache_chunked_prefill is guarded
    result = cache.kv_cache_chunked_prefill(Array(24), Array(24), segments, previous=3)
    assert result[3] == 3
    with pytest.raises(AssertionError):  # Keys that are not as long as the chunk.
        cache.kv_cache_chunked_prefill(Array(23), Array(23), segments)
    assert (cache.key_seq_len, cache.value_seq_len) == (1, 1)


def test_other_versions_are_left_alone(fake_maxtext):
    for version in ("0.1.0", "0.2.6", "0.3.0", "1.0"):
        cache_class, _ = fake_maxtext(version)
        before = cache_class.kv_cache_chunked_prefill
        assert not maxtext_guards.guard_chunked_prefill()
        assert cache_class.kv_cache_chunked_prefill is before


def test_stub_results_become_pytrees(fake_maxtext):
    _, results = fake_maxtext("0.2.5")
    result = results(data=1, tokens_idx=(0, 1), log_prob=2, samples_per_slot=1)
    assert jax.tree.leaves(result) == [result]
    assert maxtext_guards.guard_stub_results()
    assert maxtext_guards.guard_stub_results()
    assert jax.tree.leaves(result) == [1, 2]
    twice = jax.tree.map(lambda leaf: leaf * 2, result)
    assert (twice.data, twice.log_prob) == (2, 4)
    assert (twice.tokens_idx, twice.samples_per_slot) == ((0, 1), 1)


def test_results_of_jetstream_are_left_alone(fake_maxtext):
    _, results = fake_maxtext("0.2.5", stub=False)
    assert not maxtext_guards.guard_stub_results()
    result = results(data=1)
    assert jax.tree.leaves(result) == [result]


def test_without_maxtext_every_guard_says_what_to_install(monkeypatch):
    def no_version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_version)
    for guard in (
        maxtext_guards.guard_chunked_prefill,
        maxtext_guards.guard_stub_results,
        maxtext_guards.find_prefix_class,
    ):
        with pytest.raises(ImportError, match=r"pip install maxtext, on Python 3\.12"):
            guard()


def test_a_configuration_that_cannot_resume_is_refused():
    good = {name: required for name, (required, _) in REQUIRED.items()}
    good |= {"attention_type": "global", "scan_layers": False}
    check_config(types.SimpleNamespace(**good))
    stacked = {"scan_layers": True, "stack_prefill_result_cache": True}
    check_config(types.SimpleNamespace(**good | stacked))
    for name, value, message in [
        ("use_chunked_prefill", False, "must be True: it is the only prefill that"),
        ("prefill_cache_axis_order", "0,1,2,3", "must be '1,2,0,3'"),
        ("ar_cache_axis_order", "0,2,1,3", "must be '1,2,0,3'"),
        ("quantize_kvcache", True, "must be False: chunked prefill refuses"),
        ("use_ragged_attention", True, "must be False"),
        ("attention_type", "mla", "ignores an existing prefix"),
        ("attention_type", "full", "attend to later tokens"),
        ("stack_prefill_result_cache", True, "must be False with scan_layers=False"),
    ]:
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            check_config(types.SimpleNamespace(**good | {name: value}))

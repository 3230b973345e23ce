"""OffloadConfig: sources of values, refusals, and the parts that it makes."""

import contextlib
import dataclasses
import inspect
import json
import logging
import os
import pickle
import re
import shutil
import threading
import typing
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from prometheus_client import REGISTRY

from examples.event_subscriber import EventSubscriber
from jaxkv import ConfigError, OffloadConfig
from jaxkv import config as config_module
from jaxkv._util import parse_bytes
from jaxkv.config import KEYS, table_of_keys, variable_of
from jaxkv.policies import registry
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tools.demo.records import DemoConfig
from jaxkv.transfer import TransferEngine
from jaxkv.transfer.storage import StoreError, open_store
from tests.rigs.command_line import run_python
from tests.rigs.listening import stored
from tests.rigs.refusals import AWKWARD
from tests.rigs.scraping import get
from tests.rigs.servers import free_port
from tests.rigs.waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent

# Keys that a key needs.
NEEDED = {
    "events_replay_endpoint": {"events_endpoint": "tcp://127.0.0.1:5557"},
    "storage_secret": {"storage": "kv"},
}
TEXTS = {
    "shadow": "lru*2;off",
    "storage": "s3://bucket/kv",
    "storage_label": "llama, bfloat16",
    "storage_secret": "sixteen letters.",
    "events_endpoint": "tcp://127.0.0.1:65535",
    "events_replay_endpoint": "ipc:///run/replay",
    "events_topic": "kv@pod@model",
    "metrics_address": "0.0.0.0",
    "policy_state": "/var/lib/learned.json",
    "record": "/var/log/requests.jsonl.gz",
    "record_key_file": "/run/secrets/trace key",
}
FLAG_TEXTS = {True: ("Yes", "on", "1", "TRUE"), False: ("Off", "0", "no", "false")}


def other_than_default(name):
    """Return a value of a key, and its text in the environment."""
    key, default = KEYS[name], getattr(OffloadConfig(), name)
    if name in TEXTS:
        return TEXTS[name], TEXTS[name]
    if choices := [choice for choice in key.names() if choice != default]:
        return choices[0], choices[0]
    if isinstance(default, bool):
        return not default, FLAG_TEXTS[not default][len(name) % 4]
    if key.unit == "s":
        return 2.5, "2.5"
    return (1 << 30, "1 GiB") if key.unit == "bytes" else (7, " +7 ")


def test_the_table_of_the_docs_has_all_keys_as_they_are():
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert table_of_keys() in text, f"the table must be:\n{table_of_keys()}"
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)`.*? \| .+\. \|$", text, re.MULTILINE)
    fields = {field.name: field.default for field in dataclasses.fields(OffloadConfig)}
    assert list(KEYS) == list(fields)
    assert set(dict(rows)) == set(fields)
    hints = typing.get_type_hints(OffloadConfig)
    for name, default in rows:
        value = json.loads(default)
        if KEYS[name].unit == "bytes" and value is not None:
            value = parse_bytes(value)
        assert (value, type(value)) == (fields[name], type(fields[name])), name
        accepts_none = type(None) in typing.get_args(hints[name])
        assert accepts_none == KEYS[name].may_be_none, name


ANOTHER_SETTING = """
    max_odd_blocks: int | None = settings.number(
        None, "scheduler", "Is there.", unit="host blocks", minimum=3
    )
"""
SEES_IT = """
import pytest
from jaxkv import ConfigError, OffloadConfig, OffloadRules
from jaxkv.config import table_of_keys
from jaxkv.integrations.vllm import config as vllm

assert OffloadConfig(max_odd_blocks=5).make_rules() == OffloadRules(max_odd_blocks=5)
environ = {"JAXKV_MAX_ODD_BLOCKS": "5"}
assert OffloadConfig.from_env(environ=environ).max_odd_blocks == 5
assert vllm.read_extra_config({"max_odd_blocks": 5})[0].max_odd_blocks == 5
assert "    max_odd_blocks: Is there." in OffloadRules.__doc__
assert "| `max_odd_blocks` | `null`, host blocks | Is there. |" in table_of_keys()
for make in (
    lambda: OffloadRules(max_odd_blocks=2),
    lambda: OffloadConfig(max_odd_blocks=2),
    lambda: vllm.read_extra_config({"max_odd_blocks": 2}),
):
    with pytest.raises(ConfigError, match="^max_odd_blocks=2 must be a whole number"):
        make()
"""


def test_a_rule_is_declared_in_one_place_and_seen_everywhere(tmp_path):
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jaxkv", tmp_path / "jaxkv", ignore=ignore)
    rules = tmp_path / "jaxkv/scheduling/rules.py"
    before, end, after = rules.read_text("utf-8").partition("\n    def _contradictions")
    rules.write_text(before + ANOTHER_SETTING + end + after, encoding="utf-8")
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = run_python(SEES_IT, cwd=tmp_path, env=environ, text=True)
    assert done.returncode == 0, done.stderr


# What a worker gets from the engine around it, and not from a user's settings.
OF_THE_ENGINE = {"clock", "storage", "movers", "shares_scheduler", "num_shards"}


def test_the_defaults_are_those_of_the_parts():
    assert OffloadConfig().make_rules() == OffloadRules()
    renamed = {"mode": "transfer_mode", "kernel": "transfer_kernel"}
    for part in TransferEngine, OffloadWorker:
        for name, default in part.__init__.__kwdefaults__.items():
            if name not in {"block_axis", "shared", *OF_THE_ENGINE}:
                value = getattr(OffloadConfig(), renamed.get(name, name))
                assert (value, type(value)) == (default, type(default)), name


def test_no_choice_of_the_parts_is_missing():
    of_rules = {field.name for field in dataclasses.fields(OffloadRules)}
    assert all(f"    {name}: " in OffloadRules.__doc__ for name in of_rules)
    of_engine = set(TransferEngine.__init__.__kwdefaults__)
    of_worker = set(OffloadWorker.__init__.__kwdefaults__)
    for part, names in {
        "scheduler": of_rules - {"block_bytes"}
        | {"cache_policy", "enable_events", "policy_state"}
        | {"num_host_blocks", "executor"},
        "engine": of_engine - {"mode", "kernel", "block_axis", "shared"}
        | {"num_host_blocks", "transfer_mode", "transfer_kernel"},
        "worker": of_worker - OF_THE_ENGINE,
    }.items():
        assert {name for name, key in KEYS.items() if part in key.scope} == names


def test_a_key_comes_the_same_from_everywhere(tmp_path):
    path = tmp_path / "a.json"
    for name in KEYS:
        value, text = other_than_default(name)
        needed = NEEDED.get(name, {})
        values = needed | {name: value}
        config = OffloadConfig(**values)
        assert getattr(config, name) == value, name
        assert type(getattr(config, name)) is type(value), name
        assert config != OffloadConfig(), name
        path.write_text(json.dumps(values))
        environ = {variable_of(name): text, "HOME": "/", "JAXKV_TEST_SEED": "5"}
        for same in (
            OffloadConfig.from_dict(values),
            OffloadConfig.from_json(json.dumps(values)),
            OffloadConfig.from_file(path),
            OffloadConfig.from_env(needed, environ),
            OffloadConfig.from_dict(config.to_dict()),
            OffloadConfig.from_json(json.dumps(config.to_dict())),
        ):
            assert same == config, name
        # What is explicit counts more than the environment, a default among it.
        default = getattr(OffloadConfig(), name)
        if name not in ("host_bytes", "num_host_blocks"):
            assert OffloadConfig.from_env({name: default}, environ) == OffloadConfig()


def test_none_and_nothing_in_the_environment():
    for name in KEYS:
        if KEYS[name].may_be_none:
            for text, values in (("", {}), (" ", {}), ("None", {name: None})):
                config = OffloadConfig.from_env(environ={variable_of(name): text})
                assert config == OffloadConfig(**values), (name, text)


def test_the_environment_of_the_process_counts_only_if_asked(monkeypatch):
    monkeypatch.setenv("JAXKV_MODE", "lazy")
    assert OffloadConfig.from_env().mode == "lazy"
    assert OffloadConfig().mode == OffloadConfig.from_dict({}).mode == "eager"


def test_an_explicit_size_takes_the_place_of_either_size_in_the_environment():
    for variable, explicit, sizes in (
        ("JAXKV_NUM_HOST_BLOCKS=7", {"host_bytes": "1GiB"}, (1 << 30, None)),
        ("JAXKV_HOST_BYTES=1GiB", {"num_host_blocks": 7}, (None, 7)),
        ("JAXKV_HOST_BYTES=1GiB", {"host_bytes": None}, (None, None)),
    ):
        config = OffloadConfig.from_env(explicit, dict([variable.split("=")]))
        assert (config.host_bytes, config.num_host_blocks) == sizes, variable


def fault_of(call, *args):
    """Return the one fault of a call's arguments, a printable line, or None."""
    try:
        call(*args)
    except ConfigError as error:
        [fault] = error.faults
        return fault
    return None


def refuse(call, *args):
    """Check that a call refuses its arguments; return its fault."""
    fault = fault_of(call, *args)
    assert fault is not None, args
    assert fault.isprintable()
    # A fault may list all variables; any other text in it is short.
    names = [field.name for field in dataclasses.fields(OffloadConfig)]
    assert len(fault.encode()) < 150 + sum(len(f"JAXKV_{name}, ") for name in names)
    return fault


SIZE = "must be a size such as 64MiB, 1GiB or a number of bytes, at least 1024, or None"
# Values, or variables and explicit values, and the fault or words of it.
REFUSED = """
{"host_byte": 1}               | unknown key host_byte: did you mean host_bytes?
{"Mode": "lazy"}               | unknown key Mode: did you mean mode?
{"JAXKV_MODE": "lazy"}         | unknown key JAXKV_MODE: did you mean mode?
{"zzz": 1} | unknown key zzz: choose from host_bytes, num_host_blocks
{"host_bytes": "8 parsecs"}    | host_bytes='8 parsecs' SIZE
{"host_bytes": 0}              | host_bytes=0 SIZE
{"host_bytes": true}           | host_bytes=True SIZE
{"host_bytes": 1.5}            | host_bytes=1.5 SIZE
{"staging_bytes": null}        | staging_bytes=None must be a size such as
{"num_host_blocks": 0}         | num_host_blocks=0 must be a whole number from 1, or
{"world_size": 0}              | world_size=0 must be a whole number from 1
{"world_size": null}           | world_size=None must be a whole number from 1
{"world_size": "2"}            | world_size='2' must be a whole number from 1
{"world_size": true}           | world_size=True must be a whole number from 1
{"store_threshold": -1}        | store_threshold=-1 must be a whole number from 0
{"world_size": 2.0}            | world_size=2.0 must be a whole number from 1
{"prompt_only": 1}             | prompt_only=1 must be true or false
{"prompt_only": "true"}        | prompt_only='true' must be true or false
{"mode": "lzay"} | mode='lzay' must be one of eager, lazy: did you mean lazy?
{"mode": null}                 | mode=None must be one of eager, lazy
{"mode": ["lazy"]}             | mode=['lazy'] must be one of eager, lazy
{"cache_policy": "LRU"}        | lru, arc, hazard: did you mean
{"transfer_mode": "x"}         | ='x' must be one of fused, staged, or None
{"compression": "itn8"}        | must be one of int8, or None: did you mean int8?
{"deadline_s": 0} | deadline_s=0 must be a number of seconds above 0, or None
{"deadline_s": "5"}            | deadline_s='5' must be a number of seconds above 0
{"deadline_s": NaN}            | deadline_s=nan must be a number of seconds above 0
{"deadline_s": Infinity}       | deadline_s=inf must be a number of seconds above 0
{"metrics_port": 65536}        | =65536 must be a whole number from 0 to 65535, or
{"events_endpoint": "5557"}    | ='5557' must be an address such as tcp://127.
{"events_topic": 5}            | events_topic=5 must be a text
{"events_endpoint": "tcp://a:65536"}          | , with a port below 65536, or None
{"events_replay_endpoint": "tcp://a:99999"}   | , with a port below 65536, or None
{"events_replay_endpoint": "tcp://*:1"}       | needs an events_endpoint, whose
{"host_bytes": 1024, "num_host_blocks": 5}    | =1024 and num_host_blocks=5 exclude one
{"mode": "lazy", "prompt_only": true}         | prompt_only=True and mode='lazy' exclude
{"mode": "lazy", "blocks_per_host_block": 2} | blocks_per_host_block=2 and mode='lazy'
{"storage": "kv", "world_size": 2} | storage='kv' and world_size=2 exclude one another
{"storage": "kv", "storage_write": "on_evict", "retention": true}     | ON_EVICT
{"storage": "kv", "storage_write": "on_evict", "cache_policy": "arc"} | ON_EVICT
JAXKV_HOST_BYTE=8   | unknown variable JAXKV_HOST_BYTE: did you mean JAXKV_HOST_BYTES?
JAXKV_host_bytes=8  | unknown variable JAXKV_host_bytes: did you mean JAXKV_HOST_BYTES?
JAXKV_XYZ=1         | JAXKV_XYZ: choose from JAXKV_HOST_BYTES
JAXKV_HOST_BYTES=8  | JAXKV_HOST_BYTES='8' SIZE
JAXKV_STORAGE=s3:/b | storage='s3:/b' must begin with s3:// to be a URL, or with
JAXKV_STORAGE=s3:/b | to be a folder. (JAXKV_STORAGE in the environment)
JAXKV_WORLD_SIZE=none {} | JAXKV_WORLD_SIZE='none' must be a whole number from 1
JAXKV_WORLD_SIZE=2.0     | JAXKV_WORLD_SIZE='2.0' must be a whole number from 1
JAXKV_DEADLINE_S=inf     | JAXKV_DEADLINE_S='inf' must be a number of seconds above 0
JAXKV_MODE=lazily {"mode": "eager"}       | JAXKV_MODE='lazily' must be one of eager,
JAXKV_MODE=lazy {"prompt_only": true}     | no request. (JAXKV_MODE in the environment)
JAXKV_SKIP_SLOW_LOADS=1 {"mode": 5}       | mode=5 must be one of eager, lazy
JAXKV_HOST_BYTES=1KiB JAXKV_NUM_HOST_BLOCKS=1 | host_bytes=1024 and num_host_blocks=1 ex
JAXKV_HOST_BYTES=1KiB JAXKV_NUM_HOST_BLOCKS=1 | (JAXKV_HOST_BYTES, JAXKV_NUM_HOST_BLOCKS
jaxkv_mode=lazy          | unknown variable jaxkv_mode: did you mean JAXKV_MODE?
JAXKVMODE=lazy           | unknown variable JAXKVMODE: did you mean JAXKV_MODE?
JAX_KV_MODE=lazy         | unknown variable JAX_KV_MODE: did you mean JAXKV_MODE?
JAXKV-MODE=lazy          | unknown variable JAXKV-MODE: did you mean JAXKV_MODE?
JAXKV__MODE=lazy         | unknown variable JAXKV__MODE: did you mean JAXKV_MODE?
"""
STANDS_FOR = {
    "SIZE": SIZE,
    "ON_EVICT": "storage_write='on_evict' needs cache_policy='lru', executor='native' "
    "and retention=False: other host tiers cannot list the blocks that they evict "
    "next.",
}


def test_a_refusal_names_the_key_and_what_would_be_right(monkeypatch):
    # Without the policies that other tests and examples have registered.
    names = ("lru", "arc", "hazard")
    builtin = {name: registry._makers[name] for name in names}
    monkeypatch.setattr(registry, "_makers", builtin)
    for row in filter(None, REFUSED.splitlines()):
        source, message = row.split("| ", 1)
        for word, text in STANDS_FOR.items():
            message = re.sub(rf"\b{word}$", text, message)
        variables, _, values = source.partition("{")
        environ = dict(word.split("=") for word in variables.split())
        explicit = json.loads("{" + (values or "}"))
        assert message in refuse(OffloadConfig.from_env, explicit, environ), row
        if not environ:
            assert message in refuse(OffloadConfig.from_dict, explicit), row
    assert "unknown key 3: choose from host" in refuse(OffloadConfig.from_dict, {3: 1})
    # Another name is not taken for a misspelt one.
    for key, name in {"cache_policy": "lfu", "compression": "int4"}.items():
        fault = refuse(OffloadConfig.from_dict, {key: name})
        assert f"{key}='{name}' must be one of " in fault
        assert "did you mean" not in fault


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(mode="x", world_size=0, deadline_s=-1)
    names = [fault.partition("=")[0] for fault in caught.value.faults]
    assert names == ["mode", "world_size", "deadline_s"]
    assert str(caught.value) == "; ".join(caught.value.faults)
    environ = {"JAXKV_HOST_BYTES": "8 GB!", "JAXKV_SKIP_SLOW_LOADS": "maybe"}
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_env({"moed": "lazy"}, environ)
    assert list(caught.value.faults) == [
        "unknown key moed: did you mean mode?",
        f"JAXKV_HOST_BYTES='8 GB!' {SIZE}",
        "JAXKV_SKIP_SLOW_LOADS='maybe' must be true or false",
    ]


def test_a_fault_keeps_the_names_of_its_settings_in_another_process():
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(mode="{x}", cache_policy="lazy=1")
    loaded = pickle.loads(pickle.dumps(caught.value))
    assert str(loaded) == str(caught.value)
    assert [fault.names for fault in loaded.faults] == [("cache_policy",), ("mode",)]
    policy, mode = (fault.renamed({"mode": "how"}) for fault in loaded.faults)
    assert mode == "how='{x}' must be one of eager, lazy"
    assert policy == loaded.faults[0]


def test_what_is_no_json_object_is_refused(tmp_path):
    path = tmp_path / "offload.json"
    twice = '{"skip_slow_loads": true, "skip_slow_loads": false}'
    nested = "this is nested too deeply to be a JSON object"
    utf_16 = [
        ('{"mode": "lazy"}'.encode(code), "this is not JSON: ")
        for code in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
    ]
    for text, message in (
        ("", "this is not JSON: Expecting value: line 1 column 1"),
        ("{'mode': 1}", "this is not JSON: "),
        ("{" * 9, "this is not JSON: "),
        ("x" * 100_000, "this is not JSON: "),
        (b"\xff\xfe\xff", "this is not JSON: "),
        *utf_16,
        ('["mode"]', "['mode'] must be a JSON object of keys and values"),
        ("null", "None must be a JSON object"),
        (json.dumps("x" * 100_000), "xxx' must be a JSON object"),
        (twice, "key skip_slow_loads occurs more than once"),
        ('{"deadline_s": NaN}', "deadline_s=nan must be"),
        *((text * 100_000, nested) for text in ("[", '{"mode": ', '{"mode": [')),
    ):
        assert message in refuse(OffloadConfig.from_json, text)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        fault = refuse(OffloadConfig.from_file, path)
        assert fault.startswith(f"{path}: ")
        assert message in fault
    for text in (None, 5, {"mode": "lazy"}, ["x" * 100_000]):
        fault = refuse(OffloadConfig.from_json, text)
        assert fault.endswith(" must be JSON, as a str or as bytes")
    with pytest.raises(FileNotFoundError):
        OffloadConfig.from_file(tmp_path / "none.json")
    path.write_bytes(b'\xef\xbb\xbf{"mode": "lazy"}')  # A byte order mark is fine.
    assert OffloadConfig.from_file(path).mode == "lazy"


def test_a_lone_surrogate_is_no_text():
    for name, value in (
        ("events_topic", "kv\ud800"),
        ("events_endpoint", "ipc:///run/\udcff"),
        ("metrics_address", "h\udcff"),
        ("mode", "\ud800"),
        ("host_bytes", "1\ud800"),
    ):
        words = f"={value!a} must be "
        assert words in refuse(OffloadConfig.from_dict, {name: value})
        assert words in refuse(OffloadConfig.from_json, json.dumps({name: value}))
        # As Python reads bytes of the environment that are not UTF-8.
        environ = {variable_of(name): value}
        assert words in refuse(OffloadConfig.from_env, {}, environ)


def test_an_unknown_name_that_cannot_be_printed_is_escaped():
    for name in ("mode\ud800", "mode\n", "mo\x1bde"):
        text = json.dumps({name: "lazy"})
        fault = f"unknown key {name!r}: did you mean mode?"
        assert refuse(OffloadConfig.from_dict, {name: "lazy"}) == fault
        assert refuse(OffloadConfig.from_json, text) == fault
        fault = f"unknown variable {variable_of(name)!r}: did you mean JAXKV_MODE?"
        assert refuse(OffloadConfig.from_env, {}, {variable_of(name): "lazy"}) == fault
        twice = f"{text[:-1]}, {text[1:]}"
        fault = f"key {name!r} occurs more than once"
        assert refuse(OffloadConfig.from_json, twice) == fault


def test_long_values_are_cut():
    for name in KEYS:
        calls = [(OffloadConfig.from_dict, {name: awkward}) for awkward in AWKWARD]
        environ = {variable_of(name): "x x" * 100_000}
        for call in (*calls, (OffloadConfig.from_env, {}, environ)):
            fault = fault_of(*call) or ""
            assert fault.isprintable(), name
            assert len(fault) < 1000, name


def test_long_names_and_what_is_no_object_are_cut():
    name = "x" * 100_000
    fault = refuse(OffloadConfig.from_dict, {name: 1})
    assert fault.startswith("unknown key xxx")
    fault = refuse(OffloadConfig.from_env, {}, {f"JAXKV_{name}": "1"})
    assert fault.startswith("unknown variable JAXKV_xxx")
    twice = f'{{"{name}": 1, "{name}": 2}}'
    assert refuse(OffloadConfig.from_json, twice).startswith("key xxx")
    fault = refuse(OffloadConfig.from_json, json.dumps([name]))
    assert fault.endswith("xxx'] must be a JSON object of keys and values")
    replay = {"events_replay_endpoint": f"ipc://{name}"}
    fault = refuse(OffloadConfig.from_dict, replay)
    assert fault.endswith("xxx' needs an events_endpoint, whose events it replays.")
    sizes = {"host_bytes": 10**5000, "num_host_blocks": 10**4000}
    assert "exclude one another" in refuse(OffloadConfig.from_dict, sizes)


def test_a_secret_is_shown_to_nobody():
    values = {"storage": "kv", "storage_secret": "0123456789abcdef"}
    assert "0123456789" not in repr(OffloadConfig.from_dict(values))
    values["storage_secret"] = "0123456789"
    fault = refuse(OffloadConfig.from_dict, values)
    assert "0123456789" not in fault
    assert fault.endswith("must be a text of at least 16 bytes, or None")
    # White space around it counts in no way of giving it.
    spaced = {"storage": "kv", "storage_secret": " 0123456789abcdef\n"}
    environ = {"JAXKV_STORAGE_SECRET": spaced["storage_secret"]}
    for config in (
        OffloadConfig.from_dict(spaced),
        OffloadConfig.from_json(json.dumps(spaced)),
        OffloadConfig.from_env({"storage": "kv"}, environ),
    ):
        assert config.storage_secret == "0123456789abcdef"
    url = "redis://:hunter2@host"
    for name in ("storage", "storage_secret"):
        for value in (url.encode(), [url], {"url": url}, {url}, Path(url)):
            fault = refuse(OffloadConfig.from_dict, {name: value})
            assert fault.startswith(f"{name}=<{type(value).__name__}> must be ")


def test_an_empty_secret_is_refused_where_it_would_leave_a_store_unsealed():
    for text in ("", "  ", "None", "\n"):
        environ = {"JAXKV_STORAGE_SECRET": text}
        for explicit, added in (({"storage": "kv"}, {}), ({}, {"JAXKV_STORAGE": "kv"})):
            fault = refuse(OffloadConfig.from_env, explicit, environ | added)
            assert fault.startswith("JAXKV_STORAGE_SECRET is set but empty")
        # In code it is chosen.
        for secret in (None, "0123456789abcdef"):
            chosen = {"storage": "kv", "storage_secret": secret}
            assert OffloadConfig.from_env(chosen, environ).storage_secret == secret
            chosen["storage_secret"] = text
            assert "must be a text of at" in refuse(OffloadConfig.from_dict, chosen)


def test_text_that_is_nearly_a_file_or_an_address_is_refused():
    for name in ("policy_state", "record", "record_key_file"):
        for text in ("~/x", "$HOME/x", '"/x"', "/x\n", " /x", "/x ", "file:///x"):
            fault = refuse(OffloadConfig.from_dict, {name: text})
            assert fault.startswith(f"{name}={text!r} must be a file name without")
        assert getattr(OffloadConfig(**{name: "./~"}), name) == "./~"
    for text in ("127.0.0.1:9090", "http://localhost", "[::1]", "*"):
        fault = refuse(OffloadConfig.from_dict, {"metrics_address": text})
        assert fault.startswith(f"metrics_address={text!r} must be a host or an")
    for text in ("localhost", "::", "fe80::1%eth0", "0.0.0.0"):
        assert OffloadConfig(metrics_address=text).metrics_address == text


def open_url(url):
    with contextlib.closing(open_store(url)) as store:
        return store.url


def shown_by(make, *args):
    try:
        return repr(make(*args))
    except (ValueError, StoreError, ImportError) as error:
        return str(error)


PASSWORDS = """
redis://me:{}@host:6379/0
rediss://:{}/?@host
redis://host?username=me&password={}
unix://me:{}@/run/redis.sock
s3://me:{}@bucket/kv?region=eu
s3://bucket/kv?endpoint=https://me:{}@host
s3://bucket/kv?endpoint=https%3A%2F%2Fme%3A{}%40host
https://me:{}@host/kv
 redis://:{}@host
"""


def test_a_password_in_a_url_is_shown_to_nobody():
    for line in PASSWORDS.strip("\n").splitlines():
        url = line.format("hunter2")
        texts = [repr(DemoConfig(storage=url))]
        for added in ({}, {"world_size": 2}, {"storage_bytes": 0}):
            values = {"storage": url, **added}
            environ = {variable_of(name): str(value) for name, value in values.items()}
            texts.append(shown_by(OffloadConfig.from_dict, values))
            texts.append(shown_by(OffloadConfig.from_env, {}, environ))
        texts.append(shown_by(open_url, url))
        assert "hunter2" not in " ".join(texts), line
        assert "storage='" in texts[1] or "storage='" in texts[2], line
    url = PASSWORDS.split()[0]
    assert OffloadConfig(storage=url).to_dict()["storage"] == url
    plain = repr(OffloadConfig(storage="s3://bucket/kv?region=eu"))
    assert "storage='s3://bucket/kv?region=eu', " in plain
    assert "storage_secret" not in plain


def make_pool(num_blocks=16, block_size=4):
    return {"k": jnp.zeros((num_blocks, block_size, 2, 8)), "v": jnp.zeros((16, 4, 2))}


@pytest.fixture
def arguments(monkeypatch):
    """The arguments of the scheduler and the worker that were made last."""
    arguments = {}
    for name in ("OffloadScheduler", "OffloadWorker"):
        part = getattr(config_module, name)

        def make(*args, name=name, part=part, **options):
            bound = inspect.signature(part.__init__).bind(None, *args, **options)
            arguments[name] = bound.arguments
            return part(*args, **options)

        monkeypatch.setattr(config_module, name, make)
    return arguments


def test_the_parts_are_made_as_it_says(arguments):
    config = OffloadConfig(
        **{"host_bytes": "1MiB", "cache_policy": "arc", "skip_slow_loads": True},
        **{"max_blocks_in_flight": 8, "transfer_mode": "staged", "deadline_s": 1},
        **{"transfer_kernel": "dma", "extent_bytes": "32KiB", "enable_events": True},
    )
    engine, scheduler, _ = config.connect(make_pool(), 4)
    assert arguments["OffloadWorker"]["engine"] is engine
    assert (engine.mode, engine.kernel) == ("staged", "dma")
    assert 31 << 15 <= engine.host_bytes <= 1 << 20
    assert scheduler.num_host_blocks == engine.num_host_blocks
    assert scheduler.groups == (FullAttention(4),)
    assert scheduler.rules == OffloadRules(
        max_blocks_in_flight=8, skip_slow_loads=True, block_bytes=engine.block_bytes
    )
    options = arguments["OffloadScheduler"]
    assert (options["cache_policy"], options["enable_events"]) == ("arc", True)
    assert arguments["OffloadWorker"]["deadline_s"] == 1.0


def test_the_clock_of_the_policy_reaches_the_scheduler(arguments):
    config = OffloadConfig(num_host_blocks=8, retention=True)
    clock = lambda: 1.0  # noqa: E731
    config.connect(make_pool(), 4, policy_clock=clock)
    assert arguments["OffloadScheduler"]["policy_clock"] is clock


def test_parts_are_made_by_themselves_and_with_large_compressed_blocks():
    config = OffloadConfig(num_host_blocks=5, mode="lazy", max_num_batched_tokens=64)
    scheduler = config.make_scheduler([FullAttention(4), SlidingWindow(4, 16)])
    assert (scheduler.num_host_blocks, scheduler.rules.mode) == (5, "lazy")
    assert config.make_scheduler(4, 9).num_host_blocks == 9
    with pytest.raises(ValueError, match="num_host_blocks=None must be a number, as"):
        OffloadConfig().make_scheduler(4)
    with pytest.raises(ValueError, match="set the size of the host tier, such as host"):
        OffloadConfig().make_engine(make_pool())
    with pytest.raises(ValueError, match="skip_slow_loads=True needs block_bytes"):
        OffloadConfig(skip_slow_loads=True).make_scheduler(4, 9)
    large = {"num_host_blocks": 6, "blocks_per_host_block": 2}
    config = OffloadConfig(**large, compression="int8", skip_slow_loads=True)
    engine, scheduler, _ = config.connect(make_pool(), 4, head_axis={"k": 2, "v": None})
    assert engine.num_host_blocks == scheduler.num_host_blocks == 6
    assert engine.blocks_per_host_block == scheduler.rules.blocks_per_host_block == 2
    assert scheduler.rules.block_bytes * 2 == engine.block_bytes
    assert (
        engine.host_bytes < OffloadConfig(**large).make_engine(make_pool()).host_bytes
    )


def test_what_does_not_suit_the_model_is_refused_before_memory_is_taken(monkeypatch):
    def make_engine(*args, **kwargs):
        raise AssertionError("made")

    monkeypatch.setattr(OffloadConfig, "make_engine", make_engine)
    config = OffloadConfig(num_host_blocks=6, blocks_per_host_block=2)
    with pytest.raises(ValueError, match="blocks_per_host_block=2 needs a model with"):
        config.connect(make_pool(), [FullAttention(4), SlidingWindow(4, 16)])


def test_a_store_is_let_go_where_the_parts_are_refused(tmp_path):
    before = set(threading.enumerate())
    for values, message in (
        ({"storage_bytes": 200}, "storage_bytes=200 must be at least"),
        ({"record": "/dev/null/no/file"}, "no/file"),
    ):
        store = str(tmp_path / "kv")
        config = OffloadConfig(num_host_blocks=6, storage=store, **values)
        with pytest.raises((ValueError, OSError), match=message):
            config.connect(make_pool(), 4)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before


def test_events_and_metrics_are_served_where_it_says(arguments):
    config = OffloadConfig(
        num_host_blocks=8,
        events_endpoint="tcp://127.0.0.1:*",
        events_replay_endpoint="tcp://127.0.0.1:*",
        events_topic="kv@pod@model",
    )
    scheduler = config.make_scheduler(4)
    assert arguments["OffloadScheduler"]["enable_events"]
    with config.make_publisher(4) as publisher:
        address = publisher.endpoint, publisher.replay_endpoint
        with EventSubscriber(*address, "kv@pod@model", start_seq=0) as subscriber:
            publisher.publish([stored(b"a")])
            subscriber.catch_up()
            _, batch = subscriber.receive(timeout_s=10.0)
    assert [event.medium for event in batch.events] == ["CPU"]
    assert OffloadConfig().make_publisher(4) is None

    port = free_port()
    with contextlib.closing(OffloadConfig(metrics_port=port).serve_metrics(scheduler)):
        assert "kv_offload_host_blocks" in get(port)
        # A port that is taken leaves nothing behind.
        another, labels = config.make_scheduler(4), {"engine": "1"}
        with pytest.raises(OSError, match=f"cannot serve metrics at 127.0.0.1:{port}"):
            OffloadConfig(metrics_port=port).serve_metrics(another, labels=labels)
    assert OffloadConfig().serve_metrics(scheduler) is None
    for number in ("0", "1"):  # Of the closed ones the registry has no sample.
        name, labels = "jaxkv:kv_offload_host_blocks", {"engine": number}
        assert REGISTRY.get_sample_value(name, labels) is None


def test_one_line_says_at_the_start_what_there_is_without_secrets(caplog, tmp_path):
    config = OffloadConfig(
        num_host_blocks=4,
        storage=f"file://{tmp_path}/kv",
        storage_secret="0123456789abcdef",
        storage_bytes="1MiB",
        metrics_port=9400,
        events_endpoint="tcp://127.0.0.1:5557",
    )
    with caplog.at_level(logging.INFO, "jaxkv"):
        connected = config.connect({"kv": jnp.zeros((4, 16))}, 16)
    connected.worker.storage.close()
    [line] = [record.getMessage() for record in caplog.records]
    for words in (
        "offloading to 4 host blocks of 64 B, ",
        "mode fused; policy lru, executor native; storage ",
        f"{tmp_path}/kv for 4,096 blocks of 256 B, ",
        "written on_reuse",
        "metrics at 127.0.0.1:9400, events at tcp://127.0.0.1:5557",
    ):
        assert words in line
    assert "0123456789abcdef" not in line
    with caplog.at_level(logging.INFO, "jaxkv"):
        OffloadConfig(num_host_blocks=4).connect({"kv": jnp.zeros((4, 16))}, 16)
    line = caplog.records[-1].getMessage()
    assert line.endswith("; no storage; no metrics or events port is open")


def test_a_store_that_is_down_at_the_start_is_told_in_an_engine_of_ones_own(caplog):
    pytest.importorskip("redis")
    url = f"redis://me:secret@127.0.0.1:{free_port()}"
    config = OffloadConfig(num_host_blocks=4, storage=url, storage_bytes="1MiB")
    connected = config.connect({"kv": jnp.zeros((4, 16))}, 16)
    wait_for(lambda: connected.worker.poll() and caplog.records)
    connected.worker.storage.close()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "fails: list unreachable (ConnectionError: " in record.getMessage()
    assert "secret" not in record.getMessage()


def test_the_store_gets_its_own_settings_and_no_others(monkeypatch):
    passed = {}

    def open_storage(engine, url, **named):
        passed.update(named, url=url)
        return SimpleNamespace(storage_io=SimpleNamespace())

    monkeypatch.setattr(config_module, "open_storage", open_storage)
    settings = OffloadConfig(
        storage="kv",
        storage_owner=True,
        storage_label="llama",
        deadline_s=1.0,
        storage_deadline_s=2.0,
        storage_await_s=3.0,
        storage_list_s=4.0,
        max_storage_blocks=5,
    )
    storage = settings.open_storage(None, namespace=b"model", num_blocks=6)
    assert storage.bound == (6, True)
    assert storage.storage_io.label == "llama"
    passed.pop("clock")
    assert passed == {
        "url": "kv",
        "namespace": b"model",
        "secret": None,
        "shard": 0,
        "num_shards": 1,
        "deadline_s": 2.0,
        "await_s": 3.0,
        "list_every_s": 4.0,
        "max_blocks": 5,
    }


def test_of_several_processes_the_first_records(monkeypatch, tmp_path):
    settings = OffloadConfig(record=str(tmp_path / "trace.jsonl"))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    for process, records in ((1, False), (0, True)):
        monkeypatch.setattr(jax, "process_index", lambda number=process: number)
        recorder = settings.make_recorder()
        assert (recorder is not None) == records
        if recorder is not None:
            recorder.close()


def test_a_store_is_closed_where_its_worker_is_refused(monkeypatch):
    closed = []

    def refuse(*_, **__):
        raise ValueError("refused")

    monkeypatch.setattr(config_module, "OffloadWorker", refuse)
    storage = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(ValueError, match="refused"):
        OffloadConfig().make_worker(None, storage=storage)
    assert closed

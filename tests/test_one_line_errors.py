"""What is refused is told in one short line, at every public door."""

import gzip
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from jaxkv import (
    DeviceBlockPool,
    Extras,
    KeyChain,
    MultimodalItem,
    Namespace,
    OffloadConfig,
    OffloadingManager,
    OffloadRules,
    OffloadScheduler,
    SchedulerOutput,
    TransferEngine,
    get_policy_maker,
    make_lru,
    register_policy,
)
from jaxkv.config import ConfigError
from jaxkv.integrations.jetstream import PrefixCache
from jaxkv.keys.hashing import block_key
from jaxkv.observe.metrics import OffloadMetrics
from jaxkv.observe.subscriber import EventSubscriber
from jaxkv.policies import registry
from jaxkv.tools import main as cli
from jaxkv.tools.replay.traces import TraceError, read_trace

ROOT = pathlib.Path(__file__).parent.parent
LONG = "x" * 100_000
DEEP = "[" * 100_000
SURROGATE = "\ud800"
MOST = 1000  # Characters of an error; what there is is listed in some.
SPACE = Namespace("model", "0", "int8", "flat", 2)

AWKWARD = [
    *(LONG, SURROGATE, "two\nlines", "\x00", "\x1b[31m", ""),
    *(10**400, -(10**5000), float("nan"), float("inf")),
    *(None, True, b"\xff" * 100_000, [[[]]], {}, np.ma.masked, object()),
    *(np.zeros((300, 300)), np.arange(2000.0), [LONG] * 3, [1.5] * 100_000),
]


def check_line(text):
    """One line, not long, that any stream can print."""
    text = text.removesuffix("\n")
    assert len(text.splitlines()) == 1, text[:500]
    assert len(text) < MOST, text[:500]
    text.encode()
    assert text.isprintable(), text


def line(**fields):
    request = {"timestamp": 0, "input_length": 1024, "output_length": 1}
    return json.dumps({**request, "hash_ids": [0, 1], **fields})


TRACES = {
    "a timestamp of 400 digits": line(timestamp=10**400),
    "a timestamp of 5,000 digits": line(timestamp=7).replace("7", "7" * 5000),
    "an infinite timestamp": line(timestamp=float("inf")),
    "a timestamp of 1e308": line(timestamp=1e308),
    "a length of 400 digits": line(input_length=10**400),
    "deep nesting": DEEP,
    "a deep field": line(hash_ids=7).replace("7", DEEP),
    "a long text": line(timestamp=LONG),
    "a long name": json.dumps({LONG: 0}),
    "a surrogate": line(timestamp=SURROGATE),
    "null": "null",
    "control characters": '{"\x1b[31m": 0}',
    "a text for ids": line(hash_ids=LONG),
}


@pytest.mark.parametrize("text", TRACES.values(), ids=TRACES.keys())
def test_traces(text, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    check_line(str(caught.value))
    assert cli.main(["replay", str(path)]) == 2
    out, err = capsys.readouterr()
    check_line(err)
    assert out == ""


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_in_utf_16_is_taken_for_utf_8(encoding, packed, tmp_path):
    path = tmp_path / "trace.jsonl"
    data = (line() + "\n").encode(encoding)
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(TraceError, match="is not UTF-8 text") as caught:
        read_trace(path)
    check_line(str(caught.value))


def test_a_mark_of_utf_8_is_no_fault(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(line() + "\n", encoding="utf-8-sig")
    assert read_trace(path).num_requests == 1
    assert OffloadConfig.from_json(b'\xef\xbb\xbf{"mode": "lazy"}').mode == "lazy"


def test_a_file_name_of_two_lines_is_one_line(tmp_path, capsys):
    for name in ("two\nlines", "\x1b[31m", os.fsdecode(b"\xff\xfe")):
        path = tmp_path / name
        path.write_text("null\n", encoding="utf-8")
        for args in ([str(path)], [str(path / "below")]):
            assert cli.main(["replay", *args]) == 2
            check_line(capsys.readouterr().err)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_configuration_in_utf_16_is_taken_for_utf_8(encoding, tmp_path):
    """json.loads guesses the encoding of bytes; they were documented as UTF-8."""
    data = '{"mode": "lazy"}'.encode(encoding)
    with pytest.raises(ConfigError, match="this is not JSON") as caught:
        OffloadConfig.from_json(data)
    check_line(str(caught.value))
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"config\.json: this is not") as caught:
        OffloadConfig.from_file(path)
    check_line(str(caught.value))


@pytest.mark.parametrize(
    "text",
    [None, 7, DEEP, '{"mode": ' + DEEP, LONG, b"\xff", "null", f'"{LONG}"', "{" * 9],
    ids=range(9),
)
def test_json_of_a_configuration(text):
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_json(text)
    check_line(str(caught.value))


@pytest.mark.parametrize("value", AWKWARD, ids=range(len(AWKWARD)))
@pytest.mark.parametrize("key", [*OffloadConfig().to_dict()])
def test_values_of_a_configuration(key, value):
    try:
        OffloadConfig.from_dict({key: value})
    except ConfigError as error:
        check_line(str(error))


@pytest.mark.parametrize("name", [LONG, SURROGATE, "two\nlines", "", "\x1b[31m"])
def test_unknown_keys_of_a_configuration(name):
    with pytest.raises(ConfigError, match="unknown key") as caught:
        OffloadConfig.from_dict({name: 1})
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    text.encode()
    assert len(text) < 2 * MOST  # There is a list of all keys.
    with pytest.raises(ConfigError, match="unknown variable"):
        OffloadConfig.from_env(environ={f"JAXKV_{name}!": "1"})


OPTIONS = [
    *(["plan", "a", "--model", each] for each in (LONG, SURROGATE, "two\nlines")),
    *(["plan", "a", "--" + each, LONG] for each in ("host", "kv-dtype", "mfu")),
    *(["plan", "a", "--kv-bytes-per-token", LONG], ["plan", "a", "--load-gb", LONG]),
    *(["replay", LONG], ["replay", "synthetic:" + LONG], ["replay", SURROGATE]),
    *(["replay", "synthetic", "--policy", LONG], [LONG], ["--" + LONG]),
    *(["replay", "synthetic", "--capacity", LONG], ["replay", "a", LONG]),
    *(["replay", "synthetic", "--block-size", LONG], ["bench", LONG]),
    *(["bench", "transfer", "--sizes", LONG], ["bench", "transfer", "--mode", LONG]),
    *(
        ["bench", "transfer", "--designs", SURROGATE],
        ["bench", "transfer", "--" + LONG],
    ),
    *(["bench", "storage", LONG], ["bench", "storage", "s3://" + LONG]),
    *(["bench", "storage", SURROGATE], ["bench", "storage", "redis://" + LONG]),
    *(
        ["bench", "storage", "two\nlines"],
        ["bench", "storage", "x", "--per-round", LONG],
    ),
    *(["bench", "storage", "a" * 1000], ["bench", "storage", "s3://" + "a" * 1000]),
    *(
        ["demo", "--host-bytes", LONG],
        ["demo", "--json", LONG],
        ["demo", "--plot", LONG],
    ),
    *(["demo", "--mode", LONG], ["demo", "--layers", LONG], ["demo", "--seed", LONG]),
    *(["doctor", "--need", LONG], ["doctor", "--host-bytes", SURROGATE]),
    *(["replay", "two\nlines"], ["demo", "two\nlines"], ["two\nlines"]),
    *(["demo", "--policy", "\x1b[31m"], ["demo", "--json", "two\nlines/a"]),
    *(["demo", "--seed=" + LONG], ["doctor", "--json", "/"], ["demo", "--h"]),
]


@pytest.mark.parametrize("args", OPTIONS, ids=range(len(OPTIONS)))
def test_options_of_the_command_line(args, capsys):
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    check_line(err)
    assert err.startswith("jaxkv")
    assert out == ""


def scheduler_of_four():
    scheduler = OffloadScheduler(2, 4)
    scheduler.bind_device_block_pool(DeviceBlockPool(4))
    return scheduler


def with_request(method, *args):
    """Call a method of a scheduler about a request of four tokens."""
    keys = KeyChain(SPACE).extend(range(4))
    request = SimpleNamespace(
        request_id="r", num_tokens=4, num_computed_tokens=0, block_keys=keys
    )
    return getattr(scheduler_of_four(), method)(request, *args)


DOORS = {
    "a policy": lambda value: get_policy_maker(value),
    "a mode": lambda value: OffloadRules(mode=value),
    "a model": lambda value: Namespace(value, "0", "int8", "flat", 2),
    "a block size": lambda value: Namespace("m", "0", "int8", "flat", value),
    "a salt": lambda value: Extras(cache_salt=value),
    "an item": lambda value: Extras(multimodal=(value,)),
    "a hash": lambda value: MultimodalItem(value, 0),
    "an offset": lambda value: MultimodalItem(b"hash", value),
    "a token": lambda value: KeyChain(SPACE).extend([value]),
    "tokens": lambda value: KeyChain(SPACE).extend([1, 2, 3, value]),
    "an executor": lambda value: OffloadingManager(16, 4, executor=value),
    "a cache policy": lambda value: OffloadScheduler(16, 4, value),
    "a key to load": lambda value: OffloadingManager(16, 4).prepare_load([value]),
    "a key to find": lambda value: DeviceBlockPool(4).find([value]),
    "a parent": lambda value: block_key(SPACE, 0, value, [1, 2]),
    "block ids": lambda value: DeviceBlockPool(4).pin(value),
    "a block id": lambda value: DeviceBlockPool(4).pin([value]),
    "groups": lambda value: OffloadScheduler(value, 4),
    "a name to register": lambda value: register_policy(value, make_lru),
    "a flag of rules": lambda value: OffloadRules(prompt_only=value),
    "a number of rules": lambda value: OffloadRules(max_unseen_blocks=value),
    "a block table": lambda value: with_request("update_state_after_alloc", value, 0),
    "an id in it": lambda value: with_request("update_state_after_alloc", [value], 0),
    "new blocks": lambda value: scheduler_of_four().build_connector_meta(
        SchedulerOutput({}, {"r": value})
    ),
    "tokens at hand": lambda value: with_request("get_num_new_matched_tokens", value),
    "tokens to explain": lambda value: with_request("explain", value),
    "a namespace": lambda value: KeyChain(value),
    "extras": lambda value: KeyChain(SPACE, value),
    "a retention": lambda value: OffloadingManager(16, 4, retention=True).retain(
        [b"k"], value, 0
    ),
    "a time to wait": lambda value: EventSubscriber(replay_timeout_s=value).close(),
    "a label": lambda value: OffloadMetrics(
        OffloadScheduler(16, 4), registry=CollectorRegistry(), labels={"e": value}
    ),
    "axes of tokens": lambda value: PrefixCache(
        block_size=2, extras_of=None, num_host_blocks=4, sequence_axes=value
    ),
    "a size of staging": lambda value: TransferEngine(
        {"k": np.zeros(1)}, 4, staging_bytes=value
    ),
}


@pytest.mark.parametrize("value", AWKWARD, ids=range(len(AWKWARD)))
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS.keys())
def test_arguments_of_public_parts(monkeypatch, door, value):
    # Some of these names are taken.
    monkeypatch.setattr(registry, "_makers", dict(registry._makers))
    try:
        door(value)
    except (ValueError, TypeError) as error:
        check_line(str(error))


def test_a_record_callback_that_raises_loses_the_rest():
    """Keys of the blocks before it were kept, their tokens and all others lost."""
    recorded, fails = [], [True]

    def record(block):
        if len(recorded) == 2 and fails.pop():
            raise RuntimeError("the catalog is gone")
        recorded.append(block.key)

    chain, plain = KeyChain(SPACE, record=record), KeyChain(SPACE)
    tokens = [*range(9)]
    with pytest.raises(RuntimeError, match="the catalog is gone"):
        chain.extend(tokens)
    assert (chain.num_tokens, list(chain.keys)) == (0, [])
    recorded.clear()
    fails.append(False)
    assert chain.extend(tokens) == plain.extend(tokens)
    assert chain.extend([9]) == plain.extend([9])
    assert (chain.num_tokens, chain.keys) == (plain.num_tokens, plain.keys)
    assert recorded == plain.keys


def test_masks_are_dropped_silently():
    """Hidden tokens were hashed, and hidden blocks moved, as what lies beneath."""
    masked = np.ma.array([1, 2, 3, 4], mask=[0, 1, 0, 0])
    open_one = np.ma.array([1, 2, 3, 4])
    assert KeyChain(SPACE).extend(open_one) == KeyChain(SPACE).extend([1, 2, 3, 4])
    for bad in (masked, [1, np.ma.masked]):
        chain = KeyChain(SPACE)
        with pytest.raises(TypeError, match=r"masked|integer"):
            chain.extend(bad)
        assert chain.num_tokens == 0
    pool = DeviceBlockPool(8)
    pool.allocate(5)
    with pytest.raises(TypeError, match="must not be masked"):
        pool.free(masked)
    assert pool.num_free == 2
    arrays = {"k": np.zeros((8, 4), np.float32)}
    import jax.numpy as jnp

    device = {"k": jnp.asarray(arrays["k"])}
    engine = TransferEngine(device, 8)
    for ids in ((masked, [0, 1, 2, 3]), ([0, 1, 2, 3], masked)):
        with pytest.raises(ValueError, match="must not be masked"):
            engine.save(device, *ids)
    assert engine.num_in_flight == 0


@pytest.mark.parametrize(
    "environment",
    [
        {"COLUMNS": "5", "PYTHONIOENCODING": "ascii", "LANG": "C", "LC_ALL": "C"},
        {"COLUMNS": "-7", "PYTHONIOENCODING": "ascii"},
        {"COLUMNS": "many", "PYTHONUTF8": "0", "LC_ALL": "C"},
    ],
    ids=["5", "-7", "many"],
)
def test_replay_prints_all_figures_whatever_the_terminal(environment):
    """In ASCII it ended in a traceback; with COLUMNS=5 the figures were gone."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jaxkv.tools.main"),
            *("replay", "synthetic:200", "--policy", "lru", "--capacity", "10%"),
        ],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    out = done.stdout.decode("ascii")
    for wanted in ("Capacity, blocks", "Prefix tokens found", "optimum (ceiling)"):
        assert wanted in out
    assert out.count("%") >= 5
    for each in done.stderr.decode("ascii").splitlines():
        assert each.endswith(" ...")

"""Refusals of every public entry point are one short printable line."""

import os
import re

import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from jaxkv import (
    DeviceBlockPool,
    Extras,
    KeyChain,
    MultimodalItem,
    Namespace,
    OffloadingManager,
    OffloadRules,
    OffloadScheduler,
    TransferEngine,
    get_policy_maker,
    make_lru,
    register_policy,
)
from jaxkv.observe.metrics import OffloadMetrics
from jaxkv.policies import registry
from jaxkv.tools import main as cli
from tests.rigs import children
from tests.rigs.command_line import LAUNCHER, run_command
from tests.rigs.refusals import AWKWARD, LONG, SURROGATE, is_short_line

SPACE = Namespace("model", "0", "int8", "flat", 2)


def check_line(text):
    assert is_short_line(text.removesuffix("\n")), text[:500]


def test_the_name_of_a_file_of_two_lines_is_shown_in_one(tmp_path, capsys):
    for name in ("two\nlines", "\x1b[31m", os.fsdecode(b"\xff\xfe")):
        path = tmp_path / name
        path.write_text("null\n", encoding="utf-8")
        for arg in (str(path), str(path / "below")):
            assert cli.main(["plan", arg]) == 2
            check_line(capsys.readouterr().err)


OPTIONS = [
    *(["plan", "a", "--model", value] for value in (LONG, SURROGATE, "two\nlines")),
    *(["plan", "a", "--" + word, LONG] for word in ("host", "kv-dtype", "mfu")),
    *(["plan", "a", "--kv-bytes-per-token", LONG], ["plan", "a", "--load-gb", LONG]),
    *(["plan", LONG], ["plan", "synthetic:" + LONG], ["plan", SURROGATE]),
    *(["plan", "synthetic", "--policy", LONG], [LONG], ["--" + LONG]),
    *(["plan", "synthetic", "--capacity", LONG], ["plan", "a", LONG]),
    *(["plan", "synthetic", "--block-size", LONG], ["store", LONG]),
    *(["store", "ls", url] for url in (LONG, "s3://" + LONG, "memory://" + LONG)),
    *(["store", "ls", url] for url in (SURROGATE, "two\nlines", "a" * 1000)),
    *(["store", "ls", "s3://" + "a" * 1000], ["demo", "--seed=" + LONG]),
    *(["verify", option, LONG] for option in ("--only", "--budget")),
    *(["demo", "--" + word, LONG] for word in ("host-bytes", "json", "plot", "mode")),
    *(["demo", "--" + word, LONG] for word in ("layers", "seed")),
    *(["doctor", "--need", LONG], ["doctor", "--host-bytes", SURROGATE]),
    *(["plan", "two\nlines"], ["demo", "two\nlines"], ["two\nlines"]),
    *(["demo", "--policy", "\x1b[31m"], ["demo", "--json", "two\nlines/a"]),
    *(["doctor", "--json", "/"], ["demo", "--h"]),
]


def test_an_option_of_the_command_line_is_refused_in_one_line(capsys):
    for args in OPTIONS:
        assert cli.main(args) == 2, str(args)[:200]
        out, err = capsys.readouterr()
        check_line(err)
        assert err.startswith("jaxkv")
        assert out == ""


ENTRY_POINTS = {
    "a policy": lambda value: get_policy_maker(value),
    "a mode": lambda value: OffloadRules(mode=value),
    "a salt": lambda value: Extras(cache_salt=value),
    "an item": lambda value: Extras(multimodal=(value,)),
    "a hash": lambda value: MultimodalItem(value, 0),
    "an offset": lambda value: MultimodalItem(b"hash", value),
    "a token": lambda value: KeyChain(SPACE).extend([value]),
    "tokens": lambda value: KeyChain(SPACE).extend([1, 2, 3, value]),
    "an executor": lambda value: OffloadingManager(16, 4, executor=value),
    "a cache policy": lambda value: OffloadScheduler(16, 4, value),
    "groups": lambda value: OffloadScheduler(value, 4),
    "a name to register": lambda value: register_policy(value, make_lru),
    "a flag of rules": lambda value: OffloadRules(prompt_only=value),
    "a number of rules": lambda value: OffloadRules(max_unseen_blocks=value),
    "a label": lambda value: OffloadMetrics(
        OffloadScheduler(16, 4), registry=CollectorRegistry(), labels={"e": value}
    ),
    "a size of staging": lambda value: TransferEngine(
        {"k": np.zeros(1)}, 4, staging_bytes=value
    ),
}


def test_arguments_of_public_parts_are_refused_in_one_line(monkeypatch):
    # register_policy accepts some of these names.
    monkeypatch.setattr(registry, "_makers", dict(registry._makers))
    for name, call in ENTRY_POINTS.items():
        for number, value in enumerate(AWKWARD):
            try:
                call(value)
            except (ValueError, TypeError) as error:
                message = str(error)
            except BaseException as error:
                error.add_note(f"{name}, value {number}")
                raise
            else:
                continue
            check_line(message)


def test_a_record_callback_that_raises_leaves_its_chain_unchanged():
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


def test_masked_arrays_are_refused():
    masked = np.ma.array([1, 2, 3, 4], mask=[0, 1, 0, 0])
    unmasked = np.ma.array([1, 2, 3, 4])
    assert KeyChain(SPACE).extend(unmasked) == KeyChain(SPACE).extend([1, 2, 3, 4])
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
    device = {"k": jnp.zeros((8, 4))}
    engine = TransferEngine(device, 8)
    for ids in ((masked, [0, 1, 2, 3]), ([0, 1, 2, 3], masked)):
        with pytest.raises(ValueError, match="must not be masked"):
            engine.save(device, *ids)
    assert engine.num_in_flight == 0


def test_plan_prints_all_figures_whatever_the_terminal():
    line = "plan synthetic:200 --policy lru,optimum --capacity 10%"
    c_locale = {"LANG": "C", "LC_ALL": "C"}
    ascii_only = c_locale | {"COLUMNS": "5", "PYTHONIOENCODING": "ascii"}
    # A forked process chooses no encoding, but it reads the width of its terminal.
    text = "import sys\nfor stream in (sys.stdout, sys.stderr):\n"
    text += f"    stream.reconfigure(encoding='ascii')\n{LAUNCHER[2]}"
    of_any_width = os.environ | c_locale | {"COLUMNS": "many"}
    for done in (
        run_command(line, env=os.environ | ascii_only, text=True, encoding="ascii"),
        children.run("-c", text, *line.split(), env=of_any_width),
    ):
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout.isascii()
        for wanted in ("Host memory, blocks", "Tokens found", "optimum (ceiling)"):
            assert wanted in done.stdout
        assert done.stdout.count("%") >= 4
        for progress in done.stderr.splitlines():
            assert re.fullmatch(r".* \.\.\.( \d+%)*", progress)

"""Adapters that are loaded again, under the name and the path that they had."""

import os
from functools import reduce
from types import SimpleNamespace

import jax
import pytest

from jaxkv.integrations.vllm import adapters
from jaxkv.integrations.vllm.adapters import Adapters
from jaxkv.integrations.vllm.config import ConnectorConfig
from jaxkv.integrations.vllm.pool import MARK_BYTES
from jaxkv.integrations.vllm.worker import WorkerHalf, WorkerReport
from tests.integrations.test_vllm import (
    TOKENS,
    ask,
    forget_device,
    hold_reports,
    separate_halves,
)
from tests.rigs import fake_vllm
from tests.rigs.fake_engine import Engine, reference
from tests.rigs.fake_vllm import BLOCK_SIZE, Request, make_configs

WEIGHTS = "adapter_model.safetensors"


def write(folder, content=b"1" * 100):
    """Write an adapter of a fixed size and time."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / WEIGHTS).write_bytes(content)
    os.utime(folder / WEIGHTS, ns=(10**18, 10**18))
    return folder


def lora_of(folder, number=1, name="policy", **options):
    fields = {"load_inplace": False} | options
    return SimpleNamespace(
        adapter_id=number,
        lora_int_id=number,
        name=name,
        lora_name=name,
        lora_path=str(folder),
        **fields,
    )


@pytest.fixture(params=[False, True], ids=["host alone", "with a store"])
def marks(request):
    return Adapters(has_storage=request.param)


@pytest.fixture
def settled(monkeypatch):
    """Count a file as settled right after it is written."""
    monkeypatch.setattr(adapters, "_TICK_NS", -(10**15))


def test_other_weights_at_the_same_path_have_another_mark(marks, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(write(tmp_path / "one"))
    write(tmp_path / "two", b"3" * 100)
    lora = lora_of(link)
    found_marks = [marks.mark(lora)]
    assert len(found_marks[0]) == MARK_BYTES
    assert marks.mark(lora) == found_marks[0]
    for content in (b"2" * 100, b"1" * 101):
        write(tmp_path / "one", content)
        found_marks.append(marks.mark(lora))
    link.unlink()
    link.symlink_to(tmp_path / "two")
    found_marks.append(marks.mark(lora))
    assert len({*found_marks, None}) == 5


@pytest.mark.usefixtures("settled")
def test_a_rewrite_of_the_same_size_and_time_has_another_mark(marks, tmp_path):
    """The marks read only samples of long files."""
    lora = lora_of(write(tmp_path / "one", bytes(1 << 21)))
    first = marks.mark(lora)
    content = bytearray(1 << 21)
    content[6000] = 1  # Between two samples.
    write(tmp_path / "one", content)
    assert marks.mark(lora) not in (None, first)


def test_a_rewrite_within_a_tick_of_the_files_clock_has_another_mark(
    marks, tmp_path, monkeypatch
):
    lora = lora_of(write(tmp_path / "one"))
    stamp = adapters._stamp(tmp_path / "one")
    monkeypatch.setattr(adapters, "_stamp", lambda path: stamp)
    first = marks.mark(lora)
    write(tmp_path / "one", b"2" * 100)
    assert marks.mark(lora) not in (None, first)


@pytest.mark.usefixtures("settled")
def test_files_that_stay_are_read_once(marks, tmp_path, monkeypatch):
    lora = lora_of(write(tmp_path / "one"))
    first = marks.mark(lora)
    monkeypatch.delattr(adapters.weights, "describe_weights")
    assert marks.mark(lora) == first


def test_weights_of_the_hub_are_known_by_their_commit(marks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    lora = lora_of("org/policy")
    assert marks.mark(lora) is None
    repository, commit_marks = tmp_path / "models--org--policy", []
    (repository / "refs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    for commit in ("a" * 40, "b" * 40, "a" * 40):
        (repository / "refs" / "main").write_text(commit)
        write(repository / "snapshots" / commit)
        commit_marks.append(marks.mark(lora))
    assert None not in commit_marks
    assert commit_marks[0] != commit_marks[1]
    assert not marks._has_storage or commit_marks[0] == commit_marks[2]


def test_weights_that_cannot_be_read_have_no_mark(marks, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("missing", "empty"):
        assert marks.mark(lora_of(tmp_path / name)) is None


@pytest.fixture
def engine(monkeypatch):
    fake_vllm.install(monkeypatch, "0.32")
    return Engine(num_blocks=40)


def load(engine, lora, weights):
    """Load an adapter; the runner compares what it reads with its weights."""
    lora.load_inplace = True
    engine.runner.lora_manager.add_adapter(lora)
    lora.load_inplace = False
    engine.runner.weights = weights


def ask_twice(engine, lora):
    """Serve a request twice from an empty device; return the tokens from the host."""
    hit_tokens = []
    for _ in range(2):
        forget_device(engine)
        hit_tokens.append(ask(engine, lora=lora))
        engine.check_nothing_leaked()
    return hit_tokens


def test_an_adapter_loaded_again_finds_what_its_new_weights_have_computed(
    engine, tmp_path
):
    lora = lora_of(write(tmp_path / "one"))
    load(engine, lora, 1)
    assert ask_twice(engine, lora) == [0, TOKENS]
    for weights in (2, 3):
        write(tmp_path / "one", bytes([weights]) * 100)
        load(engine, lora, weights)
        assert ask_twice(engine, lora) == [0, TOKENS]


@pytest.mark.parametrize("has_asked", [True, False])
def test_files_rewritten_and_not_loaded_leave_an_adapter_without_offers(
    engine, tmp_path, caplog, has_asked
):
    lora = lora_of(write(tmp_path / "one"))
    load(engine, lora, 1)
    if has_asked:
        assert ask_twice(engine, lora) == [0, TOKENS]
    write(tmp_path / "one", b"2" * 100)
    assert ask_twice(engine, lora) == [0, 0]  # By the old weights.
    assert caplog.text.count("adapter 'policy': its files cannot be read, or") == 1
    load(engine, lora, 2)
    assert ask_twice(engine, lora) == [0, TOKENS]


def test_adapters_that_cannot_be_read_are_not_stored(engine, tmp_path):
    assert ask_twice(engine, lora_of(tmp_path / "missing")) == [0, 0]
    assert engine.offload_scheduler.stats.num_stored == 0


def test_an_id_that_another_adapter_has_is_not_offered_its_kv(engine, tmp_path):
    """vLLM keeps the adapter loaded under an id, whatever the name and the path."""
    first = lora_of(write(tmp_path / "one"))
    second = lora_of(write(tmp_path / "two", b"2" * 100), name="other")
    load(engine, first, 1)
    assert ask_twice(engine, second) == [0, 0]
    load(engine, second, 2)
    assert ask_twice(engine, second) == [0, TOKENS]


def test_kv_of_an_adapters_old_weights_does_not_come_back_from_the_device(
    engine, tmp_path
):
    """vLLM's own prefix cache has one hash for both."""
    lora = lora_of(write(tmp_path / "one"))
    load(engine, lora, 1)
    ask(engine, lora=lora)
    write(tmp_path / "one", b"2" * 100)
    load(engine, lora, 1)  # The runner then accepts old blocks.
    ask(engine, range(30), lora=lora)
    engine.runner.weights = 2
    for num_found in (0, 7 * BLOCK_SIZE):
        forget_device(engine)
        assert ask(engine, range(30), lora=lora) == num_found


def test_a_load_in_flight_when_its_adapter_is_loaded_again_fails(engine, tmp_path):
    lora = lora_of(write(tmp_path / "one"))
    load(engine, lora, 1)
    ask_twice(engine, lora)
    forget_device(engine)
    release = hold_reports(engine)
    loading = Request("loading", range(18), 3, lora=lora)
    engine.scheduler.add(loading)
    engine.step()
    write(tmp_path / "one", b"2" * 100)
    load(engine, lora, 2)
    engine.step()
    release()
    engine.run()
    assert loading.tokens == reference(range(18), 3)
    engine.check_nothing_leaked()
    assert ask_twice(engine, lora) == [0, TOKENS]


def test_kv_of_an_adapter_that_is_loaded_again_meanwhile_is_not_stored(
    engine, tmp_path
):
    """The request continues with the new weights, and keys of the old ones."""
    lora = lora_of(write(tmp_path / "one"))
    load(engine, lora, 1)
    running = Request("running", range(18), 12, lora=lora)
    engine.scheduler.add(running)
    while len(running.tokens) < 22:
        engine.step()
    num_offered = engine.offload_scheduler.stats.num_offered
    write(tmp_path / "one", b"2" * 100)
    load(engine, lora, 1)
    engine.run()
    assert engine.offload_scheduler.stats.num_offered == num_offered > 0
    # Nor is it loaded, where such a request is preempted.
    engine.runner.weights = 2
    assert ask_twice(engine, lora) == [0, TOKENS]
    running = Request("preempted", range(18), 12, lora=lora)
    engine.scheduler.add(running)
    engine.step()
    write(tmp_path / "one", b"3" * 100)
    load(engine, lora, 2)
    engine.step()
    engine.scheduler.reset_running()
    forget_device(engine)
    engine.runner.weights = 3
    engine.run()
    assert running.tokens == reference(range(18), 12)
    assert ask_twice(engine, lora) == [0, TOKENS]


def test_a_scheduler_in_another_process_learns_what_was_loaded(monkeypatch, tmp_path):
    fake_vllm.install(monkeypatch, "0.32")
    engine = Engine(num_blocks=40)
    separate_halves(monkeypatch)
    lora = lora_of(write(tmp_path / "one"))
    load(engine, lora, 1)
    assert ask_twice(engine, lora) == [0, TOKENS]
    write(tmp_path / "one", b"2" * 100)
    load(engine, lora, 2)
    # The first request comes before the report.
    assert ask_twice(engine, lora)[0] == 0
    assert ask_twice(engine, lora) == [TOKENS, TOKENS]
    # The files have changed again when an adapter is loaded for a request.
    write(tmp_path / "one", b"3" * 100)
    reloading = lora_of(tmp_path / "one", load_inplace=True)
    request = Request("reloading", range(18), 3, lora=reloading)
    engine.scheduler.add(request)
    engine.scheduler.connector.get_num_new_matched_tokens(request, 0)
    write(tmp_path / "one", b"4" * 100)
    load(engine, lora, 4)
    engine.run()
    assert request.tokens == reference(range(18), 3)
    assert ask_twice(engine, lora) == [0, TOKENS]


def switch(engine, folder, weights):
    """Replace an adapter in place, as ``ln -sfn`` does, and load it."""
    link = folder / "current"
    (folder / "new").symlink_to(folder / str(weights))
    os.replace(folder / "new", link)
    lora = lora_of(link)
    load(engine, lora, weights)
    return lora


@pytest.fixture(params=[(False, False), (True, False), (False, True), (True, True)])
def replaceable(request, monkeypatch, tmp_path, settled):
    """An engine, one process or two, synchronous or not, with batches of stores."""
    is_apart, is_async = request.param
    fake_vllm.install(monkeypatch, "0.32")
    if is_apart:
        separate_halves(monkeypatch)
    for weights in (1, 2):
        write(tmp_path / str(weights), bytes([weights]) * 100)
    return Engine(num_blocks=40, is_async=is_async, extra={"store_batch_blocks": 2})


@pytest.mark.parametrize("end", ["finish", "abort", "preempt"])
def test_kv_of_an_adapter_that_is_rolled_back_is_never_served(
    replaceable, tmp_path, end
):
    """A request computes a part of its prompt with weights that its keys do not name.

    The replacement comes between two steps, or between a step's plan and its execution.
    """
    engine, check = replaceable, replaceable.runner.check_what_is_read
    execute, number = engine.runner.execute, 0
    for num_before in (1, 2):
        for num_replaced in (0, 1, 2, 6):
            for is_planned in (False, True):
                number += 1
                prompt = range(100 * number, 100 * number + 34)
                lora = switch(engine, tmp_path, 1)
                # The request may read what the other weights have computed.
                engine.runner.check_what_is_read = lambda work: None
                running = Request(f"running {number}", prompt, 3, lora=lora)
                engine.scheduler.add(running)

                def step(weights, is_planned=is_planned):
                    def switch_and_execute(output):
                        switch(engine, tmp_path, weights)
                        return execute(output)

                    if is_planned:
                        engine.runner.execute = switch_and_execute
                    elif weights:
                        switch(engine, tmp_path, weights)
                    engine.step()
                    engine.runner.execute = execute

                for _ in range(num_before):
                    engine.step()
                for weights in [2] * bool(num_replaced):
                    step(weights)
                for _ in range(num_replaced - 1):
                    engine.step()
                if running in engine.scheduler.running and end == "abort":
                    engine.scheduler.abort(running.request_id)
                if end == "preempt":
                    engine.scheduler.reset_running()
                step(1)
                # Another finds what the device has of it, and stores what follows.
                again = Request(f"again {number}", prompt, 3, lora=lora)
                engine.run(again)
                forget_device(engine)
                engine.runner.check_what_is_read = check
                assert ask(engine, prompt, lora=lora) in range(0, 34, BLOCK_SIZE)
                forget_device(engine)
                assert ask(engine, prompt, lora=lora) == 32  # It is stored again.
                engine.check_nothing_leaked()


def test_stores_of_another_adapter_than_their_keys_are_refused(monkeypatch, tmp_path):
    """The step that is planned before the report, whose request has ended since."""
    fake_vllm.install(monkeypatch, "0.32")
    engine = Engine(num_blocks=40, is_async=True, extra={"store_batch_blocks": 0})
    separate_halves(monkeypatch)
    for weights in (1, 2):
        write(tmp_path / str(weights), bytes([weights]) * 100)
    lora = switch(engine, tmp_path, 1)
    ask(engine)  # The scheduler learns of the adapter.
    engine.runner.check_what_is_read = lambda work: None
    request = Request("running", range(100, 134), 3, lora=lora)
    engine.scheduler.add(request)
    engine.step()
    switch(engine, tmp_path, 2)
    engine.step()
    worker = engine.runner.connector._worker
    assert worker._num_misfits == 1
    engine.step()
    engine.scheduler.abort("running")
    engine.run()
    assert engine.offload_scheduler.stats.num_dropped_failed > 0
    # Later stores are not refused.
    num_misfits, lora = worker._num_misfits, switch(engine, tmp_path, 1)
    ask(engine, range(200, 218))
    assert ask_twice(engine, lora) == [0, TOKENS]
    assert worker._num_misfits == num_misfits


def test_hosts_compare_adapters_with_their_own_files(monkeypatch):
    """Times and inodes of copies differ; reports of all hosts are kept apart."""
    halves = []
    for host in (0, 1):
        half = WorkerHalf(ConnectorConfig.of(*make_configs()))
        half._step_adapters = frozenset({(1, b"a")})
        half.adapters = {1: b"a" if host == 0 else b"a of host 1"}
        halves.append(half)

    def report(host, **marks):
        half = halves[host]
        half.adapters = {1: marks["mark"]} if marks else half.adapters
        half._step_adapters = frozenset({(1, b"a")})
        monkeypatch.setattr(jax, "process_index", lambda: host)
        return half.take_report()

    def misfits(*reports):
        report = reduce(WorkerReport.aggregate, reports)
        return report.misfits, dict(report.num_misfits)

    assert misfits(report(0), report(1)) == (frozenset(), {0: 0, 1: 0})
    other = report(1, mark=b"b of host 1")
    assert report(0) is None
    assert misfits(other) == ({(1, b"a")}, {1: 1})
    both = report(0, mark=b"b"), report(1, mark=b"c of host 1")
    assert misfits(*both)[1] == {0: 1, 1: 1}

"""The JSON of every command stays as it is, byte for byte: programs read it.

A golden file lies in `tests/tools/json` for each case. What depends on the machine or
the clock is left out of it.
"""

import argparse
import dataclasses
import json
import os
import pathlib

import pytest

from jaxkv.config import OffloadConfig
from jaxkv.tools import main as cli
from jaxkv.tools.demo import run as demo_run
from jaxkv.tools.doctor import command as doctor
from jaxkv.tools.doctor.facts import Backend, Facts
from jaxkv.tools.doctor.store import Folder, Store, StoreSpeed
from jaxkv.tools.files import check_files, write_file
from jaxkv.tools.speed import Bandwidth, Speed
from jaxkv.tools.usage import UsageError
from jaxkv.transfer.limits import HostLimit, PinnedPool
from tests.rigs.command_line import run_command
from tests.tools.test_main import fake_run

GOLDEN = pathlib.Path(__file__).parent / "json"
LINES = {
    "plan-blocks": "plan synthetic:300 --policy lru,optimum --capacity 5%,20% "
    "--device-blocks 100 --store-threshold 2",
    "plan": "plan synthetic:300 --policy lru,arc --model llama-3.1-8b --host-bytes "
    "16GiB,64GiB --device-blocks 200 --engines 2 --storage-bytes 256GiB "
    "--flops-per-s 989e12 --load-gb-per-s 25",
    "demo": "demo --conversations 1 --turns 2 --storage redis://:pw@host:1",
    "doctor": "doctor --no-probe --host-bytes 60GiB --need events",
}
# Of the machine, or the clock.
KEYS_ALONE = {"machine", "versions"}
LEFT_OUT = {"wall_s"}


def gather_facts():
    speed = Speed(2.5, 2.0, [0.1, 0.2, 0.3])
    return Facts(
        system="Linux x86_64, 2 CPUs",
        versions={"python": "3", "jaxkv": "0"},
        total_bytes=64 << 30,
        limits=(HostLimit(62 << 30, "the machine", "free some memory"),),
        has_nvidia_driver=False,
        chosen_platforms="",
        backend=Backend("cpu", "x", 1, "cpu", ("device", "pinned_host"), None),
        pool=PinnedPool(64 << 30, "the pool", "LIMIT", 1, 1, is_preallocated=False),
        mode="fused",
        refusals=(),
        missing={"events": ("pyzmq",)},
        variables={"JAXKV_HOST_BYTES": "1GiB"},
        config=OffloadConfig(storage="redis://:pw@host:1"),
        config_faults=("a fault",),
        bandwidth=Bandwidth(1 << 25, 1 << 20, speed, speed, "np.copyto", speed, speed),
    )


def look_at_store(facts, args):
    folder = Folder("/x", 0o777, 0o600, 1 << 40, 1 << 30)
    speed = StoreSpeed(350.0, 1200.0)
    store = Store("file:///x", 2 << 40, is_sealed=False, folder=folder, speed=speed)
    return dataclasses.replace(facts, store=store)


@pytest.fixture(autouse=True)
def fixed(monkeypatch):
    # The keys are the same whichever extras are installed.
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")
    monkeypatch.setattr(demo_run, "run_demo", lambda c, p, recorder: fake_run(c, p))
    monkeypatch.setattr(doctor, "gather_facts", gather_facts)
    monkeypatch.setattr(doctor, "_look_at_store", look_at_store)


def without_machine(value):
    """Replace the machine's part by its keys, and drop times of the clock."""
    if isinstance(value, list):
        return [without_machine(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: list(item) if name in KEYS_ALONE else without_machine(item)
        for name, item in value.items()
        if name not in LEFT_OUT
    }


@pytest.mark.parametrize("name", list(LINES))
def test_the_json_of_a_command_is_as_it_was(name, tmp_path, capsys):
    path, golden = tmp_path / "a.json", GOLDEN / f"{name}.json"
    options = "--format", "json", "--json", str(path)
    assert cli.main([*LINES[name].split(), *options]) in (0, 1)
    text = path.read_text()
    assert capsys.readouterr().out == text
    figures = json.loads(text)
    assert text == f"{json.dumps(figures, indent=2)}\n"
    golden_text = f"{json.dumps(without_machine(figures), indent=1)}\n"
    assert golden_text == golden.read_text()


def test_the_output_goes_to_a_file_whose_name_says_the_format(tmp_path, capsys):
    line = LINES["demo"].split()
    assert cli.main(line) == 0
    table = capsys.readouterr().out
    texts = {}
    for name in ("a.txt", "a.JSON"):
        assert cli.main([*line, "-o", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == ""
        texts[name] = (tmp_path / name).read_text()
    assert texts["a.txt"] == table
    assert json.loads(texts["a.JSON"])["bandwidth"]
    # A name that says nothing is a table, unless the format is given.
    assert cli.main([*line, "-o", str(tmp_path / "b"), "--format=json"]) == 0
    assert (tmp_path / "b").read_text() == texts["a.JSON"]


def test_output_is_written_to_a_pipe_without_a_name():
    reader, writer = os.pipe()
    with open(reader, "rb") as pipe:
        write_file("--output", pathlib.Path(f"/dev/fd/{writer}"), b"figures")
        os.close(writer)
        assert pipe.read() == b"figures"


def test_output_to_stdout_is_appended_to_the_file_behind_it(tmp_path):
    path = tmp_path / "log"
    path.write_text("before\n")
    with path.open("ab") as log:
        line = f"store size {tmp_path} --json /dev/stdout"
        assert run_command(line, stdout=log).returncode == 0
    text = path.read_text()
    assert text.startswith("before\n")
    assert " free.\n" in text
    assert '"namespaces": 0' in text


def test_a_link_to_a_file_that_does_not_exist_yet_stays_a_link(tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    check_files(argparse.Namespace(output=link))
    assert link.is_symlink()
    assert not target.exists()
    write_file("--output", link, b"figures")
    assert link.is_symlink()
    assert target.read_bytes() == b"figures"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_a_file_behind_a_link_of_another_user_is_not_overwritten(tmp_path):
    precious, link = tmp_path / "precious", tmp_path / "out.json"
    precious.write_text("before")
    link.symlink_to(precious)
    os.lchown(link, 65534, 65534)
    for write in (
        lambda: check_files(argparse.Namespace(output=link)),
        lambda: write_file("--output", link, b"figures"),
    ):
        with pytest.raises(UsageError, match="a link belongs to user 65534"):
            write()
        assert precious.read_text() == "before"


def test_a_pipe_whose_reader_has_closed_it_is_no_error_of_the_option():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb"), pytest.raises(BrokenPipeError):
        write_file("--output", pathlib.Path(f"/dev/fd/{writer}"), b"figures")


def test_quiet_commands_show_no_progress(capsys):
    line = "plan synthetic:30 --policy lru --capacity 10%"
    shown = "replaying, 1 runs ... 100%\n"
    for option, progress in (("", shown), ("-q", "")):
        assert cli.main([*line.split(), *option.split()]) == 0
        assert capsys.readouterr().err == progress

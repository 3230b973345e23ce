"""`python -m benchmarks.compiled`: what it prints, writes and refuses."""

import dataclasses
import json

import pytest

from benchmarks.compiled import __main__ as command
from benchmarks.compiled import report
from benchmarks.compiled.plan import programs
from benchmarks.compiled.run import CompileRecord, judge
from benchmarks.compiled.targets import TARGETS, pip_install
from tests.benchmarks.compiled.examples import GOOD

pytestmark = pytest.mark.usefixtures("plain_output")

SMALL = "--target cpu --shape 64,4,2,16 --dtype float32 --leaves 2 --blocks 4"


@pytest.fixture
def run_line(capsys, tmp_path):
    """Runs a command line; returns its output, its errors and its JSON."""
    path = tmp_path / "figures.json"

    def run(line, code=0):
        assert command.main([*line.split(), "--json", str(path)]) == code
        out, err = capsys.readouterr()
        return out, err, json.loads(path.read_text())

    return run


@pytest.fixture
def refused(capsys):
    """Runs a command line that must be refused; returns the error."""

    def run(line):
        assert command.main(line.split()) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err

    return run


@pytest.fixture
def compilers(monkeypatch):
    """Stand in for all compilers; return the configurations and a setter of figures."""
    configs = []

    def use(figures):
        def run(config, on_progress):
            configs.append(config)
            results = tuple(judge(p, figures(p), None) for p in programs(config))
            on_progress("TPU v5e", len(results), len(results))
            return CompileRecord(config, results, 12.4)

        monkeypatch.setattr(command, "run_compile", run)

    monkeypatch.setattr(command, "missing_group", lambda target: None)
    use(at_home)
    return configs, use


def at_home(program):
    kernel = "dma" if program.target.backend == "tpu" else "xla"
    return dataclasses.replace(GOOD, kernel=kernel)


def test_it_compiles_prints_and_writes(run_line, tmp_path):
    page = tmp_path / "a.md"
    out, err, written = run_line(f"{SMALL} --markdown {page}")
    (line,) = err.splitlines()  # A slow machine adds percentages.
    assert line.partition(" ...")[0] == "this machine's CPU"
    assert "your pool: 2 x float32[64,4,2,16]" in out
    assert written["blocks"] == [4]
    assert written["pools"][0]["shape"] == [64, 4, 2, 16]
    assert {"jax", "jaxkv"} <= written["versions"].keys()
    results = {result["program"]: result for result in written["results"]}
    assert list(results) == ["gather", "merge", "load"]
    assert all(result["broken"] == [] for result in results.values())
    assert "Saves and loads of 4 blocks in" in out
    assert "| your pool | 1 KiB | " in out
    last = out.splitlines()[-1]
    assert last.startswith("3 programs for cpu in ")
    assert last.endswith(" s: every bound holds")
    assert page.read_text().count("| your pool |") == 2


def test_a_broken_bound_is_listed_and_is_the_exit_code(compilers, run_line):
    _, use = compilers

    def figures(program):
        good = at_home(program)
        if program.kind == "load" and program.num_blocks > 1:
            return dataclasses.replace(good, collectives=("all-gather",), kernels=99)
        return good

    use(figures)
    line = "--target v5e --shape 2048,16,8,2,128"
    out, *_ = run_line(line, 1)
    assert (
        "v5e, your pool, load of 8, 64, 512 blocks: 99 kernels, at most 4; "
        "collectives: all-gather" in out
    )
    assert out.splitlines()[-1] == "12 programs for v5e in 12 s: 3 break a bound"
    use(lambda program: None)
    line = "--target v6e:2x2 --shape 64,16 --blocks 8"
    out, *_ = run_line(line, 1)
    assert "v6e, your pool, gather of 8 blocks: did not compile: None" in out


def test_known_breaks_are_listed_and_fail_no_run(compilers, run_line):
    configs, use = compilers

    def figures(program):
        good = at_home(program)
        breaks = "row-major" in program.pool.name and program.num_blocks >= 512
        breaks &= program.target.name == "v5e"
        return dataclasses.replace(good, kernels=99) if breaks else good

    use(figures)
    out, *_ = run_line("--target v5e")
    assert "Duration     about " in out
    assert "Broken bounds" not in out
    assert "MLA 576, row-major, 3 programs: XLA lays an extent of 128 padded" in out
    assert out.rstrip().endswith("every bound holds, but for 6 known breaks")
    # By default all accelerators and engines.
    use(at_home)
    out, *_ = run_line("")
    assert configs[1].targets == TARGETS
    assert configs[1].blocks == (1, 8, 64, 512)
    assert "NVIDIA H200" in out
    assert "MLA, padded to 640: 32 x bfloat16[2048,8,2,640]" in out
    assert out.rstrip().endswith("every bound holds")


def test_pools_and_models_are_compiled_as_described(compilers, tmp_path, refused):
    configs, _ = compilers
    line = (
        "--shape 8,64,16,128 --block-axis 1 --leaves 1 --dtype int8 "
        "--shard 0 --row-major --target v5p,tpu7x --target v5p --blocks 2,4 --quick"
    )
    assert "--quick chooses by itself, without --shape" in refused(line)
    assert command.main(line.removesuffix(" --quick").split()) == 0
    (pool,) = configs[0].pools
    assert (pool.shape, pool.block_axis, pool.num_leaves) == ((8, 64, 16, 128), 1, 1)
    assert (pool.dtype, pool.sharded_axis, pool.row_major) == ("int8", 0, True)
    assert [target.name for target in configs[0].targets] == ["v5p", "tpu7x"]
    assert (configs[0].blocks, configs[0].examples) == ((2, 4), ())
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(model))
    line = f"--model {tmp_path} --block-size 32 --num-blocks 100"
    assert command.main(line.split()) == 0
    shapes = [(100, 32, 4, 2, 128), (100, 32, 4, 128)]
    assert [pool.shape for pool in configs[1].pools] == shapes
    assert command.main(["--quick"]) == 0
    assert configs[2].blocks == (8,)
    assert len(configs[2].pools) == 16


def test_tables_go_between_the_markers_of_a_page(
    compilers, run_line, refused, tmp_path
):
    page = tmp_path / "a.md"
    start, end = report.MARKERS
    page.write_text(f"# Title\n\n{start}\n\nold\n\n{end}\n\nmore\n")
    line = f"--target v5e --shape 2048,16,8,2,128 --markdown {page}"
    run_line(line)
    text = page.read_text()
    assert text.startswith(f"# Title\n\n{start}\n\nSaves and loads of 8 blocks")
    assert text.endswith(f"\n{end}\n\nmore\n")
    assert "old" not in text
    assert "| your pool | " in text
    assert " | 1.00x, 4 k, 182 us |" in text
    run_line(line)
    assert page.read_text() == text
    # A page with half of the markers is left alone.
    half = f"{start}\nold\n"
    page.write_text(half)
    assert refused(line).endswith("after it\n")
    assert page.read_text() == half


REFUSED = """
--targt v5e                 | unknown option '--targt': did you mean --target?
--target v7                 | --target: unknown 'v7': choose from v5e, v5p, v6e
--target h200:8             | 'h200:8' names a topology, which only a TPU
CPU --shape 3,x             | --shape: 'x' must be a whole number from 1
CPU --shape 3,4 --block-axis 2 | block axis 2 must be from 0 to 1
CPU --shape 4,6 --shard 1   | axis 1 has 6, which 4 devices cannot
CPU --shape 3,4 --dtype int4 | --dtype: 'int4' is no dtype of numbers
CPU --dtype int8            | --dtype: it belongs to --shape or --model
CPU --row-major             | --row-major: it belongs to --shape
CPU --block-size 3          | --block-size: it belongs to --model
CPU --shape 3,4 --model .   | --shape and --model: give one of them
CPU --model nowhere         | 'nowhere' is neither a file nor a known mod
CPU --quick --blocks 3      | --quick chooses by itself, without --blocks
CPU --json .                | --json: cannot write '.' (Is a directory)
CPU --markdown .            | Is a directory: '.'
"""


def test_a_wrong_command_line_is_refused(refused):
    for row in filter(None, REFUSED.splitlines()):
        line, message = map(str.strip, row.split(" | "))
        assert message in refused(line.replace("CPU", "--target cpu")), row


def test_a_missing_compiler_is_named(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    for name, group in (
        *(("v5e", "aot-tpu"), ("tpu7x:2x2x1", "aot-tpu")),
        ("h200", "aot-gpu"),
    ):
        err = refused(f"--target {name}")
        assert f" needs a compiler: {pip_install(group)}" in err
    assert pip_install("aot-tpu") in refused("")

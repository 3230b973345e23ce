"""Compile the transfer programs for TPUs and GPUs that this machine does not have.

    python -m benchmarks.compiled [--quick] [--target NAME,...] [--json FILE] ...

prints bytes, temporary memory, kernels and copies, as the compilers report them. The
exit code is 1 if a program breaks a bound and is not known to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from benchmarks.compiled import report
from benchmarks.compiled.models import pools_of_model
from benchmarks.compiled.plan import BLOCKS, CompileConfig, programs, quick_config
from benchmarks.compiled.pools import PoolShape, check_pool
from benchmarks.compiled.run import run_compile
from benchmarks.compiled.targets import (
    NUM_DEVICES,
    TARGETS,
    THIS_CPU,
    Target,
    missing_group,
    parse_target,
    pip_install,
)
from jaxkv._util import did_you_mean
from jaxkv.tools.model_config import NAMED_MODELS, check_dtype, find_config
from jaxkv.tools.progress import show_progress
from jaxkv.transfer.kernels import MODES, Mode

_T = TypeVar("_T")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print and write; return the exit code."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    try:
        config = _make_config(args)
        _check_files(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    report.print_plan(config, len(list(programs(config))))
    with show_progress() as on_progress:
        record = run_compile(config, on_progress)
    report.print_results(record)
    if args.json:
        text = json.dumps(report.to_json(record), indent=2)
        args.json.write_text(f"{text}\n", encoding="utf-8")
    if args.markdown:
        report.write_markdown(args.markdown, report.to_markdown(record))
    return 1 if record.broken else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled",
        description=str(__doc__).partition("\n")[0],
        allow_abbrev=False,
    )
    names = ", ".join(target.name for target in (*TARGETS, THIS_CPU))

    def add_list(option: str, parse: Callable[[str], object], about: str) -> None:
        parser.add_argument(
            option,
            action="extend",
            type=_list_of(parse),
            metavar="VALUE,...",
            help=about,
        )

    add_list(
        "--target",
        _argument(parse_target),
        f"{names}, or a TPU topology such as v6e:2x2 (default: all accelerators whose "
        "compiler is installed)",
    )
    add_list("--mode", _parse_mode, "transfer modes (default: all)")
    add_list(
        "--blocks",
        _whole_from(1),
        f"blocks per program (default: {','.join(map(str, BLOCKS))})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="every layout and program with few layers and 8 blocks, each on one TPU",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument(
        "--markdown",
        type=pathlib.Path,
        metavar="FILE",
        help=f"write tables, between {report.MARKERS[0]} and {report.MARKERS[1]} if "
        "the file has these lines",
    )
    pool = parser.add_argument_group("one pool instead of the known engines'")
    sizes = _list_of(_whole_from(1))
    pool.add_argument("--shape", type=sizes, metavar="N,...", help="shape of a leaf")
    pool.add_argument("--model", help=f"config.json, or {', '.join(NAMED_MODELS)}")
    pool.add_argument("--dtype", type=_argument(check_dtype), metavar="NAME")
    for option, minimum, about in (
        ("--block-axis", 0, "axis that counts the blocks (default: 0)"),
        ("--leaves", 1, "leaves of that shape (default: 32)"),
        ("--shard", 0, f"axis to spread over {NUM_DEVICES} devices"),
        ("--block-size", 1, "tokens per block of the model (default: 16)"),
        ("--num-blocks", 1, "blocks of the model's pool (default: 2048)"),
    ):
        pool.add_argument(option, type=_whole_from(minimum), metavar="N", help=about)
    pool.add_argument("--row-major", action="store_true", help="keep the axes' order")
    return parser


def _make_config(args: argparse.Namespace) -> CompileConfig:
    """Make the configuration of a command line, or raise ValueError."""
    if args.shape and args.model:
        raise ValueError("--shape and --model: give one of them")
    for name, option in (
        *((name, "shape") for name in ("block_axis", "leaves", "shard", "row_major")),
        *((name, "model") for name in ("block_size", "num_blocks")),
    ):
        if getattr(args, name) not in (None, False) and not getattr(args, option):
            raise ValueError(f"--{name.replace('_', '-')}: it belongs to --{option}")
    if args.dtype and not (args.shape or args.model):
        raise ValueError("--dtype: it belongs to --shape or --model")
    targets = _choose_targets(args.target)
    if args.quick:
        for name in ("shape", "model", "blocks", "mode"):
            if getattr(args, name):
                raise ValueError(f"--quick chooses by itself, without --{name}")
        return quick_config(targets)
    config = CompileConfig(targets)
    if pools := _choose_pools(args):
        config = dataclasses.replace(config, pools=pools, examples=())
    if args.blocks:
        config = dataclasses.replace(config, blocks=tuple(args.blocks))
    if args.mode:
        modes = tuple(mode for mode in MODES if mode in args.mode)
        config = dataclasses.replace(config, modes=modes)
    return config


def _choose_pools(args: argparse.Namespace) -> tuple[PoolShape, ...]:
    if args.model:
        _, model = find_config(args.model)
        size, num_blocks = args.block_size or 16, args.num_blocks or 2048
        return pools_of_model(model, size, num_blocks, args.dtype)
    if not args.shape:
        return ()
    pool = PoolShape(
        "your pool",
        tuple(args.shape),
        args.leaves or 32,
        args.block_axis or 0,
        args.dtype or "bfloat16",
        args.shard,
        args.row_major,
    )
    check_pool(pool)
    return (pool,)


def _choose_targets(targets: list[Target] | None) -> tuple[Target, ...]:
    """Return the targets, all of whose compilers are installed."""
    if targets is None:
        installed = tuple(t for t in TARGETS if missing_group(t) is None)
        if not installed:
            raise ValueError(
                f"no compiler of an accelerator is installed: {pip_install('aot-tpu')} "
                f"for TPUs, {pip_install('aot-gpu')} for NVIDIA GPUs"
            )
        return installed
    for target in targets:
        if group := missing_group(target):
            raise ValueError(f"{target.name} needs a compiler: {pip_install(group)}")
    return tuple(dict.fromkeys(targets))


def _check_files(args: argparse.Namespace) -> None:
    """Raise an error for files that cannot be written, before a long run."""
    for path in filter(None, (args.json, args.markdown)):
        path.open("a").close()
    if args.markdown:
        report.check_markers(args.markdown)


def _list_of(parse: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    return lambda text: [parse(part.strip()) for part in text.split(",")]


def _argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Convert errors of a parser, because argparse shows only its own type."""

    def parse_argument(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


def _parse_mode(text: str) -> Mode:
    for mode in MODES:
        if mode == text:
            return mode
    raise argparse.ArgumentTypeError(f"unknown {text!r}: {did_you_mean(text, MODES)}")


def _whole_from(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text.isdecimal() and int(text) >= minimum:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number from {minimum}"
        )

    return parse


if __name__ == "__main__":
    sys.exit(main())

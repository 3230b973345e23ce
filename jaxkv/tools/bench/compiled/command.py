"""``jaxkv bench compile``: what accelerators' compilers make of the programs."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from jaxkv._util.extras import pip_install
from jaxkv.tools.bench.compiled import report
from jaxkv.tools.bench.compiled.models import pools_of_model
from jaxkv.tools.bench.compiled.plan import (
    BLOCKS,
    CompileConfig,
    programs,
    quick_config,
)
from jaxkv.tools.bench.compiled.pools import PoolShape, check_pool
from jaxkv.tools.bench.compiled.run import run_compile
from jaxkv.tools.bench.compiled.targets import (
    NUM_DEVICES,
    TARGETS,
    THIS_CPU,
    Target,
    missing_extra,
    parse_target,
)
from jaxkv.tools.model_config import NAMED_MODELS, check_dtype, find_config
from jaxkv.tools.options import (
    EXIT_FAILED,
    EXIT_OK,
    UsageError,
    add_json_option,
    check_belongs,
    check_extra,
    check_file,
    check_files,
    check_names,
    model_errors,
    parse_list_of,
    parse_whole_number_from,
    split_commas,
    write_json,
)
from jaxkv.tools.progress import show_progress
from jaxkv.transfer.kernels import MODES

SUMMARY = "compile transfers for TPUs and GPUs that this machine does not have"
DESCRIPTION = (
    "Compile the programs of saves and loads with the real compilers of TPUs and GPUs "
    "(extras aot-tpu and aot-gpu), which need no such device, and show what they would "
    "do: bytes, temporary memory, kernels, copies; for the layouts of known engines or "
    "for your own. Nothing runs: the figures are the compiler's. The exit code is 1 if "
    "a bound is broken that is not known to be."
)

_SHAPE_OPTIONS = ("block_axis", "leaves", "shard", "row_major")
_MODEL_OPTIONS = ("block_size", "num_blocks")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    names = [target.name for target in (*TARGETS, THIS_CPU)]
    parser.add_argument(
        "--target",
        action="extend",
        type=split_commas,
        metavar="NAME,...",
        help=f"devices to compile for: {', '.join(names)}, or a topology of a TPU, "
        "such as v6e:2x2; may be repeated (default: all accelerators whose compiler is "
        "installed)",
    )
    parser.add_argument(
        "--mode",
        action="extend",
        type=split_commas,
        metavar="NAME,...",
        help="modes of the transfer engine; may be repeated (default: "
        f"{','.join(MODES)})",
    )
    parser.add_argument(
        "--blocks",
        action="extend",
        type=parse_list_of(parse_whole_number_from(1)),
        metavar="N,...",
        help="blocks that a program moves, each in turn; may be repeated (default: "
        f"{','.join(map(str, BLOCKS))})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compile only a part, in a minute and a half: every layout and program, "
        "few layers, 8 blocks, each program for one of the TPUs (default: all)",
    )
    own = parser.add_argument_group("your own pool")
    own.add_argument(
        "--shape",
        type=parse_list_of(parse_whole_number_from(1)),
        metavar="N,...",
        help="shape of a leaf, such as 2048,16,8,2,128 (default: known engines')",
    )
    own.add_argument(
        "--dtype",
        metavar="NAME",
        help="dtype of the pool (default: bfloat16, or the model's)",
    )
    own.add_argument(
        "--block-axis",
        type=parse_whole_number_from(0),
        metavar="N",
        help="axis that counts the blocks (default: 0)",
    )
    own.add_argument(
        "--leaves",
        type=parse_whole_number_from(1),
        metavar="N",
        help="number of leaves of that shape (default: 32)",
    )
    own.add_argument(
        "--shard",
        type=parse_whole_number_from(0),
        metavar="AXIS",
        help=f"axis to spread over {NUM_DEVICES} devices (default: one device)",
    )
    own.add_argument(
        "--row-major",
        action="store_true",
        default=None,
        help="lay the pool out in the order of its axes (default: as XLA likes best)",
    )
    own.add_argument(
        "--model",
        metavar="MODEL",
        help="a model, laid out as engines do: a Hugging Face config.json, the folder "
        f"with it, or {', '.join(NAMED_MODELS)}",
    )
    own.add_argument(
        "--block-size",
        type=parse_whole_number_from(1),
        metavar="N",
        help="tokens of a block of the model (default: 16)",
    )
    own.add_argument(
        "--num-blocks",
        type=parse_whole_number_from(1),
        metavar="N",
        help="blocks of the model's pool (default: 2048)",
    )
    add_json_option(parser)
    parser.add_argument(
        "--markdown",
        type=pathlib.Path,
        metavar="FILE",
        help="write tables for documentation to a file, between the lines "
        f"{report.MARKERS[0]} and {report.MARKERS[1]} if they are there (default: no "
        "file)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    config = _config(args)
    check_files(args)
    check_file("--markdown", args.markdown)
    check_extra("bench compile", ("rich",))
    chosen = list(programs(config))
    report.print_plan(config, len(chosen))
    with show_progress() as on_progress:
        record = run_compile(config, on_progress)
    report.print_results(record)
    if args.json:
        write_json(args.json, report.to_json(record))
    if args.markdown:
        try:
            report.write_markdown(args.markdown, report.to_markdown(record))
        except ValueError as error:
            raise UsageError(f"--markdown: {error}") from error
    return EXIT_FAILED if record.broken else EXIT_OK


def _config(args: argparse.Namespace) -> CompileConfig:
    """Make the configuration of a command line, or refuse it."""
    if args.shape and args.model:
        raise UsageError("--shape and --model: give one of them")
    check_belongs(args, _SHAPE_OPTIONS, "--shape", args.shape)
    check_belongs(args, _MODEL_OPTIONS, "--model", args.model)
    check_belongs(args, ("dtype",), "--shape or --model", args.shape or args.model)
    pools = _own_pools(args)
    targets = _targets(args.target)
    if args.quick:
        for name in ("shape", "model", "blocks", "mode"):
            if getattr(args, name):
                raise UsageError(
                    f"--quick: it is for the whole check, without --{name}"
                )
        return quick_config(targets)
    config = CompileConfig(targets)
    if pools:
        config = dataclasses.replace(config, pools=pools, examples=())
    if args.blocks:
        config = dataclasses.replace(config, blocks=tuple(args.blocks))
    if args.mode:
        modes = check_names("--mode", args.mode, list(MODES))
        config = dataclasses.replace(
            config, modes=tuple(mode for mode in MODES if mode in modes)
        )
    return config


def _own_pools(args: argparse.Namespace) -> tuple[PoolShape, ...]:
    """Return the pools that the user describes; none if there are none."""
    if args.dtype:
        try:
            check_dtype(args.dtype)
        except ValueError as error:
            raise UsageError(f"--dtype: {error}") from error
    if args.model:
        with model_errors(args.model):
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
        bool(args.row_major),
    )
    try:
        check_pool(pool)
    except ValueError as error:
        raise UsageError(f"--shape: {error}") from error
    return (pool,)


def _targets(names: list[str] | None) -> tuple[Target, ...]:
    """Return the targets that the user names, or those that can be compiled for."""
    if names is None:
        found = tuple(target for target in TARGETS if missing_extra(target) is None)
        if not found:
            raise UsageError(
                f"no compiler of an accelerator is installed: {pip_install('aot-tpu')} "
                f"for TPUs, {pip_install('aot-gpu')} for NVIDIA GPUs"
            )
        return found
    targets = []
    for name in dict.fromkeys(names):
        try:
            target = parse_target(name)
        except ValueError as error:
            raise UsageError(f"--target: {error}") from error
        extra = missing_extra(target)
        if extra is not None:
            raise UsageError(f"--target: {name} needs a compiler: {pip_install(extra)}")
        targets.append(target)
    return tuple(targets)

"""Compile the transfer programs for TPUs and GPUs that this machine does not have.

    python -m benchmarks.compiled [--quick] [--target NAME,...] [--json FILE] ...

prints bytes, temporary memory, kernels and copies, as the compilers report them. The
exit code is 1 if a program breaks a bound and is not known to.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.common import run_command
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
from jaxkv.tools.files import OUTPUT_OPTIONS, check_files, write_files
from jaxkv.tools.model_config import NAMED_MODELS, check_dtype, find_config
from jaxkv.tools.progress import show_progress
from jaxkv.tools.usage import (
    EXIT_FAILED,
    EXIT_OK,
    Args,
    Usage,
    UsageError,
    check_absent,
    check_belongs,
    whole_number_from,
)

USAGE = Usage(
    "python -m benchmarks.compiled",
    str(__doc__).partition("\n")[0],
    f"""
programs:
  --target NAME,...  {", ".join(target.name for target in (*TARGETS, THIS_CPU))}, or a
      TPU topology such as v6e:2x2 (default: all accelerators whose compiler is
      installed)
  --blocks N,...  blocks per program (default: {",".join(map(str, BLOCKS))})
  --quick  compile every layout and program with few layers and 8 blocks, on half of
      the TPUs

one pool instead of the known engines':
  --shape N,...  shape of a leaf
  --block-axis N  axis that counts the blocks (default: 0)
  --leaves N  leaves of that shape (default: 32)
  --shard N  axis to spread over {NUM_DEVICES} devices
  --row-major  keep the order of the axes
  --model NAME  config.json, or {", ".join(NAMED_MODELS)}
  --block-size N  tokens per block of the model (default: 16)
  --num-blocks N  blocks of the model's pool (default: 2048)
  --dtype NAME  dtype of the elements

output:
  --markdown FILE  write tables, between {report.MARKERS[0]} and
      {report.MARKERS[1]} if the file has these lines
{OUTPUT_OPTIONS}
""",
    {
        "--target": parse_target,
        "--block-axis": whole_number_from(0),
        "--shard": whole_number_from(0),
        "--dtype": check_dtype,
    },
    {"row_major": None},
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(USAGE, _run, argv)


def _run(args: Args) -> int:
    try:
        config = _make_config(args)
        if args.markdown:
            args.markdown.touch()
            report.check_markers(args.markdown)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    check_files(args)
    report.print_plan(config, len(list(programs(config))))
    with show_progress() as on_progress:
        record = run_compile(config, on_progress)
    report.print_results(record)
    write_files(args, partial(report.to_json, record))
    if args.markdown:
        report.write_markdown(args.markdown, report.to_markdown(record))
    return EXIT_FAILED if record.broken else EXIT_OK


def _make_config(args: Args) -> CompileConfig:
    """Make the configuration of a command line, or raise ValueError."""
    if args.shape and args.model:
        raise UsageError("--shape and --model: give one of them")
    of_shape = "block_axis", "leaves", "shard", "row_major"
    check_belongs(args, of_shape, "--shape", args.shape)
    check_belongs(args, ("block_size", "num_blocks"), "--model", args.model)
    check_belongs(args, ("dtype",), "--shape or --model", args.shape or args.model)
    targets = _choose_targets(args.target)
    if args.quick:
        excluded = "shape", "model", "blocks"
        check_absent(args, excluded, "--quick chooses by itself, without {}")
        return quick_config(targets)
    config = CompileConfig(targets)
    if pools := _choose_pools(args):
        config = dataclasses.replace(config, pools=pools, examples=())
    if args.blocks:
        config = dataclasses.replace(config, blocks=tuple(args.blocks))
    return config


def _choose_pools(args: Args) -> tuple[PoolShape, ...]:
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
        bool(args.row_major),
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


if __name__ == "__main__":
    sys.exit(main())

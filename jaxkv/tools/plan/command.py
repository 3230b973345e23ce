"""``jaxkv plan``: how much host memory is worth having, on one's own traffic."""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxkv.tools import files
from jaxkv.tools.model_config import NAMED_MODELS, check_dtype
from jaxkv.tools.plan import plan as planning
from jaxkv.tools.plan import report, server
from jaxkv.tools.plan.accelerators import ACCELERATORS
from jaxkv.tools.progress import show_progress
from jaxkv.tools.replay import command as replay
from jaxkv.tools.replay.model_costs import ModelCosts, plain_costs
from jaxkv.tools.replay.run import sweep
from jaxkv.tools.replay.traces import Trace
from jaxkv.tools.usage import (
    EXIT_OK,
    Args,
    Usage,
    UsageError,
    check_belongs,
    number_from,
    one_of,
)
from jaxkv.transfer import available_host_bytes

SUMMARY = "recommend a size and policy for the host tier, from a trace"

_NUM_SIZES = 5
_NUM_STORES = 3


MODEL_OPTIONS = f"""\
model:
  --model MODEL  config.json from Hugging Face, its folder or a name such as
      {next(iter(NAMED_MODELS))}
  --kv-dtype NAME  dtype of the KV, such as float8_e4m3fn (default: the model's)
  --kv-bytes-per-token SIZE  KV bytes per token, all layers (default: the model's)
  --tensor-parallel N  devices that share the KV heads (default: 1)"""

USAGE = Usage(
    "jaxkv plan",
    "Replay a request trace against host tiers of several sizes and policies. From "
    "the model's costs and the server's speeds, compute the hits, the time saved per "
    "request and the load on the link. Recommend a size and a policy, or explain why "
    "offloading does not pay.",
    f"""
{replay.TRACE_OPTIONS}

{MODEL_OPTIONS}

tiers and policies:
  --host-bytes SIZE,...  host tier sizes (default: {_NUM_SIZES}, doubling up to all
      blocks or this machine's memory)
{replay.DEVICE_OPTION}
  --device-bytes SIZE  the same in bytes, over all devices (default: as
      --device-blocks)
{replay.POLICY_OPTION}
{replay.FLEET_OPTIONS}
  --storage-bytes SIZE,...  sizes of a store that the engines share (default:
      {_NUM_STORES}, doubling up to all blocks)

speeds:
  --accelerator NAME  {", ".join(ACCELERATORS)}
      (default: the recorded one, else this machine's)
  --load-gb-per-s X  GB/s from the host to each device (default: the accelerator's)
  --store-gb-per-s X  GB/s from each device to the host (default: as fast as loads)
  --measure  measure both on this machine (default: use those above)
  --load-latency-ms X  latency of each load (default: {server.LATENCY_MS:g})
  --prefill-tokens-per-s X  prefill throughput (default: from FLOPs)
  --flops-per-s X  peak FLOP/s of a device (default: the accelerator's, in bfloat16)
  --mfu X  share of the peak that prefill reaches (default: {server.MFU:g})

{replay.ADMISSION_OPTIONS}

output:
{files.PLOT_OPTION.format("tokens found and time saved against the size")}
{files.JSON_OPTION}
{files.HTML_OPTION}
{files.QUIET_OPTION}
""",
    {
        **replay.PARSERS,
        "--accelerator": one_of(list(ACCELERATORS)),
        "--load-latency-ms": number_from(0, "from 0"),
    },
)


def run(args: Args) -> int:
    """Run the command; return its exit code."""
    files.check_files(args)
    files.check_extra("plan")
    check_belongs(args, ("route", "storage_bytes"), "--engines", args.engines)
    policies = replay.choose_policies(args.policy)
    model, num_devices = _read_model(args)
    server.check_speeds(args)
    trace = replay.open_trace(args.trace, args.block_size)
    device_blocks = _choose_device_blocks(args, trace, model)
    machine = server.find_machine(args, trace.recording)
    if args.device_bytes is not None or args.device_blocks is not None:
        device_bytes = (device_blocks or 0) * planning.block_bytes_of(trace, model)
        server.check_hbm(args, machine, num_devices, device_bytes)
    admission = replay.choose_admission(args, trace)
    fleet = replay.choose_fleet(args, trace)
    sizes, notes = _choose_sizes(args.host_bytes, trace, model)
    capacities = _capacities_of("--host-bytes", sizes, trace, model)
    stores: list[int] = []
    if args.engines is not None:
        stores = sorted(set(args.storage_bytes or _store_sizes(trace, model)))
    store_blocks = _capacities_of("--storage-bytes", stores, trace, model)
    speeds, sources = server.choose_speeds(args, machine, num_devices)
    if machine == ACCELERATORS["cpu"] and args.accelerator is None:
        notes = *notes, "the server is taken to be a CPU: --accelerator names another"
    setting = planning.Setting(
        trace,
        model,
        speeds,
        sources,
        device_blocks,
        num_devices,
        notes,
        admission,
        fleet,
        machine,
    )
    report.print_setting(setting)
    # A larger one would hold no more.
    device_blocks = replay.choose_device_blocks(device_blocks or 0, trace)
    with show_progress(is_quiet=args.quiet) as on_progress:
        rest = on_progress, device_blocks, admission
        results = sweep(trace, policies, sorted(set(capacities)), *rest, [fleet])
        plan = planning.make_plan(setting, sizes, results)
        if stores:
            base = plan.base
            fleets = [
                dataclasses.replace(fleet, storage_blocks=num)
                for num in sorted(set(store_blocks))
            ]
            stored = sweep(trace, [base.policy], [base.capacity_blocks], *rest, fleets)
            plan = planning.add_stores(setting, plan, results[0], stores, stored)
    report.print_plan(setting, plan)
    files.write_files(
        args,
        partial(report.to_json, setting, plan),
        partial(report.draw_plan, setting, plan),
        partial(report.render_page, setting, plan),
    )
    return EXIT_OK


def _read_model(args: Args) -> tuple[ModelCosts, int]:
    """Return what a token costs, and the devices that share it."""
    if args.kv_dtype is not None:
        try:
            check_dtype(args.kv_dtype)
        except ValueError as error:
            raise UsageError(f"--kv-dtype: {error}") from error
    if args.model is None:
        if args.kv_bytes_per_token is None:
            raise UsageError(
                "give --model, a config.json or a name such as "
                f"{next(iter(NAMED_MODELS))}, or --kv-bytes-per-token"
            )
        of_model = "kv_dtype", "tensor_parallel", "flops_per_s", "mfu"
        check_belongs(args, of_model, "--model", None)
        if args.prefill_tokens_per_s is None:
            raise UsageError(
                "--kv-bytes-per-token: it does not say how long prefill takes: give "
                "--prefill-tokens-per-s too, or --model instead"
            )
        try:
            return plain_costs(args.kv_bytes_per_token), 1
        except ValueError as error:
            raise UsageError(f"--kv-bytes-per-token: {error}") from error
    if args.kv_bytes_per_token is not None:
        raise UsageError("--kv-bytes-per-token: --model says it already")
    model = replay.find_model(args.model, args.kv_dtype)
    return model, args.tensor_parallel or 1


def _choose_device_blocks(args: Args, trace: Trace, model: ModelCosts) -> int | None:
    """Return the blocks of the device's prefix cache; None if it keeps none."""
    if args.device_bytes is None:
        blocks: int | None = args.device_blocks
        if blocks is None and trace.recording is not None:
            blocks = trace.recording.device_blocks
        return blocks or None
    if args.device_blocks is not None:
        raise UsageError("--device-bytes: --device-blocks says it already")
    block_bytes = planning.block_bytes_of(trace, model)
    _check_holds_block("--device-bytes", args.device_bytes, block_bytes)
    return int(args.device_bytes // block_bytes)


def _choose_sizes(
    sizes_given: list[int] | None, trace: Trace, model: ModelCosts
) -> tuple[list[int], tuple[str, ...]]:
    """Return the host's sizes in ascending order, and what to note about them."""
    if sizes_given is not None:
        return sorted(set(sizes_given)), ()
    block_bytes = planning.block_bytes_of(trace, model)
    # A power of two that holds all blocks, or the largest that fits this machine.
    max_bytes = max(_store_sizes(trace, model))
    memory = available_host_bytes()
    notes: tuple[str, ...] = ()
    if memory is not None and memory.num_bytes < max_bytes:
        max_bytes = _power_of_two(memory.num_bytes)
        notes = (
            "sizes go up to this machine's memory: name the server's with --host-bytes",
        )
    sizes = [max_bytes >> i for i in reversed(range(_NUM_SIZES))]
    sizes = [size for size in sizes if size >= block_bytes]
    if not sizes:
        raise UsageError(
            "--host-bytes: not even a block fits this machine's memory; name the sizes"
        )
    return sizes, notes


def _capacities_of(
    option: str, sizes: list[int], trace: Trace, model: ModelCosts
) -> list[int]:
    block_bytes = planning.block_bytes_of(trace, model)
    for size in sizes:
        _check_holds_block(option, size, block_bytes)
    return planning.capacities_of(sizes, trace, model)


def _check_holds_block(option: str, num_bytes: int, block_bytes: int) -> None:
    if num_bytes < block_bytes:
        raise UsageError(
            f"{option}: {num_bytes} bytes hold no block, which takes {block_bytes}"
        )


def _store_sizes(trace: Trace, model: ModelCosts) -> list[int]:
    """Return sizes of a store, the largest a power of two that holds all blocks."""
    block_bytes = planning.block_bytes_of(trace, model)
    max_bytes = _power_of_two(2 * trace.num_unique_blocks * block_bytes - 1)
    sizes = [max_bytes >> i for i in range(_NUM_STORES)]
    return [size for size in sizes if size >= block_bytes]


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not more."""
    return 1 << number.bit_length() - 1

"""``jaxkv plan``: what host tiers of several sizes find, and which is worth it."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from functools import partial

from jaxkv._util import shown
from jaxkv.policies import policy_names
from jaxkv.tools import files
from jaxkv.tools.model_config import NAMED_MODELS, check_dtype
from jaxkv.tools.plan import report, server
from jaxkv.tools.plan.accelerators import ACCELERATORS
from jaxkv.tools.plan.model_costs import ModelCosts, find_model_costs, plain_costs
from jaxkv.tools.plan.plan import Setting, Timing, add_stores, make_plan
from jaxkv.tools.progress import show_progress
from jaxkv.tools.replay.admission import Admission
from jaxkv.tools.replay.fleet import ONE_ENGINE, ROUTES, Fleet
from jaxkv.tools.replay.run import OPTIMUM, sweep
from jaxkv.tools.replay.synthetic import make_synthetic_trace
from jaxkv.tools.replay.traces import BLOCK_SIZE, Trace, TraceError, read_trace
from jaxkv.tools.usage import (
    EXIT_OK,
    Args,
    Usage,
    UsageError,
    check_absent,
    check_belongs,
    number_from,
    one_of,
    whole_number_from,
)
from jaxkv.transfer import available_host_bytes

_SYNTHETIC = "synthetic"
_SYNTHETIC_REQUESTS = 2000
_CAPACITIES = ["1%", "3%", "10%"]
# Shares of the recorded host tier, as default sizes.
_SHARES = *(Fraction(quarters, 4) for quarters in range(1, 5)), Fraction(2)
_NUM_SIZES = 5
_ALL = "all"
_POLICIES = *policy_names(), OPTIMUM

USAGE = Usage(
    "jaxkv plan",
    "Replay a request trace against host tiers of several sizes and policies, and "
    "print what each would find. From a model's costs and a server's speeds, compute "
    "the time saved per request and the load on the link; recommend a size and a "
    "policy, or explain why offloading does not pay. No KV moves.",
    f"""
trace:
  TRACE...  trace file (Mooncake's or normalised format, plain or .gz), files of
      one recording, or {_SYNTHETIC}[:REQUESTS]
  --block-size N  tokens per block (default: the recording's, else {BLOCK_SIZE})

tiers and policies:
  --capacity N,...  host sizes in blocks, or percent of the unique blocks (default:
      {",".join(_CAPACITIES)}, or around the recorded host)
  --host-bytes SIZE,...  the same in bytes (default with a model: {_NUM_SIZES}, doubling
      up to all blocks or this machine's memory)
  --policy NAME,...  {", ".join(_POLICIES)}
      (default: {_ALL}, which leaves out {OPTIMUM})
  --device-blocks N  device prefix cache of N blocks, 0 for none (default: the
      recorded, else what weights leave of HBM)
  --device-bytes SIZE  the same in bytes, over all devices (default: as
      --device-blocks)
  --engines N  engines that share the requests (default: 1)
  --route NAME  round-robin, sticky (by conversation) or prefix (longest
      match) (default: {ROUTES[0]})
  --storage-blocks N,...  write-through stores of N blocks, or percent, that the
      engines share (default: none)
  --storage-bytes SIZE,...  the same in bytes (default: as --storage-blocks)

model, for times and a recommendation:
  --model MODEL  config.json from Hugging Face, its folder or a name such as
      {next(iter(NAMED_MODELS))}
  --kv-dtype NAME  dtype of the KV, such as float8_e4m3fn (default: the model's)
  --kv-bytes-per-token SIZE  KV bytes per token, all layers (default: the model's)
  --tensor-parallel N  devices that share the KV heads (default: 1)

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
  --price-per-hour X  price of a server, for what is saved (default: none)
  --price-per-gib-month X  price of host memory (default: 0)

admission, with every policy except {OPTIMUM}:
  --store-threshold N  store a block once N requests have asked for it (default: 0,
      store all)
  --max-unseen-blocks N  per request, store at most N blocks that no request has
      asked for before (default: all)
  --max-offload-tokens N  per request, store only the first N tokens (default: all)
  --prompt-only  do not store blocks that outputs filled; only recordings list them
      (default: store them)

output:
{files.PLOT_OPTION.format("tokens found and time saved against the size")}
{files.OUTPUT_OPTIONS}
{files.HTML_OPTION}

examples:
  jaxkv plan {_SYNTHETIC}
  jaxkv plan trace.jsonl.gz --policy all,optimum --capacity 1%,10%
  jaxkv plan trace.jsonl --model llama-3.1-8b --accelerator h100 --html out.html
""",
    {
        **dict.fromkeys(
            ("--device-blocks", "--store-threshold", "--max-unseen-blocks"),
            whole_number_from(0),
        ),
        **dict.fromkeys(("--capacity", "--storage-blocks"), str),
        "--policy": one_of([*_POLICIES, _ALL]),
        "--route": one_of(ROUTES),
        "--accelerator": one_of(list(ACCELERATORS)),
        "--load-latency-ms": number_from(0, "from 0"),
    },
)
_OF_MODEL = (
    *("host_bytes", "device_bytes", "storage_bytes", "kv_dtype", "tensor_parallel"),
    *("accelerator", "load_gb_per_s", "store_gb_per_s", "load_latency_ms"),
    *("prefill_tokens_per_s", "flops_per_s", "mfu", "price_per_hour"),
)


def run(args: Args) -> int:
    files.check_files(args)
    files.check_extra("plan")
    names = "route", "storage_blocks", "storage_bytes"
    check_belongs(args, names, "--engines", args.engines)
    model = _read_model(args)
    server.check_speeds(args)
    check_belongs(
        args, ("price_per_gib_month",), "--price-per-hour", args.price_per_hour
    )
    trace = _open_trace(args.trace, args.block_size)
    fleet = _choose_fleet(args, trace)
    policies = _choose_policies(args.policy, fleet)
    admission = _choose_admission(args, trace)
    # The bytes of a block, or 1 if sizes are in blocks.
    unit = 1 if model is None else trace.block_size * model.kv_bytes_per_token
    device_blocks = _choose_device_blocks(args, trace, unit)
    sizes, notes = _choose_sizes(args, trace, unit, has_model=model is not None)
    stores = _sizes_of(args, "storage_bytes", "storage_blocks", trace, unit) or []
    timing = None
    if model is not None:
        timing = _time(args, trace, model, device_blocks)
        if device_blocks is None:
            device_blocks = server.device_blocks_of(
                timing.machine, model, timing.num_devices, trace.block_size
            )
        if timing.machine == ACCELERATORS["cpu"] and args.accelerator is None:
            note = "the server is assumed to be this CPU: set --accelerator"
            notes = *notes, note
    largest = int(trace.num_blocks.max(initial=0))
    if sizes[0] // unit < largest:
        notes = (
            *notes,
            f"sizes below {largest:,} blocks hold only part of the largest request",
        )
    prices = args.price_per_hour, args.price_per_gib_month or 0.0
    setting = Setting(trace, timing, device_blocks, notes, admission, fleet, *prices)
    report.print_setting(setting)
    # A larger device would hold no more. Each prompt may end with a block that is not
    # full, and is not listed.
    max_blocks = trace.num_unique_blocks + trace.num_requests
    device_blocks = min(device_blocks, max_blocks) if device_blocks else None
    with show_progress(is_quiet=args.quiet) as on_progress:
        rest = on_progress, device_blocks, admission
        results = sweep(
            trace, policies, sorted(set(setting.capacities_of(sizes))), *rest, [fleet]
        )
        plan = make_plan(setting, sizes, results)
        if stores:
            base = plan.base
            fleets = [
                dataclasses.replace(fleet, storage_blocks=num)
                for num in sorted(set(setting.capacities_of(stores)))
            ]
            stored = sweep(trace, [base.policy], [base.capacity_blocks], *rest, fleets)
            plan = add_stores(setting, plan, results[0], stores, stored)
    report.print_plan(setting, plan)
    files.write_files(
        args,
        partial(report.to_json, setting, plan),
        partial(report.draw_plan, setting, plan),
        partial(report.render_page, setting, plan),
    )
    return EXIT_OK


def _open_trace(paths: list[str], block_size: int | None) -> Trace:
    text = paths[0]
    name, _, number = text.partition(":")
    if name == _SYNTHETIC and len(paths) == 1:
        if text != _SYNTHETIC and not re.fullmatch(r"[1-9]\d{0,6}", number):
            raise UsageError(
                f"TRACE: {shown(text)} must be {_SYNTHETIC}:REQUESTS, such as "
                f"{_SYNTHETIC}:{_SYNTHETIC_REQUESTS}"
            )
        num_requests = int(number or _SYNTHETIC_REQUESTS)
        return make_synthetic_trace(num_requests, block_size=block_size or BLOCK_SIZE)
    try:
        return read_trace(paths, block_size)
    except TraceError as error:
        raise UsageError(error) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no name of a file"
        text = getattr(error, "filename", None) or text
        raise UsageError(f"TRACE: cannot read {shown(str(text))} ({why})") from error


def _choose_fleet(args: Args, trace: Trace) -> Fleet:
    num, num_requests = args.engines or 1, trace.num_requests
    if num > num_requests:
        raise UsageError(
            f"--engines: {num} must be at most {num_requests}, the requests of the "
            "trace"
        )
    return Fleet(num, args.route or ROUTES[0]) if num > 1 else ONE_ENGINE


def _choose_policies(names: list[str] | None, fleet: Fleet) -> list[str]:
    """Return the policies that --policy names, the optimum last."""
    names = names or [_ALL]
    chosen = [name for name in names if name not in (_ALL, OPTIMUM)]
    chosen = list(dict.fromkeys(chosen + policy_names() * (_ALL in names)))
    if not chosen:
        raise UsageError(f"--policy: {OPTIMUM} is only a bound: name a policy as well")
    if OPTIMUM in names and fleet != ONE_ENGINE:
        raise UsageError(f"--policy: {OPTIMUM} is for one engine: omit --engines")
    return chosen + [OPTIMUM] * (OPTIMUM in names)


def _choose_admission(args: Args, trace: Trace) -> Admission | None:
    """Return what to keep out; None for nothing. Refuse what has no effect."""
    num_tokens, block_size = args.max_offload_tokens, trace.block_size
    if num_tokens is not None and num_tokens < block_size:
        raise UsageError(
            f"--max-offload-tokens: {num_tokens} is less than a block, which has "
            f"{block_size} tokens: nothing would be stored"
        )
    if args.prompt_only and not trace.num_output_blocks.any():
        raise UsageError(
            "--prompt-only: no output of the trace filled a block that could be left "
            "out; only recorded traces have such blocks"
        )
    threshold, rest = args.store_threshold or 0, (args.prompt_only, num_tokens)
    threshold = threshold if threshold > 1 else 0
    admission = Admission(threshold, args.max_unseen_blocks, *rest)
    return admission if admission.changed else None


def _read_model(args: Args) -> ModelCosts | None:
    if args.kv_dtype is not None:
        try:
            check_dtype(args.kv_dtype)
        except ValueError as error:
            raise UsageError(f"--kv-dtype: {error}") from error
    if args.model is not None:
        if args.kv_bytes_per_token is not None:
            raise UsageError("--kv-bytes-per-token: --model says it already")
        try:
            return find_model_costs(args.model, args.kv_dtype)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None)
            path = getattr(error, "filename", None) or args.model
            text = f"cannot read {shown(path)} ({why})" if why else str(error)
            raise UsageError(f"--model: {text}") from error
    if args.kv_bytes_per_token is None:
        check_absent(args, _OF_MODEL, "{}: it belongs to --model, so give that too")
        if args.measure:
            raise UsageError("--measure: it belongs to --model, so give that too")
        return None
    names = "kv_dtype", "tensor_parallel", "flops_per_s", "mfu"
    check_belongs(args, names, "--model", None)
    if args.prefill_tokens_per_s is None:
        raise UsageError(
            "--kv-bytes-per-token: it does not say how long prefill takes: give "
            "--prefill-tokens-per-s too, or --model instead"
        )
    try:
        return plain_costs(args.kv_bytes_per_token)
    except ValueError as error:
        raise UsageError(f"--kv-bytes-per-token: {error}") from error


def _time(
    args: Args, trace: Trace, model: ModelCosts, device_blocks: int | None
) -> Timing:
    """Return the model on a server, whose speeds may be measured."""
    machine = server.find_machine(args, trace.recording)
    num_devices = args.tensor_parallel or 1
    if args.device_bytes is not None or args.device_blocks is not None:
        option = f"--device-{'blocks' if args.device_bytes is None else 'bytes'}"
        num_tokens = (device_blocks or 0) * trace.block_size
        server.check_hbm(machine, model, num_devices, num_tokens, option)
    speeds, sources = server.choose_speeds(args, machine, num_devices)
    return Timing(model, speeds, sources, num_devices, machine)


def _choose_device_blocks(args: Args, trace: Trace, unit: int) -> int | None:
    if args.device_bytes is not None:
        if args.device_blocks is not None:
            raise UsageError("--device-bytes: --device-blocks says it already")
        _check_holds_block("--device-bytes", args.device_bytes, unit)
        return int(args.device_bytes // unit)
    blocks: int | None = args.device_blocks
    if blocks is None and trace.recording is not None:
        blocks = trace.recording.device_blocks
    return blocks


def _choose_sizes(
    args: Args, trace: Trace, unit: int, *, has_model: bool
) -> tuple[list[int], tuple[str, ...]]:
    sizes = _sizes_of(args, "host_bytes", "capacity", trace, unit)
    if sizes is not None:
        return sizes, ()
    num_unique, recording = trace.num_unique_blocks, trace.recording
    if not has_model:
        if recording is None or not recording.host_blocks:
            return _parse_blocks("--capacity", _CAPACITIES, num_unique, unit), ()
        whole = min(recording.host_blocks, num_unique)
        return sorted(
            {max(1, min(int(share * whole), num_unique)) for share in _SHARES}
        ), ()
    # A power of two that holds all blocks, or the largest that fits this machine.
    max_bytes, memory = 2 * num_unique * unit - 1, available_host_bytes()
    notes: tuple[str, ...] = ()
    if memory is not None and memory.num_bytes < 1 << max_bytes.bit_length() - 1:
        max_bytes = memory.num_bytes
        note = "sizes go up to this machine's memory: name the server's with "
        notes = (f"{note}--host-bytes",)
    last = max_bytes.bit_length() - 1
    sizes = [1 << i for i in range(max(last - _NUM_SIZES + 1, 0), last + 1)]
    sizes = [size for size in sizes if size >= unit]
    if not sizes:
        raise UsageError(
            "--host-bytes: not even a block fits this machine's memory; name the sizes"
        )
    return sizes, notes


def _sizes_of(
    args: Args, in_bytes: str, in_blocks: str, trace: Trace, unit: int
) -> list[int] | None:
    """Return the sizes of one of two options in ascending order; None without them."""
    sizes, texts = getattr(args, in_bytes), getattr(args, in_blocks)
    options = [f"--{name.replace('_', '-')}" for name in (in_bytes, in_blocks)]
    if None not in (sizes, texts):
        raise UsageError(f"{options[0]}: {options[1]} says it already")
    if texts is not None:
        return _parse_blocks(options[1], texts, trace.num_unique_blocks, unit)
    for size in sizes or ():
        _check_holds_block(options[0], size, unit)
    return sorted(set(sizes)) if sizes else None


def _parse_blocks(
    option: str, texts: list[str], num_unique: int, unit: int
) -> list[int]:
    """Return numbers of blocks, or percentages of the unique ones, as sizes."""
    sizes = set()
    for text in texts:
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)(%?)", text)
        if match is None or ("." in text and not match[2]):
            raise UsageError(
                f"{option}: {shown(text)} must be a number of blocks, such as 5000, or "
                "a percentage, such as 3%"
            )
        number = Fraction(match[1])
        if number == 0:
            raise UsageError(f"{option}: {shown(text)} must be more than 0")
        blocks = int(number * num_unique / 100) if match[2] else int(number)
        if blocks > num_unique:
            raise UsageError(
                f"{option}: {shown(text)} is more than the {num_unique:,} unique "
                "blocks of the trace, which would never be full"
            )
        sizes.add(max(blocks, 1) * unit)
    return sorted(sizes)


def _check_holds_block(option: str, num_bytes: int, unit: int) -> None:
    if num_bytes < unit:
        raise UsageError(
            f"{option}: {num_bytes} bytes hold no block, which takes {unit}"
        )

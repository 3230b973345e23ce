"""``jaxkv replay``: the hit ratios of cache policies on a request trace."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from functools import partial

from jaxkv._util import shown
from jaxkv.policies import policy_names
from jaxkv.policies.registry import AUTO
from jaxkv.tools import files
from jaxkv.tools.model_config import NAMED_MODELS
from jaxkv.tools.progress import show_progress
from jaxkv.tools.replay import page, report
from jaxkv.tools.replay.admission import Admission
from jaxkv.tools.replay.fleet import ONE_ENGINE, ROUTES, Fleet
from jaxkv.tools.replay.measures import Comparison
from jaxkv.tools.replay.model_costs import ModelCosts, find_model_costs
from jaxkv.tools.replay.run import OPTIMUM, STORE_ALONE, sweep
from jaxkv.tools.replay.synthetic import make_synthetic_trace
from jaxkv.tools.replay.traces import BLOCK_SIZE, Trace, TraceError, read_trace
from jaxkv.tools.usage import (
    EXIT_OK,
    Args,
    Usage,
    UsageError,
    check_belongs,
    one_of,
    whole_number_from,
)

SUMMARY = "compare cache policies on a request trace"

_SYNTHETIC = "synthetic"
_SYNTHETIC_REQUESTS = 2000
_CAPACITIES = "1%,3%,10%"
# Of the host tier that was recorded.
_SHARES = *(Fraction(quarters, 4) for quarters in range(1, 5)), Fraction(2)
ALL = "all"
"""Stands for all policies in --policy."""

TRACE_OPTIONS = f"""\
trace:
  TRACE...  trace file (Mooncake's or normalised format, plain or .gz), files of
      one recording, or {_SYNTHETIC}[:REQUESTS]
  --block-size N  tokens per block (default: the recording's, else {BLOCK_SIZE})"""

POLICY_OPTION = f"""\
  --policy NAME,...  {", ".join([*policy_names(), AUTO])} (default: {ALL})"""

DEVICE_OPTION = """\
  --device-blocks N  device prefix cache of N blocks, 0 for none (default: the
      recording's, else none)"""

FLEET_OPTIONS = f"""\
  --engines N  engines that share the requests (default: 1)
  --route NAME  round-robin, sticky (by conversation) or prefix (longest
      match) (default: {ROUTES[0]})"""

ADMISSION_OPTIONS = """\
admission, with every policy:
  --store-threshold N  store a block once N requests have asked for it (default: 0,
      store all)
  --max-unseen-blocks N  per request, store at most N blocks that no request has
      asked for before (default: all)
  --max-offload-tokens N  per request, store only the first N tokens (default: all)
  --prompt-only  do not store blocks that outputs filled; only recordings list them
      (default: store them)"""

PARSERS = {
    **dict.fromkeys(
        ("--device-blocks", "--store-threshold", "--max-unseen-blocks"),
        whole_number_from(0),
    ),
    "--policy": one_of([*policy_names(), AUTO, ALL]),
    "--route": one_of(ROUTES),
}

USAGE = Usage(
    "jaxkv replay",
    "Replay a request trace against cache policies at several capacities, and against "
    "the offline optimum. Print the share of the prompts that each finds as a prefix. "
    "No KV moves.",
    f"""
{TRACE_OPTIONS}

policies and capacities:
{POLICY_OPTION}
  --capacity N,...  host blocks, or percent of the unique blocks (default:
      {_CAPACITIES}, or 1/4 to 2 times the recorded host)
  --no-optimum  do not replay the optimum (default: it is the last row)

device and engines:
{DEVICE_OPTION}
{FLEET_OPTIONS}
  --storage-blocks N  write-through store of N blocks, or percent, that the engines
      share (default: none)

{ADMISSION_OPTIONS}

output:
  --model MODEL  count prefill FLOPs saved, of a config.json, its folder or a name
      such as {next(iter(NAMED_MODELS))}
{files.PLOT_OPTION.format("what is found against the capacity")}
{files.JSON_OPTION}
{files.HTML_OPTION}
{files.QUIET_OPTION}
""",
    {**PARSERS, "--capacity": str, "--storage-blocks": str},
)


def run(args: Args) -> int:
    """Run the command; return its exit code."""
    files.check_files(args)
    files.check_extra("replay")
    policies = choose_policies(args.policy)
    model = None if args.model is None else find_model(args.model)
    check_belongs(args, ("route", "storage_blocks"), "--engines", args.engines)
    trace = open_trace(args.trace, args.block_size)
    capacities = _choose_capacities(args.capacity, trace)
    _check_device(args.device_blocks, trace)
    device_blocks = choose_device_blocks(args.device_blocks, trace)
    admission = choose_admission(args, trace)
    fleets = [choose_fleet(args, trace)]
    if args.storage_blocks is not None:
        num = _parse_capacity(
            "--storage-blocks", args.storage_blocks, trace.num_unique_blocks
        )
        fleets.append(dataclasses.replace(fleets[0], storage_blocks=num))
    report.print_trace(trace)
    if fleets[0] == ONE_ENGINE and not args.no_optimum:
        policies.append(OPTIMUM)
    if fleets[-1].storage_blocks:
        policies.append(STORE_ALONE)
    with show_progress(is_quiet=args.quiet) as on_progress:
        results = sweep(
            trace, policies, capacities, on_progress, device_blocks, admission, fleets
        )
    comparison = Comparison(trace, results, model, admission)
    report.print_results(comparison)
    files.write_files(
        args,
        partial(report.to_json, comparison),
        partial(report.draw_results, comparison),
        partial(page.render_page, comparison),
    )
    return EXIT_OK


def choose_fleet(args: Args, trace: Trace) -> Fleet:
    """Return the engines that --engines and --route name, without a store."""
    num: int = args.engines or 1
    if num > trace.num_requests:
        raise UsageError(
            f"--engines: {num} must be at most {trace.num_requests}, the requests of "
            "the trace"
        )
    return Fleet(num, args.route or ROUTES[0]) if num > 1 else ONE_ENGINE


def choose_policies(names: list[str] | None) -> list[str]:
    """Return the policies that --policy names; all of them if it is not given."""
    names = names or [ALL]
    chosen = [name for name in names if name != ALL]
    return list(dict.fromkeys(chosen + policy_names() * (ALL in names)))


def find_model(text: str, kv_dtype: str | None = None) -> ModelCosts:
    """Return what the tokens of the model of --model cost."""
    try:
        return find_model_costs(text, kv_dtype)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None)
        path = getattr(error, "filename", None) or text
        text = f"cannot read {shown(path)} ({why})" if why else str(error)
        raise UsageError(f"--model: {text}") from error


def choose_admission(args: Args, trace: Trace) -> Admission | None:
    """Return what to keep out; None for nothing. Refuse what has no effect."""
    num_tokens, block_size = args.max_offload_tokens, trace.block_size
    if num_tokens is not None and num_tokens < block_size:
        raise UsageError(
            f"--max-offload-tokens: {num_tokens} is less than a block, which has "
            f"{block_size} tokens: nothing would be stored"
        )
    if args.prompt_only and not (trace.num_blocks > trace.num_asked).any():
        raise UsageError(
            "--prompt-only: no output of the trace filled a block that could be left "
            "out; only recorded traces have such blocks"
        )
    threshold = args.store_threshold or 0
    admission = Admission(
        store_threshold=threshold if threshold > 1 else 0,
        max_unseen_blocks=args.max_unseen_blocks,
        prompt_only=args.prompt_only,
        max_offload_tokens=num_tokens,
    )
    return admission if admission.changed else None


def _check_device(num_blocks: int | None, trace: Trace) -> None:
    """Refuse a device that nothing would ever leave."""
    if num_blocks is not None and num_blocks > _most_device_blocks(trace):
        raise UsageError(
            f"--device-blocks: {num_blocks} is more than the trace would ever fill: it "
            f"has {trace.num_unique_blocks:,} unique blocks"
        )


def choose_device_blocks(num_blocks: int | None, trace: Trace) -> int | None:
    """Return the blocks of the device in front: those given, else those recorded."""
    if num_blocks is None and trace.recording is not None:
        num_blocks = trace.recording.device_blocks
    return min(num_blocks, _most_device_blocks(trace)) if num_blocks else None


def _most_device_blocks(trace: Trace) -> int:
    """Return the blocks that a trace can fill."""
    # Each prompt may end with a block that is not full, and is not listed.
    return trace.num_unique_blocks + trace.num_requests


def _choose_capacities(texts_given: list[str] | None, trace: Trace) -> list[int]:
    """Return the capacities in blocks, in ascending order."""
    num_unique, recording = trace.num_unique_blocks, trace.recording
    if texts_given is None and recording is not None and recording.host_blocks:
        whole = min(recording.host_blocks, num_unique)
        return sorted(
            {max(1, min(int(share * whole), num_unique)) for share in _SHARES}
        )
    texts = _CAPACITIES.split(",") if texts_given is None else texts_given
    return sorted({_parse_capacity("--capacity", text, num_unique) for text in texts})


def _parse_capacity(option: str, text: str, num_unique: int) -> int:
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)(%?)", text)
    if match is None or ("." in text and not match[2]):
        raise UsageError(
            f"{option}: {shown(text)} must be a number of blocks, such as 5000, or a "
            f"percentage, such as 3%"
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
    return max(blocks, 1)


def open_trace(paths: list[str], block_size: int | None) -> Trace:
    """Read the trace that a command line names, or make one up."""
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

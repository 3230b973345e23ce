"""``jaxkv demo``: show the effect of offloading on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from functools import partial

from jaxkv._util import gib, rounded_size
from jaxkv.policies import policy_names
from jaxkv.scheduling.record.record import TraceRecorder
from jaxkv.tools.console import make_console, print_facts, print_lines
from jaxkv.tools.demo.records import DemoConfig, DemoRecord
from jaxkv.tools.files import (
    OUTPUT_OPTIONS,
    PLOT_OPTION,
    check_extra,
    check_files,
    write_files,
)
from jaxkv.tools.progress import show_progress
from jaxkv.tools.usage import (
    EXIT_FAILED,
    EXIT_OK,
    Args,
    Usage,
    UsageError,
    one_of,
    whole_number_from,
)
from jaxkv.transfer.storage.store_url import shown_url

_LAYERS = {
    "full": "full attention in all layers",
    "window": "sliding window of {} tokens in all layers",
    "hybrid": "alternating layers of full attention and a sliding window of {} tokens",
}
_ASK_FOR_LESS = "use fewer --device-blocks or --host-bytes"


USAGE = Usage(
    "jaxkv demo",
    "Ask a small model several turns of questions about long documents, with a device "
    "pool that is several times too small for their KV, once with offloading off and "
    "once with it on. Compare latencies, and check that every token is identical.",
    f"""
conversations:
  --conversations N  number of conversations, each about its own document
  --turns N  questions per conversation
  --document-tokens N  document length (one token is one byte)
  --answer-tokens N  tokens generated per question
  --seed N  seed for weights and documents (default: 0)

engine:
  --concurrency N  maximum number of running requests
  --device-blocks N  KV blocks of 32 tokens in the device pool
  --layers NAME  attention: full, window (sliding) or hybrid (alternating)
  --window-tokens N  size of the sliding window

offloading:
  --host-bytes SIZE  host memory for KV
  --mode NAME  eager: store blocks when computed; lazy: just before eviction
  --policy NAME  eviction policy: {", ".join(policy_names())}
      (default: lru)
  --storage URL  folder or URL of a store behind host memory, kept for later runs
  --storage-bytes SIZE  capacity of the store

output:
  --record FILE  record the requests for `jaxkv plan`
{PLOT_OPTION.format("time to first token by turn")}
{OUTPUT_OPTIONS}

examples:
  jaxkv demo
  jaxkv demo --layers hybrid --record requests.jsonl --plot ttft.svg
""",
    {
        "--seed": whole_number_from(0),
        "--mode": one_of(("eager", "lazy")),
        "--layers": one_of(("full", "window", "hybrid")),
        "--policy": one_of(policy_names()),
    },
    vars(DemoConfig()) | {"policy": DemoConfig.cache_policy},
)


def run(args: Args) -> int:
    names = {field.name for field in dataclasses.fields(DemoConfig)}
    values = {name: value for name, value in vars(args).items() if name in names}
    config = DemoConfig(**values | {"cache_policy": args.policy})
    check_files(args)
    check_extra("the demo", ("flax", "rich"))
    if config.layers == "full" and config.window_tokens != DemoConfig.window_tokens:
        raise UsageError("--window-tokens: it belongs to --layers window or hybrid")

    from jaxkv.tools.demo import report, workload
    from jaxkv.tools.demo import run as demo_run
    from jaxkv.transfer.storage import StoreError, open_store

    try:
        demo_run.check_config(config)
        workload.make_conversations(config)
        _check_memory(config)
        if config.storage is not None:
            open_store(config.storage).close()
    except (ValueError, ImportError, StoreError) as error:
        raise UsageError(error) from error

    with contextlib.ExitStack() as stack:
        recorder = None
        if args.record:
            try:
                recorder = stack.enter_context(TraceRecorder(args.record))
            except OSError as error:
                raise UsageError(f"--record: {error.strerror}") from error
        print_facts(_facts_of(config), 15)
        try:
            with show_progress(is_quiet=args.quiet) as on_progress:
                record = demo_run.run_demo(config, on_progress, recorder=recorder)
        except MemoryError as error:
            raise UsageError(f"{_ASK_FOR_LESS}: {error}") from error
        report.print_report(record, make_console())
        if recorder is not None:
            recorder.flush()
            print_lines(_next_commands(recorder, record), is_code=True)
        draw = partial(report.draw_ttft, record)
        write_files(args, partial(report.to_json, record), draw)
    return EXIT_OK if record.tokens_identical else EXIT_FAILED


def _next_commands(recorder: TraceRecorder, record: DemoRecord) -> list[str]:
    """Return the commands that use the trace: compare policies, then choose a size."""
    from jaxkv.tools.demo.run import model_config

    stats, path = recorder.stats, shlex.quote(str(recorder.path))
    dropped = f" ({stats.num_dropped:,} dropped)" if stats.num_dropped else ""
    turns, speed = record.off.turns, record.bandwidth
    rate = sum(t.prefilled_tokens for t in turns) / sum(t.ttft_s for t in turns)
    return [
        "",
        f"Recorded {stats.num_written:,} requests{dropped}. To compare policies and "
        "sizes on them:",
        f"  jaxkv plan {path}",
        "To choose the host memory for this traffic, at the speeds measured here:",
        f"  jaxkv plan {path} --html plan.html --kv-bytes-per-token "
        f"{model_config(record.config).kv_bytes_per_token} --prefill-tokens-per-s "
        f"{rate:.0f} --load-gb-per-s {speed.load.p50_gb_per_s:.2f} --store-gb-per-s "
        f"{speed.save.p50_gb_per_s:.2f}",
    ]


def _check_memory(config: DemoConfig) -> None:
    from jaxkv.tools.demo.run import block_bytes
    from jaxkv.transfer import available_host_bytes

    wanted = config.device_blocks * block_bytes(config) + config.host_bytes
    limit = available_host_bytes()
    if limit is not None and wanted > limit.num_bytes:
        raise UsageError(
            f"the device pool and the host tier need {gib(wanted)}, but "
            f"{limit.source} has {gib(limit.num_bytes)}: {_ASK_FOR_LESS}"
        )


def _facts_of(config: DemoConfig) -> list[tuple[str, str]]:
    from jaxkv.tools.demo.run import max_seq_tokens, model_config

    model = model_config(config)
    token_bytes = model.kv_bytes_per_token
    num_groups = len(model.groups(config.block_size))
    total = config.conversations * max_seq_tokens(config) * token_bytes * num_groups
    pool = config.device_blocks * config.block_size * token_bytes
    fit = (
        f"{total / pool:.1f} times too small"
        if total > pool
        else "holds all of it; use fewer --device-blocks to see an effect"
    )
    # At 4,000 tokens per second, which two cores compute, and 20 s to compile.
    num_tokens = config.conversations * (config.turns + 1) * max_seq_tokens(config)
    minutes = math.ceil((num_tokens / 4000 + 20) / 60)
    facts = [
        ("Takes", f"about {minutes} minute{'s' * (minutes > 1)} on two CPU cores"),
        (
            "Conversations",
            f"{config.conversations} with {config.turns} turns each, about documents "
            f"of {config.document_tokens:,} tokens",
        ),
        ("Total KV", f"at most {rounded_size(total)}"),
        (
            "Device pool",
            f"{rounded_size(pool)}, {config.device_blocks} blocks of "
            f"{config.block_size} tokens: {fit}",
        ),
        (
            "Host memory",
            f"{rounded_size(config.host_bytes)}, {config.mode} stores, policy "
            f"{config.cache_policy}",
        ),
    ]
    if config.storage is not None:
        place, size = shown_url(config.storage), rounded_size(config.storage_bytes)
        facts.append(("Storage", f"{place}, at most {size}"))
    what = _LAYERS[config.layers].format(config.window_tokens)
    return [*facts, ("Model", what)]

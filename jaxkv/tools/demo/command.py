"""``jaxkv demo``: show the effect of offloading on this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import shlex
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

from jaxkv._util import gib, rounded_size
from jaxkv.policies import policy_names
from jaxkv.policies.registry import AUTO
from jaxkv.scheduling.record.record import TraceRecorder
from jaxkv.tools.console import make_console, print_facts, print_lines
from jaxkv.tools.demo.records import DemoConfig, DemoRecord
from jaxkv.tools.options import (
    EXIT_FAILED,
    EXIT_OK,
    Parser,
    UsageError,
    check_belongs,
    check_extra,
    check_files,
    check_names,
    parse_bytes,
    parse_port,
    parse_whole_number_from,
    write_files,
)
from jaxkv.tools.progress import show_progress
from jaxkv.transfer.storage.store_url import shown_url

if TYPE_CHECKING:
    from jaxkv.tools.demo.engine import Engine

SUMMARY = "see what offloading does on this machine, in about a minute"
DESCRIPTION = (
    "Ask a small model several turns of questions about long documents, with a device "
    "pool several times too small for their KV. Do it with offloading off and on; "
    "compare times and check that every token is the same."
)


_LAYERS = {
    "full": "all layers attend to everything",
    "window": "all layers attend to the last {} tokens",
    "hybrid": "layers attend alternately to everything and to the last {} tokens",
}
_ASK_FOR_LESS = "ask for fewer --device-blocks or --host-bytes"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    default = DemoConfig()
    for field, minimum, about in (
        ("conversations", 1, "conversations, each about a different document"),
        ("turns", 1, "questions in each conversation"),
        ("document_tokens", 1, "length of a document, in tokens of one byte"),
        ("answer_tokens", 1, "tokens generated for each question"),
        ("concurrency", 1, "requests that run at the same time"),
        ("device_blocks", 1, f"KV blocks of {default.block_size} tokens on the device"),
        ("window_tokens", 1, "how far back layers with a window look"),
        ("seed", 0, "seed of the weights and of the choice of documents"),
    ):
        usage, parse = (
            f"--{field.replace('_', '-')} N",
            parse_whole_number_from(minimum),
        )
        parser.value(usage, about, parse, getattr(default, field))
    for field, choices, about in (
        ("mode", ("eager", "lazy"), "store blocks when computed, or before eviction"),
        ("layers", ("full", "window", "hybrid"), "what the model's layers attend to"),
    ):
        parser.add_argument(
            f"--{field}",
            choices=choices,
            default=getattr(default, field),
            help=f"{about} (default: %(default)s)",
        )
    parser.add_argument(
        "--policy",
        dest="cache_policy",
        default=default.cache_policy,
        metavar="NAME",
        help="which blocks a full host tier evicts: one of "
        f"{', '.join([*policy_names(), AUTO])} (default: %(default)s)",
    )
    parser.flag(
        "--load-in-step",
        "let the prefill program write loaded blocks itself, layer by layer, instead "
        "of waiting until the whole load is there",
        "wait",
    )
    parser.value(
        "--host-bytes SIZE",
        "host memory for KV, such as 64MiB, 1GiB or a number of bytes",
        parse_bytes,
        "256MiB",
    )
    parser.value(
        "--serve-metrics PORT",
        "serve the metrics of the engine with offloading for Prometheus, at this port "
        "of 127.0.0.1, while it runs; 0 for any free port",
        parse_port,
        otherwise="do not serve them",
    )
    parser.value(
        "--seconds N",
        "after the comparison, go on with other conversations until the metrics have "
        "been served for N seconds",
        parse_whole_number_from(1),
        otherwise="end with the comparison",
    )
    parser.value(
        "--record FILE",
        "record the requests of the run with offloading, for `jaxkv replay`",
        pathlib.Path,
        otherwise="no file",
    )
    parser.value(
        "--storage URL",
        "put a store, a folder or a URL such as redis://HOST:PORT, behind the host "
        "memory; a second run then finds what the first has written",
    )
    parser.value(
        "--storage-bytes SIZE", "how much the store may hold", parse_bytes, "4GiB"
    )
    parser.files("the time to first token, turn by turn")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    names = {field.name for field in dataclasses.fields(DemoConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    config = dataclasses.replace(DemoConfig(), **given)
    check_names("--policy", [config.cache_policy], [*policy_names(), AUTO])
    check_files(args)
    check_extra("the demo", ("flax", "rich", "matplotlib"))
    if args.serve_metrics is not None:
        check_extra("--serve-metrics", ("prometheus_client",), "metrics")
        _check_port(args.serve_metrics)
    else:
        check_belongs(args, ("seconds",), "--serve-metrics", None)

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
        print_facts(_what_will_run(config), 15)
        watched: list[tuple[Engine, float]] = []

        def watch(engine: Engine) -> None:
            if args.serve_metrics is not None:
                port = _serve_metrics(engine, args.serve_metrics, stack)
                url = f"http://127.0.0.1:{port}/metrics"
                print_facts([("Metrics", url)], 15)
            watched.append((engine, time.monotonic()))

        try:
            with show_progress() as on_progress:
                record = demo_run.run_demo(config, on_progress, watch, recorder)
        except MemoryError as error:
            raise UsageError(f"{_ASK_FOR_LESS}: {error}") from error
        report.print_report(record, make_console())
        if recorder is not None:
            recorder.flush()
            print_lines(_what_was_recorded(recorder, record), is_code=True)
        draw = partial(report.plot_ttft, record)
        write_files(args, partial(report.to_json, record), draw)
        if args.seconds is not None:
            ((engine, began_s),) = watched
            end_s = began_s + args.seconds
            with show_progress() as on_progress:
                on_progress("serving metrics", 0, 0)
                demo_run.keep_asking(engine, config, lambda: time.monotonic() > end_s)
    return EXIT_OK if record.tokens_identical else EXIT_FAILED


def _what_was_recorded(recorder: TraceRecorder, record: DemoRecord) -> list[str]:
    """Say what to do with the trace: compare policies, then decide on a size."""
    from jaxkv.tools.demo.run import model_config

    stats, path = recorder.stats, shlex.quote(str(recorder.path))
    lost = f" ({stats.num_dropped:,} were lost)" if stats.num_dropped else ""
    turns, speed = record.off.turns, record.bandwidth
    rate = sum(t.prefilled_tokens for t in turns) / sum(t.ttft_s for t in turns)
    return [
        "",
        f"Recorded {stats.num_written:,} requests{lost}. What other policies and sizes "
        "would have found:",
        f"  jaxkv replay {path}",
        "How much host memory this traffic is worth, at the speeds measured here:",
        f"  jaxkv plan {path} --html plan.html --kv-bytes-per-token "
        f"{model_config(record.config).kv_bytes_per_token} --prefill-tokens-per-s "
        f"{rate:.0f} --load-gb-per-s {speed.load_gb_per_s:.2f} --store-gb-per-s "
        f"{speed.store_gb_per_s:.2f}",
    ]


def _check_port(port: int) -> None:
    """Refuse a port that is taken, before a long run."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        raise UsageError(
            f"--serve-metrics: cannot listen at 127.0.0.1:{port} ({error.strerror}); "
            "give another port, or 0 for any that is free"
        ) from error


def _serve_metrics(engine: Engine, port: int, served: contextlib.ExitStack) -> int:
    """Serve the metrics of an engine until the stack is closed; return the port."""
    from prometheus_client import CollectorRegistry

    from jaxkv.observe.metrics import OffloadMetrics

    metrics = OffloadMetrics(
        engine.offload, engine.worker, engine.blocks, CollectorRegistry()
    )
    served.callback(metrics.close)
    try:
        return metrics.serve(port)
    except OSError as error:
        raise UsageError(f"--serve-metrics: {error.strerror}") from error


def _check_memory(config: DemoConfig) -> None:
    from jaxkv.tools.demo.run import block_bytes
    from jaxkv.transfer import available_host_bytes

    wanted = config.device_blocks * block_bytes(config) + config.host_bytes
    limit = available_host_bytes()
    if limit is not None and wanted > limit.num_bytes:
        raise UsageError(
            f"the device pool and the host tier would take {gib(wanted)}, but "
            f"{limit.source} has {gib(limit.num_bytes)}: {_ASK_FOR_LESS}"
        )


def _what_will_run(config: DemoConfig) -> list[tuple[str, str]]:
    from jaxkv.tools.demo.run import max_seq_tokens, model_config

    model = model_config(config)
    token_bytes = model.kv_bytes_per_token
    num_groups = len(model.groups(config.block_size))
    total = config.conversations * max_seq_tokens(config) * token_bytes * num_groups
    pool = config.device_blocks * config.block_size * token_bytes
    fit = (
        f"{total / pool:.1f} times too small"
        if total > pool
        else "enough for all of it; fewer --device-blocks show more"
    )
    facts = [
        (
            "Conversations",
            f"{config.conversations} of {config.turns} turns, about documents of "
            f"{config.document_tokens:,} tokens",
        ),
        ("KV of them all", f"{rounded_size(total)} at most"),
        (
            "Device pool",
            f"{rounded_size(pool)}, {config.device_blocks} blocks of "
            f"{config.block_size} tokens: {fit}",
        ),
        (
            "Host memory",
            f"{rounded_size(config.host_bytes)}, {config.mode} stores, policy "
            f"{config.cache_policy}"
            f"{', loads in the prefill itself' * config.load_in_step}",
        ),
    ]
    if config.storage is not None:
        place, size = shown_url(config.storage), rounded_size(config.storage_bytes)
        facts.append(("Storage", f"{place}, {size} at most"))
    what = _LAYERS[config.layers].format(config.window_tokens)
    return [*facts, ("Model", what)]

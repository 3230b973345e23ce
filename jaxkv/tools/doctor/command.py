"""``jaxkv doctor``: what this machine offers, what is wrong, and what to set."""

from __future__ import annotations

import dataclasses
import os

from jaxkv import _util as units
from jaxkv._util.extras import EXTRAS
from jaxkv.config import OffloadConfig, storage_fault, variable_of, with_variables
from jaxkv.tools.console import print_plain
from jaxkv.tools.doctor import report
from jaxkv.tools.doctor.facts import Facts, gather_facts
from jaxkv.tools.doctor.findings import Question, judge, recommend
from jaxkv.tools.doctor.store import Store, look_at
from jaxkv.tools.files import OUTPUT_OPTIONS, check_files, write_files
from jaxkv.tools.progress import show_progress
from jaxkv.tools.speed import BytesDifferError, measure_bandwidth
from jaxkv.tools.usage import (
    EXIT_FAILED,
    EXIT_OK,
    Args,
    Usage,
    UsageError,
    check_belongs,
    one_of,
)
from jaxkv.transfer.storage.store_url import shown_url

_STORAGE_BYTES = units.parse_bytes(OffloadConfig().storage_bytes)


USAGE = Usage(
    "jaxkv doctor",
    "Examine the device, the memory and its limits, the installed extras and the "
    "JAXKV_* variables; save and load some blocks; try the store, if one is set; and "
    "recommend a size for the host tier. The exit status is 1 if a problem is found.",
    f"""
host memory:
  --host-bytes SIZE  check whether a host tier of this size fits (default:
      {variable_of("host_bytes")}, if set)
  --device-pool-bytes SIZE  size of the device pool, which the host tier should exceed
      (default: unknown)
  --no-probe  measure no speed of blocks (default: do, for some seconds)

store and extras:
  --storage URL  folder or URL to check as the storage tier (default:
      {variable_of("storage")}, if set)
  --storage-bytes SIZE  bytes that the store may hold (default:
      {variable_of("storage_bytes")}, or {_STORAGE_BYTES >> 30}GiB)
  --need EXTRA,...  extras that must be installed, of
      {", ".join(EXTRAS)} (default: none)

output:
{OUTPUT_OPTIONS}

examples:
  jaxkv doctor
  jaxkv doctor --host-bytes 64GiB --storage /mnt/kv --need metrics
""",
    {"--need": one_of(list(EXTRAS))},
)


def run(args: Args) -> int:
    check_files(args)
    # A server may be running on the device; set before jax starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    facts = _look_at_store(gather_facts(), args)
    if not args.no_probe:
        facts = _probe(facts, args)
    host_bytes, source = args.host_bytes, "--host-bytes"
    if host_bytes is None and facts.config and facts.config.host_bytes:
        host_bytes = units.parse_bytes(facts.config.host_bytes)
        source = variable_of("host_bytes")
    question = Question(host_bytes, source, args.device_pool_bytes, args.need or [])
    best = recommend(facts, question)
    findings = judge(facts, question)
    print_plain([*report.fact_lines(facts, best), "", *report.finding_lines(findings)])
    diagnosis = report.to_json(facts, best, findings)
    write_files(args, lambda: diagnosis)
    return EXIT_OK if diagnosis["ok"] else EXIT_FAILED


def _look_at_store(facts: Facts, args: Args) -> Facts:
    config = facts.config or OffloadConfig()
    url = config.storage if args.storage is None else args.storage
    if url is None:
        check_belongs(args, ("storage_bytes",), "--storage", None)
        return facts
    store = Store(
        url=shown_url(url),
        num_bytes=args.storage_bytes or units.parse_bytes(config.storage_bytes),
        is_sealed=config.storage_secret is not None,
        source="--storage" if args.storage else variable_of("storage"),
        num_bytes_source="--storage-bytes"
        if args.storage_bytes
        else variable_of("storage_bytes"),
    )
    try:
        return dataclasses.replace(facts, store=look_at(url, store))
    except ValueError as error:
        if args.storage is not None:
            text = str(error).removeprefix("storage=")
            raise UsageError(f"--storage: {text}") from error
        fault = with_variables(storage_fault(error), {"storage"})
        faults = (*facts.config_faults, fault)
        return dataclasses.replace(facts, config_faults=faults)


def _probe(facts: Facts, args: Args) -> Facts:
    if facts.mode is None or facts.refusals:
        return facts
    try:
        with show_progress(is_quiet=args.quiet) as on_progress:
            bandwidth = measure_bandwidth(on_progress, facts.mode)
    except MemoryError as error:
        return dataclasses.replace(facts, probe_left_out=str(error))
    except (BytesDifferError, RuntimeError) as error:
        return dataclasses.replace(facts, probe_fault=str(error))
    return dataclasses.replace(facts, bandwidth=bandwidth)

"""``jaxkv doctor``: what this machine offers, what is wrong, and what to set."""

from __future__ import annotations

import argparse
import dataclasses
import os

from jaxkv import _util as units
from jaxkv.cli.options import (
    EXIT_OK,
    EXIT_WRONG,
    add_json_option,
    check_files,
    check_names,
    parse_bytes,
    split_commas,
    write_json,
)
from jaxkv.cli.progress import show_progress
from jaxkv.config import variable_of
from jaxkv.tools.bench.transfer import BytesDifferError
from jaxkv.tools.doctor import report
from jaxkv.tools.doctor.bandwidth import measure_bandwidth
from jaxkv.tools.doctor.facts import EXTRAS, Facts, gather_facts
from jaxkv.tools.doctor.findings import Question, judge, recommend

SUMMARY = "see what this machine offers, what is wrong with it, and what to set"
DESCRIPTION = (
    "Examine the device, the memory and its limits, the installed extras and the "
    "JAXKV_* variables; save and load some blocks; recommend a size for the host tier; "
    "and say what is wrong and what to do about it. The exit status is 0 if nothing is "
    "wrong, else 1."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--host-bytes",
        type=parse_bytes,
        metavar="SIZE",
        help="check whether a host tier of this size fits, such as 64GiB (default: "
        f"that of {variable_of('host_bytes')}, if it is set)",
    )
    parser.add_argument(
        "--device-pool-bytes",
        type=parse_bytes,
        metavar="SIZE",
        help="the size of the device pool, which the host tier should exceed "
        "(default: unknown)",
    )
    parser.add_argument(
        "--need",
        action="extend",
        type=split_commas,
        metavar="EXTRA,...",
        help="extras that must be installed; may be repeated (default: none; there is "
        f"{', '.join(EXTRAS)})",
    )
    parser.add_argument(
        "--no-probe",
        action="store_true",
        help="move no blocks (default: for some seconds, some are moved)",
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    needed = check_names("--need", args.need or [], list(EXTRAS))
    check_files(args)
    # A server may be running on the device; set before jax starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    facts = gather_facts()
    if not args.no_probe:
        facts = _probe(facts)
    question = Question(
        host_bytes=args.host_bytes,
        device_pool_bytes=args.device_pool_bytes,
        needed=needed,
    )
    if question.host_bytes is None and facts.config and facts.config.host_bytes:
        question = dataclasses.replace(
            question,
            host_bytes=units.parse_bytes(facts.config.host_bytes),
            source=variable_of("host_bytes"),
        )
    best = recommend(facts, question)
    findings = judge(facts, question)
    print("\n".join(report.fact_lines(facts, best)))
    print()
    print("\n".join(report.finding_lines(findings)))
    diagnosis = report.to_json(facts, best, findings)
    if args.json:
        write_json(args.json, diagnosis)
    return EXIT_OK if diagnosis["ok"] else EXIT_WRONG


def _probe(facts: Facts) -> Facts:
    """Measure transfers, if an engine can be made."""
    if facts.mode is None or facts.refusals:
        return facts
    try:
        with show_progress() as on_progress:
            bandwidth = measure_bandwidth(facts.mode, on_progress)
    except MemoryError as error:
        return dataclasses.replace(facts, probe_left_out=str(error))
    except (BytesDifferError, RuntimeError) as error:
        return dataclasses.replace(facts, probe_fault=str(error))
    return dataclasses.replace(facts, bandwidth=bandwidth)

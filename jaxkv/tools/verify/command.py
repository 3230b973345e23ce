"""``jaxkv verify``: prove that jaxkv works on this machine, and write a report."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import time
from pathlib import Path
from typing import IO

from jaxkv._util import shown, time_text
from jaxkv._util.files import check_folder, open_file
from jaxkv.tools.console import print_lines
from jaxkv.tools.files import OUTPUT_OPTIONS, check_extra, check_files, write_files
from jaxkv.tools.machine import versions
from jaxkv.tools.progress import show_progress
from jaxkv.tools.usage import (
    EXIT_FAILED,
    EXIT_OK,
    Args,
    Usage,
    UsageError,
    check_absent,
    one_of,
)
from jaxkv.tools.verify import report
from jaxkv.tools.verify.records import STAGES, Result, Stage, StageLog
from jaxkv.tools.verify.supervise import run_stages

_NAMES = [stage.name for stage in STAGES]
_RUN = "run.json"
_BUDGET_S, _QUICK_S, _STALL_S = 600.0, 60.0, 180.0
_QUICK = "devices", "blocks", "engine"
_EXIT_PARTIAL = 3


def parse_duration(text: str) -> float:
    """Parse a duration in seconds or minutes.

    >>> parse_duration("90s"), parse_duration("10m")
    (90.0, 600.0)
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(s|m)", text)
    if not match or not float(match[1]):
        raise ValueError(f"{shown(text)} must be a duration such as 90s or 10m")
    return float(match[1]) * {"s": 1, "m": 60}[match[2]]


def _parse_folder(text: str) -> Path:
    if not text:
        raise ValueError("'' must be the path of a folder")
    return Path(text)


USAGE = Usage(
    "jaxkv verify",
    "Move random blocks of every dtype and layout there and back, beside a model's "
    "writes and through failures, and compare every bit; compare every token of a "
    "small serving engine; measure bandwidth. Each stage runs "
    "in a process of its own, so that a runtime that crashes or hangs costs one check. "
    "Stop your engine first: verify needs the devices for itself. "
    "The exit status is 1 if a check failed or no block can move here, and 3 if checks "
    "were left out: by --only, --quick or the budget.",
    f"""
checks:
  --only STAGE,...  of {", ".join(_NAMES)} (default: all)
  --quick  the stages {", ".join(_QUICK)} in a minute
  --budget TIME  how long all may take, such as 90s; what is left out is named
      (default: 10m)
  --stall TIME  end a check that makes no progress for this long (default: 3m)

results:
  --folder PATH  where the results of each stage are kept
  --resume  go on with the results in that folder, after a crash of the machine
{OUTPUT_OPTIONS}

examples:
  jaxkv verify --quick
  jaxkv verify --only speed --json speed.json
""",
    {
        "--only": one_of(_NAMES),
        "--budget": parse_duration,
        "--stall": parse_duration,
        "--folder": _parse_folder,
    },
    {"folder": Path("jaxkv-verify")},
)


def run(args: Args) -> int:
    names = args.only or _NAMES
    if args.quick:
        check_absent(args, ("only", "budget"), "{}: --quick says it already")
        names = list(_QUICK)
    check_files(args)
    check_extra("verify", ("flax", "rich"))
    stages = [stage for stage in STAGES if stage.name in {*names, STAGES[0].name}]
    budget_s = args.budget or (_QUICK_S if args.quick else _BUDGET_S)
    stall_s = args.stall or _STALL_S
    start_s = time.monotonic()
    results: dict[Stage, tuple[Result, ...]] = {}

    def on_stage(stage: Stage, of_stage: tuple[Result, ...]) -> str:
        results[stage] = of_stage
        print_lines(report.stage_lines(stage, of_stage))
        return report.reason_of(of_stage)

    with (
        _prepare(args.folder, args.resume),
        show_progress(is_quiet=args.quiet) as on_progress,
    ):
        limit = f"at most {time_text(budget_s)}"
        print_lines([f"{len(stages)} of {len(STAGES)} stages, {limit}", ""])
        run_stages(stages, args.folder, budget_s, stall_s, on_progress, on_stage)
    seconds = round(time.monotonic() - start_s, 1)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = report.Report(results, budget_s, seconds, today)
    print_lines(report.last_lines(made, str(args.folder)))
    write_files(args, lambda: report.to_json(made, args.command_line))
    codes = {"PASS": EXIT_OK, "PARTIAL": _EXIT_PARTIAL}
    return codes.get(made.verdict, EXIT_FAILED)


def _prepare(folder: Path, resume: bool) -> IO[str]:
    """Make the folder of the results; empty it unless the run goes on with them.

    Another run may not use the folder until the file that is returned is closed.
    """
    from jaxkv.scheduling.record.trace_file import lock

    have, path = versions("flax", "libtpu"), folder / _RUN
    try:
        if not resume:
            folder.mkdir(0o700, parents=True, exist_ok=True)
        check_folder(folder)  # Its files are read back.
        with contextlib.ExitStack() as stack:
            mode = "r+" if resume else "a"
            file = stack.enter_context(
                open(path, mode, encoding="utf-8", opener=open_file)
            )
            lock(file.fileno(), "another jaxkv verify runs in it")
            if resume:
                before = json.load(file)["versions"]
                if before != have:
                    raise UsageError(
                        f"--resume: the results in {shown(str(folder))} are of "
                        f"{before}; run without --resume"
                    )
                for stage in STAGES:
                    if (log := StageLog(folder / f"{stage.name}.jsonl")).size():
                        log.append(resume=True)
            else:
                for stage in STAGES:
                    for suffix in (".jsonl", ".log"):
                        (folder / f"{stage.name}{suffix}").unlink(missing_ok=True)
                file.truncate(0)
                print(json.dumps({"versions": have}), file=file, flush=True)
            stack.pop_all()
            return file
    except (OSError, ValueError, TypeError, KeyError) as error:
        option = "--resume" if resume else "--folder"
        why = getattr(error, "strerror", None) or "it is no file of jaxkv verify"
        raise UsageError(
            f"{option}: cannot use {shown(str(folder))} ({why}); name a folder "
            f"{'that an earlier run wrote' if resume else 'that you may write to'}"
        ) from error

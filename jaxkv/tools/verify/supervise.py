"""Watches over the processes of stages: crashes, hangs, and what is left to run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from jaxkv._util.files import open_file
from jaxkv.tools.console import OnProgress
from jaxkv.tools.verify.records import NO_TIME, START, Result, Stage, StageLog, State

_PAUSE_S = 0.05
_MAX_STARTS = 6
_MAX_LATE_SHARE = 0.2  # Of the time left, for a check that began in time
_ABORT_S = 5.0


def run_stages(
    stages: Sequence[Stage],
    folder: Path,
    budget_s: float,
    stall_s: float,
    on_progress: OnProgress,
    on_stage: Callable[[Stage, tuple[Result, ...]], str],
) -> None:
    """Run stages one after another: only one process at a time may hold a TPU.

    The budget is a limit: a check that exceeds it is ended. `on_stage` gets the results
    of each stage. If it returns text, no later stage can run, and the text says why.
    """
    end_s = time.monotonic() + budget_s
    reason = ""
    for number, stage in enumerate(stages):
        left_s = end_s - time.monotonic()
        if reason or left_s <= 0:
            on_stage(stage, (Result(START, "SKIP", reason or NO_TIME),))
            continue
        seconds = left_s
        if number:  # The first stage is short, and all others need it whole.
            seconds *= stage.share / sum(later.share for later in stages[number:])
        limit_s = min(left_s, seconds + _MAX_LATE_SHARE * left_s)
        log = StageLog(folder / f"{stage.name}.jsonl")
        _run_stage(stage.name, log, seconds, limit_s, stall_s, on_progress)
        on_progress(stage.name, 1, 1)
        reason = on_stage(stage, log.read().results)


def _run_stage(
    name: str,
    log: StageLog,
    seconds: float,
    limit_s: float,
    stall_s: float,
    on_progress: OnProgress,
) -> None:
    """Run a stage until each check has a result; those with one are not repeated."""
    start_s = time.monotonic()
    state = log.read()
    if state.current not in (None, START) and state.begins[state.current] > 1:
        _give_up(log, state, "the machine or the command ended in it, twice")
    for _ in range(_MAX_STARTS):
        if log.read().has_ended:
            return
        used_s = time.monotonic() - start_s
        times = max(0.0, seconds - used_s), limit_s - used_s, stall_s
        why = _run_process(name, log, *times, on_progress)
        state = log.read()
        if state.has_ended:
            return
        if why == NO_TIME:
            finished = {result.name for result in state.results}
            for check in state.names or (START,):
                if check not in finished:
                    log.write(check, "SKIP", NO_TIME)
            log.append(end=True)
            return
        _give_up(log, state, why)
        if state.current in (None, START):
            return  # It would end there again.
    rest = f"left out after {_MAX_STARTS} crashes; see {log.path.parent}"
    log.write("the rest", "FAIL", rest)


def _give_up(log: StageLog, state: State, why: str) -> None:
    """Write the result of the check that the process ended in."""
    if state.excuse:
        log.write(state.current, "SKIP", f"not supported: {state.excuse} ({why})")
    else:
        log.write(state.current or "the end", "FAIL", why)


def _run_process(
    name: str,
    log: StageLog,
    seconds: float,
    limit_s: float,
    stall_s: float,
    on_progress: OnProgress,
) -> str:
    """Run the process of a stage; return how it ended, in words."""
    output = log.path.with_suffix(".log")
    words = ["-m", "jaxkv.tools.verify", name, str(log.path.parent), str(seconds)]
    with open(output, "ab+", opener=open_file) as file:
        start = file.tell()
        process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        try:
            end = _follow(process, name, log, limit_s, stall_s, on_progress)
            if end == "hang":
                process.send_signal(signal.SIGABRT)  # The output gets the stacks.
                process.wait(_ABORT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()  # It has ended, unless this process was stopped.
            process.wait()
        file.seek(start)
        # What the runtime printed, before Python's own report of a crash.
        text = file.read().decode("utf-8", "replace").partition("Fatal Python error")[0]
    last = [f": {line.strip()[:300]}" for line in text.splitlines() if line.strip()]
    code = process.returncode
    if end == "late":
        return NO_TIME
    if end == "hang":
        why = f"it hangs: no progress for {stall_s:.0f} s"
    elif code < 0:
        why = f"the process crashed ({signal.Signals(-code).name})"
    else:
        why = f"the process ended with exit code {code}"
    return why + "".join(last[-1:])


def _follow(
    process: subprocess.Popen[bytes],
    name: str,
    log: StageLog,
    limit_s: float,
    stall_s: float,
    on_progress: OnProgress,
) -> Literal["end", "late", "hang"]:
    start_s = changed_s = time.monotonic()
    size = -1
    while process.poll() is None:
        now_s = time.monotonic()
        if log.size() != size:
            size, changed_s = log.size(), now_s
            state = log.read()
            if state.current:
                label = f"{name}: {state.current}"
                on_progress(label, len(state.results), len(state.names))
        elif now_s - changed_s > stall_s:
            return "hang"
        if now_s - start_s > limit_s:
            return "late"
        time.sleep(_PAUSE_S)
    return "end"

"""Watches over the processes of stages: crashes, hangs, and what is left to run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxkv._util.files import open_file
from jaxkv.tools.console import OnProgress
from jaxkv.tools.verify.records import START, Result, Stage, StageLog, State

_PAUSE_S = 0.05
_MAX_STARTS = 6
_MIN_STAGE_S = 5.0
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

    `on_stage` gets the results of each. If it returns text, no later stage can run, and
    the text says why.
    """
    end_s = time.monotonic() + budget_s
    reason = ""
    for number, stage in enumerate(stages):
        if reason:
            on_stage(stage, (Result(START, "SKIP", reason),))
            continue
        seconds = end_s - time.monotonic()
        if number:  # The first stage is short, and all others need it whole.
            seconds *= stage.share / sum(later.share for later in stages[number:])
        seconds = max(_MIN_STAGE_S, seconds)
        log = StageLog(folder / f"{stage.name}.jsonl")
        _run_stage(stage.name, log, seconds, stall_s, on_progress)
        reason = on_stage(stage, log.read().results)


def _run_stage(
    name: str, log: StageLog, seconds: float, stall_s: float, on_progress: OnProgress
) -> None:
    """Run a stage until each check has a result; those with one are not repeated."""
    end_s = time.monotonic() + seconds
    state = log.read()
    if state.current not in (None, START) and state.begins[state.current] > 1:
        _give_up(log, state, "the machine or the command ended in it, twice")
    for _ in range(_MAX_STARTS):
        if log.read().has_ended:
            return
        left_s = max(_MIN_STAGE_S, end_s - time.monotonic())
        why = _run_process(name, log, left_s, stall_s, on_progress)
        state = log.read()
        if state.has_ended:
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
    name: str, log: StageLog, seconds: float, stall_s: float, on_progress: OnProgress
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
            hangs = _follow(process, name, log, stall_s, on_progress)
            if hangs:
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
    if hangs:
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
    stall_s: float,
    on_progress: OnProgress,
) -> bool:
    """Wait for a process and show its progress; return whether it hangs."""
    size, changed_s = -1, time.monotonic()
    while process.poll() is None:
        if log.size() != size:
            size, changed_s = log.size(), time.monotonic()
            state = log.read()
            if state.current:
                label = f"{name}: {state.current}"
                on_progress(label, len(state.results), state.num_checks)
        elif time.monotonic() - changed_s > stall_s:
            return True
        time.sleep(_PAUSE_S)
    return False

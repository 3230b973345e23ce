"""The process of a stage: ``python -m jaxkv.tools.verify STAGE FOLDER SECONDS``."""

from __future__ import annotations

import faulthandler
import importlib
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from jaxkv._util import one_line
from jaxkv.tools.process import end_process
from jaxkv.tools.speed import BytesDifferError
from jaxkv.tools.verify.records import (
    NO_TIME,
    START,
    Check,
    StageLog,
    Turn,
    UnsupportedError,
    WrongError,
)
from jaxkv.transfer import CostlyLayoutWarning


def run_stage(checks: Sequence[Check], log: StageLog, end_s: float) -> None:
    """Run the checks that have no result; those past `end_s` are left out by name."""
    finished = {result.name for result in log.read().results}
    waiting = [check for check in checks if check.name not in finished]
    log.append(names=[check.name for check in checks])
    for number, check in enumerate(waiting):
        left_s = end_s - time.monotonic()
        if left_s <= 0 and (number or finished):
            log.write(check.name, "SKIP", NO_TIME)
            continue
        share = check.weight / sum(later.weight for later in waiting[number:])
        log.append(begin=check.name, excuse=check.excuse)
        start_s = time.monotonic()
        verdict, text, figures = _run_check(check, Turn(left_s * share, log))
        seconds = round(time.monotonic() - start_s, 2)
        log.write(check.name, verdict, one_line(text), seconds, figures)
    log.append(end=True)


def _run_check(check: Check, turn: Turn) -> tuple[str, str, object]:
    """Run a check; whatever it raises is its result."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CostlyLayoutWarning)
            text, figures = check.run(turn)
        texts = [text, *dict.fromkeys(f"warning: {each.message}" for each in caught)]
        return "PASS", "; ".join(texts), figures
    except UnsupportedError as error:
        return "SKIP", f"not supported: {error}", {}
    except (BytesDifferError, WrongError) as error:
        return "FAIL", str(error), {}
    except Exception as error:
        traceback.print_exc()
        return "FAIL", f"{type(error).__name__}: {error}", {}


def main(name: str, folder: str, seconds: str) -> None:
    faulthandler.enable()
    end_s = time.monotonic() + float(seconds)
    log = StageLog(Path(folder, f"{name}.jsonl"))
    log.append(begin=START, excuse="")
    module = importlib.import_module(f"jaxkv.tools.verify.{name}")
    run_stage(module.list_checks(), log, end_s)
    end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The results as lines and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv.tools.machine import versions
from jaxkv.tools.verify.devices import DEVICE, TRANSFERS
from jaxkv.tools.verify.records import NO_TIME, STAGES, START, Result, Stage

_LIMITS = (
    "PASS means that this machine passed every check that it supports, at any speed; "
    "PARTIAL, that some were left out. Not shown: {}several hosts, your model and its "
    "engine (vLLM, sglang-jax, MaxText), hours of load, and a host tier as large as "
    "yours."
)
_MAX_NAMED = 5


class Report(NamedTuple):
    """The results of a run."""

    stages: Mapping[Stage, Sequence[Result]]
    budget_s: float
    seconds: float
    date: str

    @property
    def results(self) -> list[Result]:
        return [result for results in self.stages.values() for result in results]

    @property
    def verdict(self) -> str:
        """FAIL if a check failed, SKIP if no block can move, else PASS or PARTIAL."""
        if any(result.verdict == "FAIL" for result in self.results):
            return "FAIL"
        if any(map(reason_of, self.stages.values())):
            return "SKIP"
        is_late = any(result.detail == NO_TIME for result in self.results)
        return "PARTIAL" if is_late or len(self.stages) < len(STAGES) else "PASS"

    @property
    def device(self) -> Mapping[str, Any]:
        figures = (result.figures for result in self.results if result.name == DEVICE)
        return next(figures, {})

    @property
    def machine(self) -> str:
        if not self.device:
            return "no device"
        host = self.device["machine"]
        cpu = host["cpu"] or host["system"]
        return f"{self.device['name']}, {host['num_cpus']} cores of {cpu}"

    @property
    def row(self) -> str:
        have = versions()
        names = ", ".join(f"{name} {have[name]}" for name in ("jaxkv", "jax", "python"))
        verdict = f"{self.verdict}: {count(self.results)}"
        return f"| {self.machine} | {names} | {self.date} | {verdict} |"

    @property
    def advice(self) -> list[str]:
        """Settings that the figures speak for."""
        texts = (result.figures.get("advice") for result in self.results)
        return [text for text in dict.fromkeys(texts) if text]

    @property
    def unchecked(self) -> list[str]:
        """Stages that did not run or only have SKIPs, and checks that had no time."""
        names = []
        for stage in STAGES:
            results = self.stages.get(stage, ())
            late = [f"{r.name} ({stage.name})" for r in results if r.detail == NO_TIME]
            if {r.verdict for r in results} <= {"SKIP"}:
                names.append(stage.name)
            elif len(late) > _MAX_NAMED:
                names.append(f"{len(late)} of {len(results)} checks of {stage.name}")
            else:
                names += late
        return names

    @property
    def summary(self) -> list[str]:
        return [
            *([f"Not checked: {'; '.join(self.unchecked)}."] * bool(self.unchecked)),
            *(f"What to set: {text}." for text in self.advice),
            _LIMITS.format("an accelerator, " * (" x cpu," in self.machine)),
        ]


def count(results: Sequence[Result]) -> str:
    counts = Counter(
        "TIME" if result.detail == NO_TIME else str(result.verdict)
        for result in results
    )
    words = {
        "PASS": "passed",
        "FAIL": "failed",
        "SKIP": "not supported",
        "TIME": "out of time",
    }
    return ", ".join(f"{counts[k]} {word}" for k, word in words.items() if counts[k])


def reason_of(results: Sequence[Result]) -> str:
    """Return why later stages cannot run: transfers that do not work, or jax."""
    for result in results:
        if result.detail == NO_TIME:
            continue
        if result.name == TRANSFERS and result.verdict != "PASS":
            return f"no block can move here; `{TRANSFERS}` says why"
        if result.name == START and result.verdict == "FAIL":
            return "jax does not start"
    return ""


def stage_lines(stage: Stage, results: Sequence[Result]) -> Iterator[str]:
    yield f"{stage.name}: {stage.title}"
    for result in results:
        yield f"{result.verdict}  {result.name}: {result.detail}"
    yield ""


def last_lines(report: Report, folder: str) -> Iterator[str]:
    yield f"{report.verdict}: {count(report.results)}, in {report.seconds:.0f} s."
    yield from report.summary
    if report.verdict == "FAIL":
        yield f"The output of each stage is in {folder}."
    if report.verdict == "PASS":
        yield "For the table of reports in docs/support.md:"
        yield report.row


def to_json(report: Report, command: str) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "counts": count(report.results),
        "unchecked": report.unchecked,
        "advice": report.advice,
        "machine": report.machine,
        "versions": versions("flax", "libtpu"),
        "date": report.date,
        "command": command,
        "budget_s": report.budget_s,
        "seconds": report.seconds,
        "stages": [
            {
                "name": stage.name,
                "title": stage.title,
                "results": [result._asdict() for result in results],
            }
            for stage, results in report.stages.items()
        ],
    }

"""Two or four processes that serve one model, with faults that only one of them has."""

import json
import pathlib
import tempfile

from tests.transfer.test_processes import run

MAX_CPU_S = 1800.0
LOCAL = ("saves failed", "loads failed")  # Each process has its own.


def run_processes(rng, counts, note, steps, *words):
    """Run processes that must decide alike and read the right bytes."""
    num_processes = rng.choice((2, 2, 4))
    seed = str(rng.random())
    note(f"{num_processes} processes, {seed=}")
    with tempfile.TemporaryDirectory(prefix="jaxkv-campaign-") as folder:
        said = run(
            pathlib.Path(folder),
            num_processes,
            "tests.campaign.process",
            *(seed, str(min(steps, 200)), *words),
            max_cpu_s=MAX_CPU_S,
        )
    results = [json.loads(text.splitlines()[-1]) for text in said]
    first = results[0]
    for number, result in enumerate(results):
        if result["digests"] != first["digests"]:
            raise AssertionError(f"process {number} decided otherwise than process 0")
    counts["processes"] += num_processes
    counts["plans compared"] += first["counts"]["steps"] * (num_processes - 1)
    for name, num in first["counts"].items():
        if name in LOCAL:
            num = sum(result["counts"].get(name, 0) for result in results)
        counts[name] += num

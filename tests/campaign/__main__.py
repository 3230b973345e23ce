"""Command line of the campaign: python -m tests.campaign --minutes 30 --seed 7"""

import argparse
import collections
import logging
import os
import shutil
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from tests.campaign import campaign
from tests.campaign.store_faults import FAULTS


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign", description=__doc__
    )
    parser.add_argument("--minutes", type=float, help="how long to run")
    parser.add_argument("--num-engines", type=int, help="how many engines to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=list(campaign.KINDS),
        default=list(campaign.KINDS),
        help="kinds of engines; all unless given",
    )
    parser.add_argument(
        "--steps", type=int, default=campaign.STEPS, help="steps of an engine"
    )
    parser.add_argument(
        "--fault",
        choices=list(FAULTS),
        help="run engines whose store has this fault, and nothing else",
    )
    parser.add_argument(
        "--total-steps", type=int, help="how many steps to run, of all engines"
    )
    parser.add_argument(
        "--strict", action="store_true", help="with the strict parts of jaxkv.strict"
    )
    parser.add_argument("--only", type=int, help="repeat the engine of this number")
    args = parser.parse_args()
    if args.strict:
        os.environ["JAXKV_STRICT"] = "1"  # Processes of its own get it, too.
    logging.getLogger("jax").setLevel(logging.CRITICAL)  # It logs injected faults.
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    folder = tempfile.mkdtemp(prefix="jaxkv-campaign-")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    options = {"kinds": args.engines, "steps": args.steps, "fault": args.fault}
    try:
        if args.only is not None:
            counts = collections.Counter()
            failure = campaign.run_one(args.seed, args.only, counts, **options)
            print(campaign.summary(counts))
            if failure is not None:
                print(failure.report)
        else:
            minutes = args.minutes
            if minutes is None and args.num_engines is args.total_steps is None:
                minutes = 1.0
            _, failure = campaign.run(
                args.seed,
                minutes=minutes,
                engines=args.num_engines,
                total_steps=args.total_steps,
                say=lambda line: print(line, flush=True),
                **options,
            )
    except pytest.skip.Exception as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())

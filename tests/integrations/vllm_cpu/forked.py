"""A run in a process that was forked where all that takes 20 s to import was."""

import importlib
import os
import sys

from . import plugin

plugin.register()  # Before others import what it replaces; each run does so again.
for _name in (
    "jaxkv.integrations.vllm",
    "tpu_inference.runner.tpu_runner",
    "tpu_inference.worker.tpu_worker",
    "vllm.v1.engine.core",
):
    importlib.import_module(_name)


def main(folder, variables, arguments, output):
    """Run scenarios as `vllm_cpu.run` does; what they print goes to a file."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["vllm_cpu.run", *arguments]
    importlib.import_module("vllm_cpu.run").main()


if __name__ == "__main__":
    main(*globals()["JOB"])

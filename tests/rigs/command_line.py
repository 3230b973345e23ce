"""The command line in a process of its own."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What the console script does.
LAUNCHER = [
    *(sys.executable, "-c"),
    "import sys\nfrom jaxkv.tools.main import main\nsys.exit(main())\n",
]


def run_command(line, /, **options):
    """Run a command to its end; its output is bytes."""
    return run_python(*LAUNCHER[2:], *line.split(), **options)


def run_python(text, /, *words, **overrides):
    options = {"capture_output": True, "timeout": 120, "cwd": ROOT, "check": False}
    if "stdout" in overrides:
        options |= {"capture_output": False, "stderr": subprocess.PIPE}
    return subprocess.run([sys.executable, "-c", text, *words], **options | overrides)

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


def run_command(line, /, **more):
    """Run a command to its end; its output is bytes."""
    return run_python(*LAUNCHER[2:], *line.split(), **more)


def run_python(text, /, *words, **more):
    """Run Python to its end; its output is bytes."""
    options = {"capture_output": True, "timeout": 120, "cwd": ROOT, "check": False}
    if "stdout" in more:
        options |= {"capture_output": False, "stderr": subprocess.PIPE}
    return subprocess.run([sys.executable, "-c", text, *words], **options | more)

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
    """Run a command to its end; give what it wrote, as bytes."""
    return run_python(*LAUNCHER[2:], *line.split(), **more)


def run_python(text, /, *words, **more):
    """Run Python to its end; give what it wrote, as bytes."""
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120}
    return subprocess.run(
        [sys.executable, "-c", text, *words], cwd=ROOT, check=False, **kept | more
    )

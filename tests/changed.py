"""Run the tests of changed files: `python -m tests.changed [REVISION]`.

The table at the top of CONTRIBUTING.md says which command checks which part of jaxkv/.
Without a revision, all that is not committed counts as changed.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (`jaxkv.*?`) \| `(pytest .*?)` \|", re.MULTILINE)


def read_commands() -> dict[str, str]:
    """Map each folder and file in CONTRIBUTING's table to its command."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return {
        path: command
        for paths, command in ROW.findall(text)
        for path in re.findall("`(.*?)`", paths)
    }


def find_command(path: str, commands: dict[str, str]) -> str | None:
    names = (path, *map(str, PurePosixPath(path).parents))
    return next((commands[name] for name in names if name in commands), None)


def list_changed(revision: str) -> list[str]:
    differ = ("diff", "--name-only", "--diff-filter=d", revision)
    unknown = ("ls-files", "--others", "--exclude-standard")
    return [
        line
        for command in (differ, unknown)
        for line in subprocess.run(
            ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    ]


def main(revision: str = "HEAD") -> int:
    commands = read_commands()
    changed = list_changed(revision)
    chosen = [find_command(path, commands) for path in changed]
    tests = [path for path in changed if re.search(r"(^|/)test_\w+\.py$", path)]
    if tests:
        chosen.append(shlex.join(["pytest", *tests]))
    status = 0
    for command in dict.fromkeys(filter(None, chosen)):
        print(f"$ {command}", flush=True)
        status |= subprocess.run(["bash", "-c", command], cwd=ROOT).returncode
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

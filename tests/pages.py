"""Makes the outputs and pictures that the pages show, and compares them with the pages.

    python -m tests.pages            # draw the pictures anew, print what pages show
    python -m tests.pages --check    # compare; `nox -s docs` does

Replays are the same everywhere: their words and pictures are compared whole.
Of what depends on times, the words without numbers are compared, and a picture's size.
Recorded traces lie beside the checkout, or are downloaded.
"""

import contextlib
import hashlib
import io
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxkv.tools import main as cli

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "traces"
CACHE = Path.home() / ".cache" / "jaxkv" / "traces"
CHATS, AGENTS = "conversation_trace.jsonl", "cc_agentic_a.jsonl"
# The agents' trace is a mix of others, so that it cannot be downloaded.
TRACES = {CHATS: "mooncake_conversation.jsonl.gz", AGENTS: "cc_agentic_a.jsonl.gz"}
URL = (
    "https://raw.githubusercontent.com/kvcache-ai/Mooncake/"
    "3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces/"
    "conversation_trace.jsonl"
)
SHA256 = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"


class Shown(NamedTuple):
    """A command whose output or picture is on pages."""

    command: str
    picture: str = ""  # In docs/; drawn by --plot
    page: str = ""  # The next block after the command has lines of its output.
    is_timed: bool = False


_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SIZE = re.compile(r'viewBox="([^"]*)"')
_POLICIES = "--policy all,optimum --capacity 1%,3%,5%,10%,30%"
EXAMPLE = "python examples/serve_metrics.py"
SHOWN = (
    Shown(
        f"jaxkv plan {CHATS} --model llama-3.1-8b --accelerator h100 --device-bytes "
        "40GiB --host-bytes 64GiB,128GiB,256GiB,512GiB,1TiB",
        "plan.svg",
        "docs/sizing.md",
    ),
    Shown(f"jaxkv plan {CHATS} {_POLICIES}", "policies.svg"),
    Shown(f"jaxkv plan {AGENTS} {_POLICIES}", "policies-agents.svg"),
    Shown(EXAMPLE, page="docs/shadows.md", is_timed=True),
    # Less than on the pages: the pictures are as large.
    Shown("jaxkv demo --conversations 1 --turns 2", "ttft.svg", is_timed=True),
)
# Pictures and outputs that others make, and who compares them.
ELSEWHERE = {
    "architecture.svg": "tests/test_docs.py",
    "dashboard.png": "drawn by benchmarks/dashboard.py, compared by nobody",
    "docs/lifecycle.md": "tests/scheduling/test_explain.py",
    "tiers.svg": "tests/test_docs.py",
}


def find_trace(name: str, folder: Path) -> Path | None:
    """Copy a trace into a folder under its name; None if there is none."""
    shared, cached = SHARED / TRACES[name], CACHE / name
    if shared.exists():
        return Path(shutil.copy(shared, folder / f"{name}.gz"))
    if name != CHATS:
        return None
    if not cached.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(URL, timeout=60) as answer:
            data = answer.read()
        if hashlib.sha256(data).hexdigest() != SHA256:
            raise ValueError(f"{URL} is not the trace that the pages show")
        cached.write_bytes(data)
    return Path(shutil.copy(cached, folder / name))


def run(shown: Shown, folder: Path) -> str | None:
    """Run a command; return what it prints, None if its trace is missing."""
    if shown.command == EXAMPLE:
        return run_example()
    words = shown.command.split()[1:]
    for number, word in enumerate(words):
        if word in TRACES:
            trace = find_trace(word, folder)
            if trace is None:
                return None
            words[number] = str(trace)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main([*words, "--plot", str(folder / shown.picture)]) == 0
    return printed.getvalue()


def run_example() -> str:
    """Run the example that serves metrics until it has printed an outlook."""
    words = [sys.executable, *EXAMPLE.split()[1:], "0"]
    lines = []
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if line.startswith("Of "):
                break
        child.send_signal(signal.SIGINT)
        try:
            child.communicate(timeout=60)
        finally:
            child.kill()  # If it does not end, the check fails, and does not wait.
    return "".join(lines)


def has_output(page: str) -> bool:
    """Return whether a page has a block in no language, which is an output."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return any(not block[1] for block in _BLOCK.finditer(text))


def block_after(shown: Shown) -> list[str]:
    """Return the lines that a page shows of the output of a command."""
    text = (ROOT / shown.page).read_text(encoding="utf-8").replace(" \\\n    ", " ")
    start = text.find(shown.command)
    assert start >= 0, f"{shown.page} has no `{shown.command}`"
    for block in _BLOCK.finditer(text):
        if block.start() > start and not block[1]:
            return block[2].splitlines()
    raise AssertionError(f"{shown.page} shows no output of `{shown.command}`")


def words_of(line: str, *, is_timed: bool) -> str:
    """Return the words of a line, without numbers if they depend on times."""
    line = re.sub(r"[\d.,]+", "0", line) if is_timed else line
    return " ".join(line.split())


def differences(shown: Shown, folder: Path, printed: str) -> Iterator[str]:
    """Yield the differences between a page and its command's output and picture."""
    if shown.picture:
        yield from _differences_of_pictures(shown, folder)
    if shown.page:
        lines = {
            words_of(line, is_timed=shown.is_timed) for line in printed.splitlines()
        }
        for line in block_after(shown):
            if words_of(line, is_timed=shown.is_timed) not in lines:
                yield f"{shown.page}: {line!r} is not printed by `{shown.command}`"


def _differences_of_pictures(shown: Shown, folder: Path) -> Iterator[str]:
    name = shown.picture
    old, new = (path.read_text() for path in (ROOT / "docs" / name, folder / name))
    size, drawn_size = (_SIZE.search(text)[1] for text in (old, new))
    if size != drawn_size:
        yield f"docs/{name} has the size {size}, not {drawn_size}"
    elif not shown.is_timed and old != new:
        yield f"docs/{name} is not what `{shown.command}` draws"


def main(argv: list[str]) -> int:
    """Draw all pictures anew, or compare them."""
    is_check, faults = argv == ["--check"], list[str]()
    for shown in SHOWN:
        if shown.is_timed and not is_check:
            continue  # Measured by hand, on a quiet machine.
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            printed = run(shown, folder)
            if printed is None:
                print(f"no trace for `{shown.command}`")
            elif is_check:
                faults += differences(shown, folder, printed)
            else:
                shutil.copy(folder / shown.picture, ROOT / "docs" / shown.picture)
                print(printed if shown.page else f"drew docs/{shown.picture}")
    print("\n".join(faults) or "The pages show what their commands print and draw.")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The checks, for people, `.ci/run` and the workflows alike; `nox --list` names them.

A session has an environment of its own, made anew unless `-R` is given. Arguments after
`--` go to pytest, or to the script that a session runs.
"""

import glob
import os
import re
import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "changed"]

# A shim of pyenv refuses to run a Python that is not active: append those that are not.
os.environ["PATH"] = os.pathsep.join(
    [
        os.environ["PATH"],
        *glob.glob(os.path.expanduser("~/.pyenv/versions/3.1?.*/bin")),
    ]
)

# What may depend on the Python and on jax. That the native and the pure functions agree
# over long runs does not, nor do the promises of store servers.
LIBRARY = (
    "jaxkv",
    "tests/keys",
    "tests/policies",
    "tests/scheduling",
    "tests/search",
    "tests/strict",
    "tests/tiers",
    "tests/transfer",
    "tests/test_compiling.py",
    "tests/test_entry_points.py",
    "tests/test_examples.py",
    "--ignore=tests/scheduling/test_storage_processes.py",
    "--ignore=tests/tiers/test_host_differential.py",
    "--ignore=tests/transfer/storage/test_stores.py",
)
# Their results depend on what XLA makes of a program, so XLA optimizes as for users.
OPTIMIZED = (
    "tests/transfer/test_bits.py",
    "tests/transfer/test_cost.py",
    "tests/transfer/test_traps.py",
)
ENGINES = ("maxtext", "vllm", "sglang", "compile", "mooncake")


def run_readme_line(session: nox.Session, marker: str) -> None:
    """Run the line that README marks, as it stands, in a new copy of tracked files.

    Traces that lie beside the checkout lie beside the copy too, or tests of them would
    be skipped.
    """
    block = rf"^<!-- setup: {marker} -->\n```\w*\n(.+)\n```$"
    text = Path("README.md").read_text(encoding="utf-8")
    (line,) = re.findall(block, text, re.MULTILINE)
    tracked = session.run(
        "git", "ls-files", "-z", external=True, silent=True, log=False
    )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "tree")
        for name in tracked.rstrip("\0").split("\0"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, copy / name)
        if Path("../shared").is_dir():
            Path(folder, "shared").symlink_to(Path("../shared").resolve())
        with session.chdir(copy):
            arguments = [f'{line} "$@"', "bash", *session.posargs]
            session.run("bash", "-c", *arguments, external=True)


def run_pytest(session: nox.Session, *arguments: str, **options: object) -> None:
    """Run tests on all cores, or on half of them beside another session."""
    processes = str(((os.cpu_count() or 1) + 1) // 2) if session.parallel else "auto"
    session.run(
        *("pytest", "-q", "-n", processes, "--dist", "loadfile", *arguments), **options
    )


@nox.session(venv_backend="venv")
def tests(session: nox.Session) -> None:
    """README's command for the tests, in a new copy and a new environment."""
    run_readme_line(session, "tests")


@nox.session(venv_backend="venv", allow_parallel=True)
def demo(session: nox.Session) -> None:
    """README's command for the demo, in a new copy and a new environment."""
    run_readme_line(session, "demo")


@nox.session(python=["3.12", "3.13"], allow_parallel=True)
def library(session: nox.Session) -> None:
    """Tests of the library itself with a newer Python and the newest jax."""
    session.install("-e", ".[test]")
    if session.posargs:
        run_pytest(session, *session.posargs)
        return
    run_pytest(session, *LIBRARY, *(f"--ignore={path}" for path in OPTIMIZED))
    run_pytest(session, *OPTIMIZED, env={"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"})


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Lint, layout and types."""
    session.install("-e", ".[dev]")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")


@nox.session(allow_parallel=True)
def docs(session: nox.Session) -> None:
    """The documentation: its outputs and pictures, and the site in a browser."""
    session.install("-e", ".[test,docs]")
    session.run("python", "-m", "tests.pages", "--check")
    session.run("pytest", "-q", "tests/test_site.py", *session.posargs)


@nox.session(allow_parallel=True)
def package(session: nox.Session) -> None:
    """The sdist and the wheel; a folder given is where they are put."""
    session.install("-e", ".[dev]")
    session.run(".ci/package", *session.posargs, external=True)


@nox.session(allow_parallel=True)
def campaign(session: nox.Session) -> None:
    """A minute of random engines, with faults, and the campaign's controls."""
    session.install("-e", ".[test]")
    session.run(
        *("pytest", "-q", "-m", "long", "tests/campaign/test_campaign.py"),
        *session.posargs,
        env={"JAXKV_TEST_CAMPAIGN_MINUTES": "1"},
    )


@nox.session(allow_parallel=True)
def explorer(session: nox.Session) -> None:
    """Every order of events in small worlds, for two minutes."""
    session.install("-e", ".[test]")
    session.run("pytest", "-q", "-m", "long", "tests/explorer", *session.posargs)


@nox.session(allow_parallel=True)
@nox.parametrize("engine", ENGINES, ids=ENGINES)
def engines(session: nox.Session, engine: str) -> None:
    """What needs an engine or its compilers; the last line says why it is skipped."""
    if engine == "mooncake":
        session.install("-e", ".[test]", "./examples/mooncake")
    session.run(f".ci/{engine}", *session.posargs, external=True)


@nox.session
def gpu(session: nox.Session) -> None:
    """What a machine with a GPU proves, and the tests that run there."""
    session.install("-e", ".[test,cuda12]")
    session.run("jaxkv", "verify", "--json", "verify.json")
    session.run(
        *("pytest", "-q", "-m", "gpu", *session.posargs),
        env={"JAXKV_TEST_PLATFORM": "cuda"},
    )


@nox.session
def long(session: nox.Session) -> None:
    """The tests that take minutes each."""
    session.install("-e", ".[test]")
    session.run("pytest", "-q", "-m", "long", *session.posargs)


@nox.session(python=False)
def changed(session: nox.Session) -> None:
    """Tests of what changed since a revision, in the environment that nox is in."""
    session.run("python", "-m", "tests.changed", *session.posargs)

"""How machine code is kept, found again and made anew."""

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from jaxkv.native.compiling import Bound, compiled, entry_point, own, state_of
from jaxkv.policies import lru

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Looks something up: of all that is compiled, that takes the least time.
LOOK_UP = """
from jaxkv import OffloadingManager
assert OffloadingManager(16, 2).lookup([b"a"]) == 0
from jaxkv.native import host
stats = host.lookup.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""

# A policy whose native `find` finds every key, or none.
OWN_POLICY = """
import dataclasses, jax
from jaxkv import OffloadingManager, make_lru
from jaxkv.native import lru as native_lru
from jaxkv.native.compiling import compiled
from jaxkv.native.policy import register_native
from jaxkv.policies.lru import LRUState

@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnState(LRUState):
    pass

@compiled
def find(state, keys, entries, block_ids):
    entries[:] = {found}
    block_ids[:] = {found}

native = native_lru.NATIVE._replace(find=find)
register_native(OwnState, native)
made = make_lru(2, 4096)

def init():
    state = made.init()
    return OwnState(state.directory, state.order)

manager = OffloadingManager(16, 2, made._replace(init=init, native=native))
print(manager.lookup([b"a"]))
"""


def run(program, cwd, **environ):
    """Run a program in a process of its own; give its words."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def write(folder, text, name="program.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.fixture
def package(tmp_path):
    """A copy of the package, which a test may change."""
    shutil.copytree(
        ROOT / "jaxkv",
        tmp_path / "jaxkv",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return tmp_path


def test_a_second_process_compiles_nothing(package):
    program = write(package, LOOK_UP)
    assert run(program, package) == ["0", "1"]
    assert run(program, package) == ["1", "0"]


def test_a_change_of_any_native_file_has_all_compiled_anew(package):
    program = write(package, LOOK_UP)
    run(program, package)
    recency = package / "jaxkv" / "native" / "recency.py"
    recency.write_text(recency.read_text(encoding="utf-8") + "\n# Changed.\n")
    assert run(program, package) == ["0", "1"]


def test_what_cannot_be_read_is_compiled_anew(package):
    program = write(package, LOOK_UP)
    run(program, package)
    kept = list((package / "jaxkv" / "native" / "__pycache__").glob("host.*.nb?"))
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:100])
    assert run(program, package) == ["0", "1"]
    assert run(program, package) == ["1", "0"]


def test_without_a_folder_to_write_to_it_works_all_the_same(package):
    program = write(package, LOOK_UP)
    # A file stands where each folder would be; root may write to any real one.
    for folder in package.glob("jaxkv/**/*.py"):
        (folder.parent / "__pycache__").touch()
    (package / "home").touch()
    home = {"HOME": str(package / "home"), "XDG_CACHE_HOME": str(package / "home")}
    for _ in range(2):
        assert run(program, package, PYTHONDONTWRITEBYTECODE="1", **home) == ["0", "1"]


def test_machine_code_is_not_taken_for_that_of_a_policy_that_was_changed(tmp_path):
    cache = str(tmp_path / "cache")
    for found in (0, -1, 0):
        program = write(tmp_path, OWN_POLICY.format(found=found))
        environ = {"NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
        assert run(program, tmp_path, **environ) == [str(found + 1)]


def test_policies_of_one_name_in_two_programs_do_not_share_machine_code(tmp_path):
    environ = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    for found in (0, -1):
        text = OWN_POLICY.format(found=found)
        program = write(tmp_path, text, name=f"program_{found + 1}.py")
        assert run(program, tmp_path, **environ) == [str(found + 1)]


@compiled
def add_to_tail(bound, number):
    state = state_of(bound)
    state.order.tail[()] += number
    return state.order.places.shape[0]


def test_a_bound_state_is_changed_in_place():
    state = own(lru.init(6, 4))
    assert add_to_tail(Bound(state), 3) == 6
    assert int(state.order.tail) == 3
    assert entry_point(add_to_tail, Bound(state), 1)(Bound(state), 2) == 6
    assert int(state.order.tail) == 5


def test_own_copies_all_arrays():
    state = own(lru.init(6, 4))
    copy = own(state)
    add_to_tail(Bound(copy), 1)
    assert int(state.order.tail) == 0
    assert isinstance(copy.order.tail, np.ndarray)

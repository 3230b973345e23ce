"""Machine code on disk: kept, read by later processes, recompiled after a change."""

import contextlib
import os
import pathlib
import pickle
import re
import shutil
import textwrap

import numpy as np
import pytest

from jaxkv._util.files import delete_oldest, trusted_folder
from jaxkv.compiling import code_cache, compiled, digest_of, inlined
from tests.campaign.store_faults import StoreFault, disk_of
from tests.rigs.children import PIPE, Child

ROOT = pathlib.Path(__file__).resolve().parents[1]

# One function and one that it calls, in files of the package.
QUESTION = """
from jaxkv.answers import answer
from jaxkv.compiling import compiled

@compiled
def ask(number):
    return answer(number)
"""
ANSWER = """
from jaxkv.compiling import compiled

@compiled
def answer(number):
    return number + {version}
"""
ASK = """
from jaxkv.answers import answer
from jaxkv.questions import ask
answer(0)  # What only other compiled functions call is part of their code.
print(ask(0), sum(ask.stats.cache_hits.values()))
"""

# A policy whose native `find` finds every key, or none.
OWN_POLICY = """
import dataclasses, jax
from jaxkv import OffloadingManager, make_lru
from jaxkv.compiling import compiled
from jaxkv.policies.native import register_native
from jaxkv.policies.lru import NATIVE, LRUState

@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnState(LRUState):
    pass

@compiled
def find(state, keys, entries, block_ids):
    entries[:] = {found}
    block_ids[:] = {found}

native = NATIVE._replace(find=find)
register_native(OwnState, native)
made = make_lru(2, 4096)

def init():
    state = made.init()
    return OwnState(state.directory, state.order)

manager = OffloadingManager(16, 2, made._replace(init=init, native=native))
print(manager.lookup([b"a"]))
"""
HELPER = """
from jaxkv.compiling import compiled

@compiled
def found():
    return {found}
"""

# Has a process wait, before it gives the code of `ask` its name, until another one has
# compiled it, too.
HELD_UP = """
import os, pathlib, time
replace = os.replace

def replace_together(source, target, **folders):
    if "ask-" in str(target):
        pathlib.Path("{number} has compiled").touch()
        end = time.monotonic() + 60
        while len(list(pathlib.Path().glob("* has compiled"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
    replace(source, target, **folders)

os.replace = replace_together
"""


def start(program, cwd, **environ):
    # A file of one size and second as the one before is the same for Python.
    environ = (
        os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": ""} | environ
    )
    return Child(program, cwd=cwd, env=environ, stdout=PIPE, stderr=PIPE)


def result(process):
    with process:
        process.wait(timeout=300)
        out, complaints = process.stdout.read(), process.stderr.read()
    assert process.returncode == 0, complaints
    return out.split(), complaints


def run(program, cwd, **environ):
    return result(start(program, cwd, **environ))[0]


def write(folder, text, name="program.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def write_version(package, version):
    write(package / "jaxkv", QUESTION, "questions.py")
    write(package / "jaxkv", ANSWER.format(version=version), "answers.py")
    return write(package, ASK)


@contextlib.contextmanager
def small_disk(folder, size):
    """Mount a file system of a size, if that may be done here."""
    folder.mkdir()
    fault = StoreFault(disk=lambda rng: f"size={size}")
    with disk_of(fault, None, folder):
        yield folder


def fill(disk, leaving):
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(free - leaving))


@pytest.fixture
def package(tmp_path):
    shutil.copytree(
        ROOT / "jaxkv",
        tmp_path / "jaxkv",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return tmp_path


def kept_code(package, name):
    """Return the files of machine code beside the package for a function's name."""
    folder = package / "jaxkv" / "__pycache__" / "code"
    return sorted(folder.glob(f"{name}-*.code"))


def test_code_is_kept_for_the_user_if_the_package_has_no_room_for_it(package):
    program = write_version(package, 1)
    (package / "jaxkv" / "__pycache__").touch()  # Root may write to any real folder.
    home = {"HOME": str(package / "home"), "XDG_CACHE_HOME": str(package / "home")}
    assert run(program, package, **home) == ["1", "0"]
    assert run(program, package, **home) == ["1", "1"]


def test_a_change_of_the_compiler_recompiles_everything(package):
    program = write_version(package, 1)
    run(program, package)
    for file in ("parts.py", "code_cache.py"):
        path = package / "jaxkv" / "compiling" / file
        path.write_text(path.read_text(encoding="utf-8") + "\n# Changed.\n")
        assert run(program, package) == ["1", "0"]


def test_code_is_kept_until_a_called_function_changes(package):
    for version, num_hits in ((1, 0), (2, 0), (1, 1)):
        program = write_version(package, version)
        assert run(program, package) == [str(version), str(num_hits)]


def test_compiled_code_finds_nothing_by_overload():
    """A digest of a caller would not see it."""
    for path in (ROOT / "jaxkv").glob("**/*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^@overload\(", text, re.MULTILINE), path


def test_a_damaged_or_swapped_file_is_recompiled(package):
    program = write_version(package, 1)
    run(program, package)
    [ask], [answer] = kept_code(package, "ask"), kept_code(package, "answer")
    whole = ask.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    # The code of the other function has the same signature.
    for bad in (whole[:100], b"", bytes(flipped), answer.read_bytes()):
        ask.write_bytes(bad)
        assert run(program, package) == ["1", "0"]
    assert run(program, package) == ["1", "1"]


def test_code_of_another_signature_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(code_cache, "_folders", lambda: (tmp_path,))
    monkeypatch.setattr(code_cache.CodeCache, "_file_name", lambda *_: "any.code")

    def add_one(number):
        return number + 1

    assert compiled(add_one)(1) == 2
    again, of_floats = compiled(add_one), compiled(add_one)
    assert (again(1), of_floats(0.5)) == (2, 1.5)
    assert sum(again.stats.cache_hits.values()) == 1
    assert not of_floats.stats.cache_hits


def test_an_intact_file_that_has_no_code_is_recompiled(tmp_path, monkeypatch):
    monkeypatch.setattr(code_cache, "_folders", lambda: (tmp_path,))

    def add_one(number):
        return number + 1

    assert compiled(add_one)(1) == 2
    [path] = tmp_path.iterdir()
    for body in (b"no pickle", pickle.dumps(("no", "code")), pickle.dumps(1)):
        path.write_bytes(code_cache._checksum_of(path.name, body) + body)
        again = compiled(add_one)
        assert (again(1), again.stats.cache_hits) == (2, {})


def test_without_a_writable_folder_functions_compile_and_warn_once(package):
    program = write_version(package, 1)
    # A file stands where each folder would be; root may write to any real one.
    (package / "jaxkv" / "__pycache__").touch()
    (package / "home").touch()
    home = {"HOME": str(package / "home"), "XDG_CACHE_HOME": str(package / "home")}
    for _ in range(2):
        process = start(program, package, **home)
        words, complaints = result(process)
        assert words == ["1", "0"]
        assert complaints.count("set NUMBA_CACHE_DIR to a writable folder") == 1


def test_a_full_disk_neither_stops_a_start_nor_leaves_old_code(package):
    with small_disk(package / "disk", "4m") as disk:
        environ = {"NUMBA_CACHE_DIR": str(disk)}
        assert run(write_version(package, 1), package, **environ) == ["1", "0"]
        fill(disk, leaving=8 << 10)
        program = write_version(package, 2)
        for _ in range(3):
            words, complaints = result(start(program, package, **environ))
            assert words == ["2", "0"]
            assert complaints.count("No space left on device") == 1
        assert not list(disk.glob("**/*.draft"))
        (disk / "filler").unlink()
        assert result(start(program, package, **environ)) == (["2", "0"], "")
        fill(disk, leaving=0)  # What is kept is read all the same.
        assert result(start(program, package, **environ)) == (["2", "1"], "")


def test_a_cold_start_on_a_full_disk_compiles(package):
    program = write_version(package, 1)
    with small_disk(package / "disk", "64k") as disk:
        fill(disk, leaving=0)
        assert run(program, package, NUMBA_CACHE_DIR=str(disk)) == ["1", "0"]


def test_two_concurrent_first_starts_each_keep_their_code(package):
    ask = write_version(package, 1).read_text(encoding="utf-8")
    numbers, programs, processes = ("0", "0.5"), [], []
    for place, number in enumerate(numbers):
        text = ask.replace("ask(0)", f"ask({number})")
        programs.append(write(package, text, f"ask_{place}.py"))
        text = HELD_UP.format(number=place) + text
        processes.append(start(write(package, text, f"held_{place}.py"), package))
    assert [result(process)[0] for process in processes] == [["1", "0"], ["1.5", "0"]]
    assert len(kept_code(package, "ask")) == 2
    for program, answer in zip(programs, ("1", "1.5"), strict=True):
        assert run(program, package) == [answer, "1"]


def test_code_from_before_a_file_was_replaced_is_not_used_after(tmp_path):
    environ = {
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path))),
    }
    write(tmp_path, HELPER.format(found=1), "helper.py")
    updated = write(tmp_path, HELPER.format(found=22), "updated.py")
    program = f"""
        import os, helper
        if os.path.exists("{updated}"):
            os.replace("{updated}", "{tmp_path / "helper.py"}")
        print(helper.found())
    """
    program = write(tmp_path, program)
    assert run(program, tmp_path, **environ) == ["1"]
    assert run(program, tmp_path, **environ) == ["22"]


def test_machine_code_of_a_changed_policy_is_not_used(tmp_path):
    environ = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    for entry in (0, -1):
        program = write(tmp_path, OWN_POLICY.format(found=entry))
        assert run(program, tmp_path, **environ) == [str(entry + 1)]


def make(text, **names):
    space = {"compiled": compiled, "inlined": inlined} | names
    exec(textwrap.dedent(text), space)
    return space["function"]


def test_a_digest_changes_with_everything_a_function_calls_or_reads():
    number = "def function(): return {}"
    call = "def function(): return called()"
    read = "def function(): return value"
    of_module = "def function(): return module.value"
    module = type(pytest)("module")
    digests = []

    def add(function):
        again = digest_of([function])
        assert digest_of([function]) == again
        digests.append(again)

    for value in (1, 2, 2.0, "2"):
        add(make(number.format(repr(value))))
        add(make(read, value=value))
        add(make(read, value=(0, value)))
        add(make(call, called=make(number.format(repr(value)))))
        add(make(call, called=inlined(make(number.format(f"({value!r}, 0)")))))
        add(make(f"def function(given={value!r}): return given"))
        add(make(f"function = lambda value={value!r}: lambda: value")())
        module.value = value
        add(make(of_module, module=module))
        module.value = make(number.format(f"[{value!r}]"))
        add(make(of_module, module=module))
    for value in (1, 2):
        add(make(read, value=np.full(2, value)))
    add(make(call, called=compiled(make(number.format(7)))))
    add(make(call, called=compiled(make(number.format(7)), nogil=True)))
    assert len(set(digests)) == len(digests)


def test_a_digest_is_the_same_for_the_same_code():
    text = """
        def called(number): return number + {step}
        called = compiled(called)
        def function(number): return called(number){comment}
    """
    plain = make(text.format(step=1, comment=""))
    commented = make("# Why.\n\n" + textwrap.dedent(text).format(step=1, comment=" #"))
    assert digest_of([plain]) == digest_of([commented])


class Payload:
    """Code of a stranger, which runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def planted(folder, names, has_run):
    """Plant code under the names of a cache's files."""
    folder.mkdir(parents=True)
    for name in names:
        body = pickle.dumps(Payload(has_run))
        (folder / name).write_bytes(code_cache._checksum_of(name, body) + body)
    return folder


def given_away(path):
    """Give a folder and its files to another user."""
    for place in (path, *path.rglob("*")):
        os.lchown(place, 65534, 65534)


PLANTS = {
    "folder of another user": lambda top: given_away(top / "cache"),
    "file of another user": lambda top: [
        os.chown(file, 65534, 65534) for file in top.glob("cache/jaxkv/*.code")
    ],
    "folder that all may write": lambda top: (top / "cache/jaxkv").chmod(0o1777),
    "parent that all may write": lambda top: top.chmod(0o777),
    "file that a group may write": lambda top: [
        file.chmod(0o664) for file in top.glob("cache/jaxkv/*.code")
    ],
    "link of another user": lambda top: given_away(
        (top / "cache").rename(top / "real") and linked(top / "cache", "real")
    ),
}


def linked(path, target):
    path.symlink_to(target)
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("plant", PLANTS)
def test_code_that_another_user_may_have_written_is_not_run(package, plant):
    program = write_version(package, 1)
    home = {"XDG_CACHE_HOME": str(package / "home")}
    run(program, package, NUMBA_CACHE_DIR=str(package / "own"), **home)
    names = [path.name for path in (package / "own" / "jaxkv").iterdir()]
    top = package / "open"
    planted(top / "cache" / "jaxkv", names, package / "has run")
    top.chmod(0o1777)
    environ = {"NUMBA_CACHE_DIR": str(top / "cache"), **home}
    PLANTS[plant](top)
    words, complaints = result(start(program, package, **environ))
    assert words == ["1", "0"]
    assert not (package / "has run").exists()
    reason = "belongs to user 65534|other users may write"
    assert len(re.findall(reason, complaints)) == 1, complaints
    if not plant.startswith("file"):  # Its own file replaces one of a stranger.
        assert "NUMBA_CACHE_DIR is not used" in complaints
        assert list((package / "home").glob("**/ask-*.code"))
    assert run(program, package, **environ) == ["1", "1"]


def test_a_sticky_parent_that_all_may_write_is_no_obstacle(package):
    program = write_version(package, 1)
    (package / "open").mkdir()
    (package / "open").chmod(0o1777)  # Like /tmp.
    (package / "link").symlink_to("open")
    environ = {"NUMBA_CACHE_DIR": str(package / "link" / "numba")}
    assert run(program, package, **environ) == ["1", "0"]
    assert result(start(program, package, **environ)) == (["1", "1"], "")


def test_old_files_do_not_pile_up(tmp_path):
    for number in range(5):
        path = tmp_path / f"{number}.code"
        path.write_bytes(bytes(4))
        os.utime(path, (number, number))
    with trusted_folder(tmp_path) as folder:
        delete_oldest(folder, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.code", "4.code"]

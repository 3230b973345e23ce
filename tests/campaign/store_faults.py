"""The faults of a store by name; each is tried by itself.

What a store does wrong while it is called is left to `FaultyStore`. What others do to a
folder meanwhile is done to its files: they are cut, changed, exchanged, deleted. A disk
that is full, or that may only be read, is a file system of its own, where one may be
mounted. Servers are real ones, which are killed and come back.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.rigs.faulty_store import Faults
from tests.rigs.servers import (
    OF_CLUSTER,
    free_port,
    mooncake_lending_process,
    mooncake_master,
    redis_cluster,
    redis_server,
)

MAX_FILES = 4


@dataclasses.dataclass(frozen=True)
class StoreFault:
    """A fault of a store that `num_engines` engines share."""

    faults: Faults = dataclasses.field(default_factory=Faults)
    num_engines: int = 1
    # The share of steps, from 0 to 1, after which `happens(rng, folder)` is called; it
    # returns how many faults it has caused.
    share: float = 0.0
    happens: Callable | None = None
    disk: Callable | None = None  # Options of a file system to mount for the folder.
    servers: Callable | None = None  # Their context gives a URL and what happens.
    storage_blocks: int = 4000
    sign: str = "mishaps"  # The counter that shows that the fault has occurred.


def empty(rng, folder):
    """Delete all objects, and sometimes their folders, as an operator may."""
    files = objects_of(folder)
    for path in files:
        _try(os.unlink, path)
    if rng.random() < 0.3:
        for entry in os.scandir(folder):
            shutil.rmtree(entry.path, ignore_errors=True)
    return 1


def to_some(change, rng, folder):
    """Change a few files in place, while engines read them."""
    files = objects_of(folder)
    chosen = rng.sample(files, min(len(files), rng.randint(1, MAX_FILES)))
    return sum(_try(change, rng, path) for path in chosen)


def cut(rng, path):
    os.truncate(path, rng.randrange(os.path.getsize(path) + 1))


def flip(rng, path):
    with open(path, "r+b") as file:
        place = rng.randrange(max(8 * os.path.getsize(path), 1))
        file.seek(place // 8)
        [byte] = file.read(1)
        file.seek(place // 8)
        file.write(bytes([byte ^ 1 << place % 8]))


def delete(rng, path):
    os.unlink(path)


def exchange(rng, folder):
    files = objects_of(folder)
    if len(files) < 2:
        return 0
    num = rng.randint(1, MAX_FILES)
    for _ in range(num):
        source, target = rng.sample(files, 2)
        aside = os.path.join(os.path.dirname(target), ".exchanged")
        if _try(shutil.copyfile, source, aside):
            _try(os.replace, aside, target)
    return num


def turn_read_only(rng, folder):
    is_read_only = not os.access(folder, os.W_OK)
    how = "rw" if is_read_only else "ro"
    # Refused while a file is being written.
    return _run("mount", "-o", f"remount,{how}", folder) is None


@contextlib.contextmanager
def cluster(folder):
    """Run a Redis Cluster of six; its nodes die with all that they have."""
    folder = Path(folder)
    with contextlib.ExitStack() as stack:
        url, nodes = stack.enter_context(redis_cluster(folder, num_replicas=1))
        number_of = {port: number for number, port in enumerate(nodes)}

        def start(port):
            node = folder / str(number_of[port])
            server = redis_server(node, *OF_CLUSTER, port=port)
            return stack.enter_context(server)[1]

        yield url, _Deaths(nodes, start)


@contextlib.contextmanager
def mooncake(folder):
    """Run a Mooncake pool: the master dies, and the process that lends memory."""
    port = free_port()
    with contextlib.ExitStack() as stack:

        def start(name):
            if name == "master":
                return stack.enter_context(mooncake_master(port))[1]
            return stack.enter_context(mooncake_lending_process(url))

        url, master = stack.enter_context(mooncake_master(port))
        yield url, _Deaths({"master": master, "lender": start("lender")}, start)


class _Deaths:
    """Kills one process of several, and starts it again when it is called next."""

    def __init__(self, running, start):
        self.running, self.start = running, start
        self.dead = None

    def __call__(self, rng, folder):
        if self.dead is not None:
            self.running[self.dead], self.dead = self.start(self.dead), None
            return 0
        self.dead = rng.choice(list(self.running))
        self.running[self.dead].kill()
        self.running[self.dead].wait()
        return 1


FAULTS = {
    "errors": StoreFault(Faults(error=0.2, raising=0.02), sign="error, injected"),
    "hangs": StoreFault(Faults(hang=0.1), sign="hang, injected"),
    "late": StoreFault(Faults(late=0.5, late_s=0.1), sign="late, injected"),
    "full": StoreFault(
        share=0.02,
        happens=partial(to_some, delete),
        sign="write full",
        # Of few pages, or of few files.
        disk=lambda rng: rng.choice(
            (f"size={rng.choice((16, 64)) << 12}", "nr_inodes=24")
        ),
    ),
    "read-only": StoreFault(
        share=0.02,
        happens=turn_read_only,
        disk=lambda rng: "size=64m",
        sign="write denied",
    ),
    "truncated": StoreFault(
        Faults(cut=0.1, tear=0.1), share=0.1, happens=partial(to_some, cut), sign="torn"
    ),
    "flipped": StoreFault(
        Faults(flip=0.2), share=0.1, happens=partial(to_some, flip), sign="checksum"
    ),
    "exchanged": StoreFault(Faults(swap=0.2), share=0.1, happens=exchange, sign="key"),
    "shared": StoreFault(num_engines=2, storage_blocks=12, sign="evicted"),
    "emptied": StoreFault(Faults(lose=0.05), share=0.05, happens=empty),
    "cluster": StoreFault(num_engines=2, share=0.02, servers=cluster),
    # It takes seconds until those that lend are known again.
    "mooncake": StoreFault(num_engines=2, share=0.005, servers=mooncake),
}


@contextlib.contextmanager
def place_of(fault, rng, folder):
    """Make ready what a fault needs: the URL of the store, and what happens to it."""
    if fault.servers is not None:
        with fault.servers(folder) as place:
            yield place
    else:
        with disk_of(fault, rng, folder):
            yield folder, fault.happens


@contextlib.contextmanager
def disk_of(fault, rng, folder):
    """Mount the file system that a fault needs, if any, or skip the test."""
    if fault.disk is None:
        yield
        return
    error = _run("mount", "-t", "tmpfs", "-o", fault.disk(rng), "tmpfs", folder)
    if error is not None:
        pytest.skip(f"no file system may be mounted here ({error})")
    try:
        yield
    finally:
        error = _run("umount", "--lazy", folder)
        assert error is None, error


def objects_of(folder):
    return sorted(
        os.path.join(path, name)
        for path, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".")
    )


def _try(change, *args):
    """Return whether a file could be changed: the engines delete some meanwhile."""
    try:
        change(*args)
    except (OSError, ValueError):
        return False
    return True


def _run(*words):
    """Run a command; return its error, None if it succeeds."""
    if shutil.which(words[0]) is None:
        return f"there is no {words[0]} here"
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (done.stderr.strip() or "it failed") if done.returncode else None

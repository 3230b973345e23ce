"""Faults of the transfer engine, which `jaxkv verify` must find.

Most replace public methods of `TransferEngine`; the rest are changes of its code that
`tests/mutants/faults.toml` lists.
"""

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
import tomllib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
CODE = ROOT / "tests" / "mutants" / "faults.toml"
EIGHT = "--xla_force_host_platform_device_count=8"


def put(name):
    """Install a fault in this process."""
    if name in FAULTS:
        from jaxkv.transfer import TransferEngine

        FAULTS[name](TransferEngine)
    elif name:
        change_code(tomllib.loads(CODE.read_text(encoding="utf-8"))[name])


def change_code(fault):
    """Change the code of a module when it is imported."""
    path = ROOT / fault["path"]
    name = ".".join(Path(fault["path"]).with_suffix("").parts)

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname):
            text = self.get_source(fullname)
            for find, replace in fault["edits"]:
                assert text.count(find) == 1
                text = text.replace(find, replace)
            return compile(text, str(path), "exec")

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, *_):
            if fullname != name:
                return None
            loader = Loader(fullname, str(path))
            return importlib.util.spec_from_loader(fullname, loader)

    sys.meta_path.insert(0, Finder())


def replaces(method):
    """Make a fault of a function that gets the real method, then the arguments."""

    def make(function):
        def patch(engine_class):
            real = getattr(engine_class, method)

            @functools.wraps(real)
            def wrapper(self, *args, **named):
                return function(real, self, *args, **named)

            setattr(engine_class, method, wrapper)

        return patch

    return make


@replaces("save")
def wrong_row(real, self, pool, device_ids, host_ids):
    return real(self, pool, np.roll(np.asarray(device_ids), 1, axis=0), host_ids)


@replaces("load")
def lost_piece(real, self, pool, host_ids, device_ids, **named):
    return real(self, pool, host_ids[:-1], device_ids[:-1], **named)


@replaces("is_waiting")
def race_with_the_model(real, self, ticket):
    return False


def early_report(engine_class):
    """Report every load at the next poll, though its bytes may not be there."""
    from jaxkv.transfer import Completion

    load, poll = engine_class.load, engine_class.poll

    def begin(self, pool, host_ids, device_ids, **named):
        pool, ticket = load(self, pool, host_ids, device_ids, **named)
        self.early = {*getattr(self, "early", ()), ticket}
        return pool, ticket

    def report(self):
        early, self.early = getattr(self, "early", set()), set()
        self.reported = getattr(self, "reported", set()) | early
        done = [done for done in poll(self) if done.ticket not in self.reported]
        return [*done, *(Completion(ticket, (), 0, None) for ticket in sorted(early))]

    engine_class.load, engine_class.poll = begin, report


def rounding_of_xla(engine_class):
    """XLA:CPU rewrites small floats again, which quietens signalling NaNs."""
    from jaxkv.transfer import memory

    memory.compiler_options = lambda platform: None


def restores(copy, restore):
    """Make a fault: what `copy` takes of a pool is put back after each load.

    If it takes None, the pool stays as it is.
    """

    def patch(engine_class):
        load, drain = engine_class.load, engine_class.drain

        def begin(self, pool, *args, **named):
            self.before = copy(pool)
            return load(self, pool, *args, **named)

        def end(self, pool):
            pool, done = drain(self, pool)
            before, self.before = getattr(self, "before", None), None
            return (pool if before is None else restore(pool, before)), done

        engine_class.load, engine_class.drain = begin, end

    return patch


def copy_last_shard(pool):
    import jax

    leaves = jax.tree.leaves(pool)
    if len(leaves[0].sharding.device_set) == 1:
        return None
    return [np.array(leaf.addressable_shards[-1].data) for leaf in leaves]


def restore_last_shard(pool, before):
    import jax

    def put(leaf, old):
        *arrays, last = (shard.data for shard in leaf.addressable_shards)
        arrays.append(jax.device_put(old, last.device))
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, arrays
        )

    return [put(leaf, old) for leaf, old in zip(pool, before, strict=True)]


def copy_scale(pool):
    has_scale = isinstance(pool, dict) and "scale" in pool
    return [np.array(leaf) for leaf in pool["scale"]] if has_scale else None


def restore_scale(pool, before):
    import jax.numpy as jnp

    return {**pool, "scale": [jnp.array(leaf) for leaf in before]}


@replaces("load")
def padding_that_leaks(real, self, pool, host_ids, device_ids, **named):
    ids = np.asarray(device_ids)
    free = sorted({*range(self.num_device_blocks)} - {*ids.ravel().tolist()})
    if ids.ndim == 1 and free:
        host_ids, ids = [*host_ids, host_ids[0]], [*ids, free[-1]]
    return real(self, pool, host_ids, ids, **named)


@replaces("save")
def stale_extent(real, self, pool, device_ids, host_ids):
    pairs = zip(device_ids, np.asarray(host_ids).tolist(), strict=True)
    saved = self.__dict__.setdefault("saved", set())
    new = [(device, host) for device, host in pairs if host not in saved]
    saved |= {host for _, host in new}
    devices, hosts = zip(*new, strict=True) if new else ((), ())
    return real(self, pool, np.array(devices, np.int32), hosts)


@replaces("copy")
def copy_the_wrong_way(real, self, pool, source_ids, target_ids):
    return real(self, pool, target_ids, source_ids)


@replaces("write_host")
def bytes_of_a_neighbour(real, self, host_ids, payloads):
    return real(self, host_ids, [*payloads[1:], payloads[0]])


@replaces("load_each")
def blocks_of_another_request(real, self, pool, host_ids, device_ids, *args, **named):
    return real(self, pool, np.roll(host_ids, 1), device_ids, *args, **named)


def coarse_compression(engine_class):
    from jaxkv.transfer import codecs

    codecs._QUANTISED["int8"] = (codecs._QUANTISED["int8"][0], 63.0)


def failure_reported_as_success(engine_class):
    def forgive(done):
        return [dataclasses.replace(each, error=None) for each in done]

    poll, drain = engine_class.poll, engine_class.drain
    engine_class.poll = lambda self: forgive(poll(self))

    def end(self, pool):
        pool, done = drain(self, pool)
        return pool, forgive(done)

    engine_class.drain = end


def in_one_dtype(function):
    """Make a fault of a runtime that cannot copy float8_e5m2."""

    @replaces("copy")
    def patch(real, self, pool, *args):
        import jax

        if any(leaf.dtype.name == "float8_e5m2" for leaf in jax.tree.leaves(pool)):
            function()
        return real(self, pool, *args)

    return patch


def sleep():
    while True:
        time.sleep(1)


FAULTS = {
    "a wrong row": wrong_row,
    "a lost piece": lost_piece,
    "an early report": early_report,
    "a race with the model's write": race_with_the_model,
    "the rounding of another dtype": rounding_of_xla,
    "a dropped shard": restores(copy_last_shard, restore_last_shard),
    "a scale left behind": restores(copy_scale, restore_scale),
    "padding that leaks": padding_that_leaks,
    "a stale extent": stale_extent,
    "a copy the wrong way": copy_the_wrong_way,
    "bytes of a neighbour": bytes_of_a_neighbour,
    "blocks of another request": blocks_of_another_request,
    "coarse compression": coarse_compression,
    "a failure reported as success": failure_reported_as_success,
    "crash": in_one_dtype(os.abort),
    "hang": in_one_dtype(sleep),
}
# The stage that must find each, some by their names in `faults.toml`.
FOUND_BY = {
    **dict.fromkeys([*FAULTS][:-2], "blocks"),
    "an early report": "races",
    "a race with the model's write": "races",
    "blocks of another request": "engine",
    "a failure reported as success": "failures",
    "failed-save-can-be-loaded": "failures",
    "save-overtakes-a-load": "races",
    "carried-blocks-are-lost": "blocks",
}

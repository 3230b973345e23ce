"""Every public call refuses every wrong type of every argument, and changes nothing.

Each call is made with one wrong argument. It must raise an error of jaxkv's own, which
says what would be right, and leave all arrays and books as they were.
"""

import math
import re
import types
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from jaxkv import (
    BorrowedPool,
    ConnectorOutput,
    DeviceBlockPool,
    Extras,
    FullAttention,
    KeyChain,
    Namespace,
    OffloadConfig,
    OffloadingManager,
    OffloadRules,
    OffloadScheduler,
    OffloadWorker,
    SchedulerOutput,
    TraceRecorder,
    TransferEngine,
    find_cached_prefix,
    make_hazard,
    make_lru,
    make_retained,
)
from jaxkv._util import shown
from jaxkv.observe.metrics import OffloadMetrics
from jaxkv.observe.publisher import EventPublisher
from jaxkv.scheduling.protocol import OffloadMetadata, TierReport
from jaxkv.transfer.storage import LocalStore, ObjectFormat
from tests.rigs.offload_rig import BLOCK_SIZE, NUM_BLOCKS, make_keys
from tests.rigs.refusals import LONG, WRONG, is_short_line
from tests.rigs.scheduler_state import snapshot

# What Python and NumPy say by themselves, which does not say what would be right.
_UNCLEAR = re.compile(
    "object is not|has no attribute|not supported between|unsupported operand|"
    "cannot be interpreted|truth value|object of type|not subscriptable|unpack|"
    "not all arguments converted|indices must be|invalid literal|positional argument|"
    "inhomogeneous|setting an array element|zip\\(|unhashable|has no len|"
    "a bytes-like object|can only concatenate|must be real number"
)
_LONG = [LONG, [LONG], [1.5] * 100_000]
_NO_COUNTS = [
    *_LONG,
    "12",
    b"12",
    2.5,
    math.nan,
    None,
    True,
    -1,
    [1],
    np.array([1, 2]),
    object(),
]
_NO_TOKENS = [value for value in _NO_COUNTS if value is not True]  # It is 1.
_NO_FLAGS = ["yes", 2, [True], object()]
_NO_INTS = [
    value for value in _NO_COUNTS if value is None or not isinstance(value, int)
]
_NO_IDS = [
    *_LONG,
    *("1", b"\x01" * 8, 1, None, object(), {"a": 1}, [2.5], ["1"], [None], [-1]),
    *([1 << 70], [[1]], np.array([1.5]), np.array([True]), np.array([[1]])),
]
# Of a table, which may have a list for each group.
_NO_TABLE = [*_NO_IDS[:-4], _NO_IDS[-3], _NO_IDS[-2], [[1], [2]]]
_NO_KEYS = [*_LONG, "key", b"k" * 32, 7, None, object(), [7], [None], ["k" * 32]]
_NO_LISTS_OF_KEYS = [*_NO_KEYS, {}, {b"k" * 32}, [[b"k" * 32]], iter([])]
_NO_LISTS_OF_LISTS = [*_NO_KEYS, [b"k" * 32], [], [[], []], [[7]], [7], ["k"], {}]
_NO_POSITIONS = ["01", 1, object(), [2.5, 1], ["0", "1"], [0], [-1, 0], [0, 1 << 31]]
_NO_NAMES = ["one", b"one", 7, object(), [7], [None], [["one"]]]


def digest(*owner):
    return [snapshot(part, "part").digest for part in owner]


def check(name, owner, cases):
    """Check that calls are refused, and that their owner is as before."""
    before, faults = digest(*owner), []
    for what, call, arguments in cases:
        try:
            call(*arguments)
        except Exception as error:
            message = str(error)
            is_right = isinstance(error, TypeError | ValueError)
            is_right &= is_short_line(message) and not _UNCLEAR.search(message)
            if not is_right:
                faults.append(f"{what}: {type(error).__name__}: {message[:500]}")
        else:
            faults.append(f"{what} was taken")
        after = digest(*owner)
        if after != before:
            faults.append(f"{what} changed something")
            before = after
    assert not faults, "\n".join([name, *faults])


def one_wrong(call, right, wrong):
    for place, values in enumerate(wrong):
        for value in values:
            args = [*right[:place], value, *right[place + 1 :]]
            yield f"argument {place} = {shown(value)}", call, args


@pytest.fixture
def engine():
    return make_engine()


def make_engine(**rules):
    pool = DeviceBlockPool(NUM_BLOCKS)
    rules = OffloadRules(**rules)
    scheduler = OffloadScheduler(BLOCK_SIZE, NUM_BLOCKS, rules=rules)
    scheduler.bind_device_block_pool(pool)
    before = make_request("before", 1, 2, 3)
    blocks = admit(scheduler, pool, before)
    pool.cache(blocks[:3], before.block_keys)
    before.num_computed_tokens = before.num_tokens
    meta = scheduler.build_connector_meta(SchedulerOutput({"before": 1}))
    arrived = ConnectorOutput(completed_store_events=(meta.store_event,))
    scheduler.update_connector_output(arrived)
    scheduler.request_finished(before)
    pool.free(blocks)
    pool.evict(blocks)
    first = make_request("one", 4, 5)
    first.blocks = admit(scheduler, pool, first)
    first.num_computed_tokens = first.num_tokens
    pool.cache(first.blocks[:2], first.block_keys)
    two = make_request("two", 1, 2, 3, 4)
    assert scheduler.get_num_new_matched_tokens(two, 0) == (3 * BLOCK_SIZE, True)
    two.blocks = pool.allocate(5)
    return types.SimpleNamespace(scheduler=scheduler, pool=pool, one=first, two=two)


def make_request(name, *path):
    num_tokens = len(path) * BLOCK_SIZE + 1
    return types.SimpleNamespace(
        request_id=name,
        block_keys=make_keys(*path),
        num_tokens=num_tokens,
        num_computed_tokens=0,
        num_prompt_tokens=num_tokens,
        num_output_placeholders=0,
        max_offload_tokens=None,
        max_load_tokens=None,
        remote_prefill=False,
        stop=None,
        kind=None,
        retention=None,
    )


def admit(scheduler, pool, request):
    scheduler.get_num_new_matched_tokens(request, 0)
    blocks = pool.allocate(len(request.block_keys) + 1)
    scheduler.update_state_after_alloc(request, blocks, 0)
    return blocks


_LIMIT = [value for value in _NO_COUNTS if value is not None]
_ATTRIBUTES = {
    "request_id": [7, None, b"one", ["one"], object()],
    "num_tokens": [*_NO_COUNTS, 1 << 31],
    "num_computed_tokens": _NO_COUNTS,
    "block_keys": _NO_LISTS_OF_KEYS,
}
_LOOKED_UP = {"max_load_tokens": _LIMIT, "remote_prefill": _NO_FLAGS}
_STORED = {
    "max_offload_tokens": _LIMIT,
    "num_prompt_tokens": _LIMIT,
    "num_output_placeholders": _NO_COUNTS,
}
_BEGUN = {"kind": [-1, 256, True, 1.0, "1", object()]}
_ENDED = {
    "stop": ["eos", b"stop", 7, ["end_turn"], np.array([1, 2]), object()],
    "retention": ["80", 80, {"priority": 80}, object()],
}
_CALLS = {
    "get_num_new_matched_tokens": (_LOOKED_UP, lambda request: (0,)),
    "explain": (_LOOKED_UP, lambda request: (0,)),
    "update_state_after_alloc": (_STORED | _BEGUN, lambda request: (request.blocks, 0)),
    "request_preempted": (_STORED, lambda request: ()),
    "request_finished": (_STORED | _ENDED, lambda request: (request.blocks,)),
}


@pytest.mark.parametrize("name", _CALLS)
def test_a_request_with_an_attribute_of_a_wrong_type_is_refused(name):
    engine = make_engine(retention=True)
    owner = engine.scheduler, engine.pool
    attributes, arguments_of = _CALLS[name]
    call = getattr(engine.scheduler, name)

    def cases():
        new = make_request("new", 6, 7)
        new.blocks = [NUM_BLOCKS - 1]
        for request in (engine.one, engine.two, new):
            if request is new and name in ("request_preempted", "request_finished"):
                continue  # It has no keys that would be read.
            for attribute, values in (_ATTRIBUTES | attributes).items():
                for value in values:
                    wrong = types.SimpleNamespace(**vars(request))
                    setattr(wrong, attribute, value)
                    what = f"{attribute}={shown(value)} of {request.request_id}"
                    yield what, call, (wrong, *arguments_of(request))
        for attribute in _ATTRIBUTES:
            wrong = types.SimpleNamespace(**vars(engine.one))
            delattr(wrong, attribute)
            yield f"no {attribute}", call, (wrong, *arguments_of(engine.one))
        yield "None", call, (None, *arguments_of(engine.one))

    check(name, owner, cases())
    incomplete = types.SimpleNamespace(request_id="a", num_tokens=5)
    for request, message in (
        (incomplete, "it lacks block_keys, num_computed_tokens"),
        (None, "request=None must have the attributes of"),
    ):
        with pytest.raises(TypeError, match=message):
            call(request, *arguments_of(engine.one))


def test_a_request_that_changes_an_attribute_while_it_runs_is_refused_in_the_step():
    engine = make_engine()
    engine.scheduler.build_connector_meta(SchedulerOutput({"one": 1}))
    request, owner = engine.one, (engine.scheduler, engine.pool)
    request.num_tokens = request.num_computed_tokens = 3 * BLOCK_SIZE + 1
    request.block_keys = make_keys(4, 5, 6)
    step = SchedulerOutput({"one": 1, "two": 1}, {"one": [9]}, ["two"])
    for attribute, values in (_ATTRIBUTES | _STORED).items():
        if attribute == "request_id":
            continue
        right = getattr(request, attribute)
        for value in values:
            is_small = attribute == "num_computed_tokens" and isinstance(
                value, int | float
            )
            if is_small or isinstance(value, dict | set):
                continue  # There is nothing to offer yet.
            setattr(request, attribute, value)
            # Not the attribute itself, which is the engine's.
            before = digest(*owner)
            with pytest.raises((TypeError, ValueError)) as refused:
                engine.scheduler.build_connector_meta(step)
            assert not _UNCLEAR.search(str(refused.value)), (attribute, value)
            assert digest(*owner) == before, (attribute, value)
        setattr(request, attribute, right)
    engine.scheduler.build_connector_meta(step)


def test_arguments_of_a_wrong_type_are_refused_by_the_scheduler(engine):
    scheduler, first, second = engine.scheduler, engine.one, engine.two
    blocks, no_step = second.blocks, [None, 7, "one", {}, [], object()]
    no_moves = ConnectorOutput()
    owner = scheduler, engine.pool

    def cases():
        query = scheduler.get_num_new_matched_tokens
        yield from one_wrong(query, (second, 0), ([], [*_NO_COUNTS, 3]))
        explain = scheduler.explain
        counts = [value for value in _NO_COUNTS if value is not None]
        yield from one_wrong(explain, (second, 0), ([], [*counts, 3]))
        take = scheduler.update_state_after_alloc
        wrong = [], _NO_TABLE, [*_NO_COUNTS, 3, 1 << 20]
        yield from one_wrong(take, (second, blocks, 3 * BLOCK_SIZE), wrong)
        finish = scheduler.request_finished
        no_table = [ids for ids in _NO_TABLE if ids is not None]
        yield from one_wrong(finish, (first, first.blocks), ([], no_table))
        yield from one_wrong(scheduler.build_connector_meta, ({},), (no_step,))
        yield from one_wrong(
            lambda *fields: scheduler.build_connector_meta(SchedulerOutput(*fields)),
            ({"one": 1}, {"one": [9]}, ["two"]),
            (
                [*no_step[:3], [], *({"one": num} for num in _NO_TOKENS)],
                [*no_step[:3], [], *({"one": ids} for ids in _NO_TABLE)],
                [*_NO_NAMES, None, {"one": 1}, np.array(["one"])],
            ),
        )
        report = scheduler.update_connector_output
        yield from one_wrong(report, (no_moves,), (no_step,))
        events = ["0", 0, [None], ["0"], [0.0], [False], [99], object()]
        tiers = [7, [7], [None], "below", [TierReport(tier="0")], [TierReport(tier=1)]]
        yield from one_wrong(
            lambda *fields: report(ConnectorOutput(*fields)),
            ((), (), (), (), ()),
            (_NO_NAMES, _NO_NAMES, events, events, tiers),
        )
        rates = ["1", None, math.nan, math.inf, -1.0, [1], object()]
        yield from one_wrong(scheduler.set_rates, (1.0, 1.0, 1.0), (rates,) * 3)

    check("OffloadScheduler", owner, cases())


def test_a_report_of_which_a_part_is_wrong_is_not_applied_in_part():
    """Stores, loads and tiers below are checked before any of them is applied."""
    engine = make_engine()
    scheduler, two = engine.scheduler, engine.two
    scheduler.update_state_after_alloc(two, two.blocks, 3 * BLOCK_SIZE)
    step = scheduler.build_connector_meta(SchedulerOutput({"one": 1}))
    right = {
        "completed_store_events": (step.store_event,),
        "finished_recving": ("two",),
    }
    wrong = {
        "completed_store_events": (step.store_event, 99),
        "failed_store_events": (float(step.store_event),),
        "finished_recving": ("two", "three"),
        "failed_recving": "two",
        "below": (TierReport(),),
    }
    cases = (
        (f"{field}={value}", scheduler.update_connector_output, [report])
        for field, value in wrong.items()
        for report in [ConnectorOutput(**right | {field: value})]
    )
    check("update_connector_output", (scheduler, engine.pool), cases)
    output = scheduler.update_connector_output(ConnectorOutput(**right))
    assert (output.finished_recving, output.completed_store_events) == (("two",), (1,))


def test_arguments_of_a_wrong_type_are_refused_by_the_device_pool():
    keys = make_keys(1, 2)
    pool = DeviceBlockPool(NUM_BLOCKS)
    pool.cache(pool.allocate(2), keys)
    blocks = [1, 2]

    def cases():
        for name in ("find", "find_prefix"):
            yield from one_wrong(getattr(pool, name), (keys,), (_NO_KEYS,))
        for name in ("counts", "touch", "free", "pin", "unpin", "evict"):
            yield from one_wrong(getattr(pool, name), (blocks,), (_NO_IDS,))
        for name in ("holds", "cache"):
            yield from one_wrong(
                getattr(pool, name), (blocks, keys), (_NO_IDS, _NO_KEYS)
            )
        for name in ("allocate", "next_free", "next_keys", "next_victims"):
            counts = _NO_COUNTS if name == "allocate" else _NO_INTS
            yield from one_wrong(getattr(pool, name), (1,), (counts,))
        yield from one_wrong(pool.ref_cnt, (1,), (_NO_TOKENS,))
        copies = [value for value in _NO_IDS if value not in ([-1],)]
        yield from one_wrong(pool.record_copies, (blocks, [3, 4]), (_NO_IDS, copies))

    check("DeviceBlockPool", (pool,), cases())
    for num_blocks in _NO_COUNTS:
        with pytest.raises((TypeError, ValueError), match="num_blocks="):
            DeviceBlockPool(num_blocks)
    for block_size in _NO_COUNTS:
        with pytest.raises((TypeError, ValueError), match="block_size="):
            DeviceBlockPool(4, block_size=block_size)


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_arguments_of_a_wrong_type_are_refused_by_the_manager(policy):
    keys, new = make_keys(1, 2), make_keys(3)
    manager = OffloadingManager(
        BLOCK_SIZE,
        NUM_BLOCKS,
        policy,
        enable_events=True,
        store_threshold=2,
        retention=policy == "lru",
    )
    manager.prepare_store(keys, filtered=False)
    manager.complete_store(keys)
    blocks = manager.prepare_load(keys).block_ids
    manager.place(make_keys(4), filtered=False)

    def cases():
        for name in (
            *("lookup", "prepare_load", "complete_load", "prepare_store", "place"),
            *("request_step", "touch", "reorder", "has_room", "find", "find_held"),
            *("contains", "discard", "complete_store", "count_lookup", "passes"),
        ):
            yield from one_wrong(getattr(manager, name), (keys,), (_NO_KEYS,))
        for name in ("pin", "unpin"):
            yield from one_wrong(getattr(manager, name), (blocks,), (_NO_IDS,))
        yield from one_wrong(manager.publish, ([2], make_keys(4)), (_NO_IDS, _NO_KEYS))
        yield from one_wrong(manager.has_room, (new, blocks), ([], _NO_IDS))
        wrong = [7, None, "lru", ["lru"], object()]
        yield from one_wrong(manager.complete_step, ("?",), (wrong,))
        # Without retention no key has a priority, and "lru" learns nothing of requests.
        wrong = _NO_KEYS, [LONG, 80, {"priority": 80}], _NO_INTS
        if policy == "lru":
            yield from one_wrong(manager.retain, (keys, None, 0), wrong)
            return
        wrong = _NO_KEYS, [*_NO_COUNTS, 1 << 31], _NO_INTS, _NO_POSITIONS
        wrong = *wrong, [-1, 256, 1.0, "1", object()]
        yield from one_wrong(manager.begin_request, (keys, 8, 0, [0, 1], 0), wrong)
        wrong = _NO_KEYS, [*_NO_INTS, True], _NO_INTS, _LIMIT, _ENDED["stop"]
        right = keys, 0, 0, 4, "end_turn", [0, 1]
        yield from one_wrong(manager.finish_request, right, (*wrong, _NO_POSITIONS))

    check("OffloadingManager", (manager,), cases())


def test_arguments_of_a_wrong_type_are_refused_by_the_chain_and_the_search():
    namespace = Namespace("m", "0", "float32", "flat", BLOCK_SIZE)
    chain = KeyChain(namespace)
    chain.extend(range(BLOCK_SIZE + 1))
    make = [
        *one_wrong(
            KeyChain, (namespace, Extras(), 0), ([None, LONG], [None, LONG], _NO_COUNTS)
        ),
        *one_wrong(
            Namespace, ("m", "0", "int8", "flat", 2), ([7, None],) * 4 + (_NO_COUNTS,)
        ),
    ]
    check("KeyChain and Namespace", (), make)
    pool, groups = DeviceBlockPool(NUM_BLOCKS), (FullAttention(BLOCK_SIZE),)
    wrong = (
        [None, 7, "pool"],
        [None, "4", 0, -4, 2.5, (), [16]],
        _NO_LISTS_OF_LISTS,
        _NO_INTS,
    )
    right = pool, groups, [chain.keys], 4
    check("find_cached_prefix", (pool,), one_wrong(find_cached_prefix, right, wrong))


def test_arguments_of_a_wrong_type_are_refused_by_the_engine():
    pool = {"kv": jnp.arange(16.0).reshape(8, 2)}
    engine = TransferEngine(pool, 8, mode="staged")
    engine.save(pool, [1, 2], [0, 1])
    pool, _ = engine.drain(pool)
    owner, no_pools = (engine,), [None, 7, "pool", {}, {"kv": np.zeros((8, 2))}, [pool]]

    def cases():
        no_hosts = [*_NO_IDS, [9], [0, 0]]
        save, load = (pool, [3, 4], [2, 3]), (pool, [0, 1], [3, 4])
        no_devices = [*_NO_IDS, [9]]
        yield from one_wrong(engine.save, save, (no_pools, no_devices, no_hosts))
        yield from one_wrong(engine.check_save, save[1:], (no_devices, no_hosts))
        for name in ("load", "check_load"):
            wrong = no_pools, [*_NO_IDS, [9], [5]], [*no_devices, [3, 3]]
            yield from one_wrong(getattr(engine, name), load, wrong)
        no_sizes = ["2", 2, None, [2.5], ["2"], [3], [-1, 3], object()]
        wrong = no_pools, [*_NO_IDS, [9]], no_devices, no_sizes
        yield from one_wrong(engine.load_each, (*load, [1, 1]), wrong)
        yield from one_wrong(engine.drain, (pool,), (no_pools,))
        yield from one_wrong(engine.abandon, ("?",), ([None, 7, "load 1", ["?"]],))
        yield from one_wrong(engine.forget, ([1],), ([*_NO_IDS, [9]],))
        yield from one_wrong(engine.read_host, ([1],), ([*_NO_IDS, [9]],))
        payload = np.zeros(engine.host_payload_bytes, np.uint8)
        no_payloads = [None, 7, "bytes", [7], [None], [bytes(8)], [payload[1:]]]
        yield from one_wrong(
            engine.write_host, ([5], [payload]), (_NO_IDS, no_payloads)
        )

    check("TransferEngine", owner, cases())
    shape = [np.zeros((8, 2)), None, {}, 7, "pool", {"kv": jnp.zeros(())}]
    no_axis = ["0", None, 1.5, True, 2, -3, [0], {"k": 0}]
    check(
        "TransferEngine()",
        (),
        [
            *one_wrong(TransferEngine, (pool, 8), (shape, [*_NO_COUNTS[:-4], 0, -1])),
            *one_wrong(
                lambda axis: TransferEngine(pool, 8, block_axis=axis), (0,), (no_axis,)
            ),
        ],
    )


def test_a_plan_of_which_a_part_is_wrong_is_not_started_in_part():
    pool = {"kv": jnp.arange(16.0).reshape(8, 2)}
    engine = TransferEngine(pool, 8, mode="staged")
    worker = OffloadWorker(engine)
    engine.save(pool, [1, 2], [0, 1])
    pool, _ = engine.drain(pool)
    right = dict(
        load_event=0,
        load_device_blocks=(3, 4),
        load_host_blocks=(0, 1),
        load_event_to_reqs={0: ("one", "two")},
        store_event=0,
        store_device_blocks=(5, 6),
        store_host_blocks=(2, 3),
        need_flush=False,
        load_sizes=(1, 1),
    )
    no_events = ["0", None, 0.5, True, object()]
    wrong = {
        "load_event": [*no_events, 1],
        "store_event": no_events,
        "load_device_blocks": [*_NO_IDS, (3,), (3, 3), (3, 8)],
        "load_host_blocks": [*_NO_IDS, (0,), (0, 7), (0, 8)],
        "load_event_to_reqs": [None, [], {}, {0: "one"}, {0: ("one",)}, {0: (1, 2)}],
        "store_device_blocks": [*_NO_IDS, (5,), (5, 5), (5, 8)],
        "store_host_blocks": [*_NO_IDS, (2,), (2, 2), (2, 8)],
        "load_sizes": ["11", [2.5], [None], (1,), (1, 2), (3, -1), 7, None],
        "below": [7, None, "below", (None,), ((),)],
    }
    cases = [
        (
            f"{field}={shown(value)}",
            worker.start,
            (OffloadMetadata(**right | {field: value}), pool),
        )
        for field, values in wrong.items()
        for value in values
    ]
    no_load = dict(load_event=-1, load_device_blocks=(), load_host_blocks=())
    no_store = dict(store_event=-1, store_device_blocks=(), store_host_blocks=())
    alone = [
        right | no_load | dict(store_host_blocks=(2, 8)),
        right | no_store | dict(load_host_blocks=(0, 7)),
    ]
    cases += [
        (f"alone, {fields}", worker.start, (OffloadMetadata(**fields), pool))
        for fields in alone
    ]
    plan = OffloadMetadata(**right)
    cases += [
        (f"meta={value!r}", worker.start, (value, pool)) for value in (None, 7, {})
    ]
    cases += [
        (f"pool={value!r}", worker.start, (plan, value)) for value in (None, 7, {})
    ]
    check("OffloadWorker.start", (worker,), cases)
    pool = worker.start(plan, pool)
    _, output = worker.drain(pool)
    assert set(output.finished_recving) == {"one", "two"}


def _constructors(folder):
    """Public constructors, their right arguments, and those that take no other type."""
    scheduler = OffloadScheduler(4, 8)
    pool = {"k": jnp.zeros((8, 4))}
    engine = TransferEngine(pool, 4)
    config = OffloadConfig(num_host_blocks=8)

    def zero():
        return 0

    def closing(make):
        return lambda **named: make(**named).close()

    functions = dict.fromkeys(("num_free", "hold", "release"), zero)
    return {
        OffloadScheduler: (
            dict(groups=4, num_host_blocks=8),
            "groups num_host_blocks cache_policy enable_events rules executor clock "
            "num_storage_blocks is_private policy_clock tiers_below policy_state "
            "num_device_blocks on_request_finished",
        ),
        config.make_scheduler: (
            dict(groups=4),
            "groups num_host_blocks num_storage_blocks policy_clock tiers_below "
            "num_device_blocks block_bytes",
        ),
        partial(config.make_worker, engine): ({}, "storage movers clock"),
        partial(OffloadConfig(storage=str(folder / "store")).open_storage): (
            {},
            "engine",
        ),
        OffloadWorker: (
            dict(engine=engine),
            "engine storage movers clock deadline_s report_after_steps "
            "agreement_timeout_s",
        ),
        TransferEngine: (
            dict(pool=pool, num_host_blocks=4),
            "num_host_blocks compression mode kernel shared blocks_per_host_block "
            "staging_bytes block_axis",
        ),
        BorrowedPool: (
            dict(num_blocks=8) | functions,
            "num_blocks num_free hold release content_of count_of",
        ),
        closing(partial(TraceRecorder, folder / "trace")): (
            {},
            "clock max_bytes max_files",
        ),
        closing(partial(LocalStore, folder / "store")): ({}, "mode"),
        partial(ObjectFormat, b"m"): (
            dict(layout="u8", payload_bytes=8),
            "layout payload_bytes shard num_shards secret",
        ),
        make_lru: (dict(num_blocks=4), "num_blocks max_batch"),
        make_hazard: (dict(num_blocks=4), "num_blocks max_batch"),
        make_retained: (dict(inner=make_lru(4)), "inner"),
        Extras: ({}, "cache_salt multimodal"),
        partial(OffloadMetrics, scheduler, registry=CollectorRegistry()): (
            {},
            "labels",
        ),
        closing(partial(EventPublisher, "tcp://127.0.0.1:*")): (
            {},
            "data_parallel_rank buffer_steps hwm max_queue_size",
        ),
    }


def test_public_constructors_refuse_every_wrong_type_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults = []
    for make, (right, names) in _constructors(tmp_path).items():
        subject = getattr(make, "func", make)
        for name in names.split():
            num_refused = 0
            for value in (*WRONG, 10**400, LONG, "\0", b"", {1: 2}):
                try:
                    make(**(right | {name: value}))
                except (TypeError, ValueError, MemoryError) as error:
                    num_refused += 1
                    message = str(error)
                    if _UNCLEAR.search(message) or not is_short_line(message):
                        faults.append(
                            f"{subject} {name}={shown(value)}: {message[:200]}"
                        )
                except Exception as error:
                    faults.append(f"{subject} {name}={shown(value)}: {error!r:.200}")
            if not num_refused:
                faults.append(f"{subject} takes any {name}")
    assert not faults, "\n".join(faults)

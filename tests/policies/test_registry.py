"""Names of policies: what can be registered, found, and what is refused."""

import itertools

import pytest

from jaxkv import OffloadingManager, get_policy_maker, make_lru
from jaxkv.policies import POLICIES, policy_names, register_policy, registry


@pytest.fixture(autouse=True)
def restored():
    before = dict(registry._makers)
    yield
    registry._makers.clear()
    registry._makers.update(before)


def make_mine(num_blocks, max_batch):
    return make_lru(num_blocks, max_batch)


def test_a_size_that_is_no_whole_number_is_refused():
    for name, number in itertools.product(policy_names(), ("7", None, 7.5, (7,))):
        for sizes in ((number, 8), (8, number)):
            with pytest.raises(ValueError, match=r"must be a whole number from 1 on\."):
                get_policy_maker(name)(*sizes)


def test_a_registered_policy_is_as_good_as_the_builtin_ones():
    register_policy("mine_2", make_mine)
    assert policy_names()[-1] == "mine_2"
    assert get_policy_maker("mine_2") is make_mine
    assert POLICIES["mine_2"] is make_mine  # a live view
    manager = OffloadingManager(16, 2, cache_policy="mine_2")
    assert manager.prepare_store([b"a"]).store_spec.block_ids.tolist() == [0]


def test_the_view_is_read_only():
    with pytest.raises(TypeError, match="does not support item assignment"):
        POLICIES["mine"] = make_mine


def test_refuses_bad_registrations():
    before = dict(POLICIES)
    for name, make, match in (
        ("lru", make_mine, r"name='lru' is taken: .* not be in \['lru', "),
        ("mine\n", make_mine, "must be a lower-case letter"),
        *[
            (name, make_mine, f"name={name!r} must be a lower-case letter")
            for name in ("", "Mine", "2nd", "my-own", 7)
        ],
        ("mine", make_lru(2, 8), r"make=Policy\(.* must be callable"),
        ("mine", None, "make=None must be callable"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            register_policy(name, make)
        assert dict(POLICIES) == before


def test_an_unknown_name_is_refused_with_those_there_are():
    for name, hint in (
        ("x", ""),
        ("LRU", ": did you mean lru?"),
        ("slru", ": did you mean lru?"),
        (None, ""),
    ):
        with pytest.raises(ValueError, match="Unknown cache policy") as error:
            get_policy_maker(name)
        message = f"Unknown cache policy: {name!r}. Supported: {policy_names()}"
        assert str(error.value) == message + hint

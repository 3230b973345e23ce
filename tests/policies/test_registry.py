"""Names of policies: what can be registered, found, and what is refused."""

import pytest

from jaxkv import OffloadingManager, get_policy_maker, make_lru, policies
from jaxkv.policies import POLICIES, policy_names, register_policy, registry


@pytest.fixture(autouse=True)
def restored():
    before = dict(registry._makers)
    yield
    registry._makers.clear()
    registry._makers.update(before)


def make_mine(num_blocks, max_batch):
    return make_lru(num_blocks, max_batch)


def test_builtin_policies_have_names():
    assert policy_names()[:5] == ["lru", "arc", "arc_fixed", "slru", "hazard"]
    assert get_policy_maker("lru") is make_lru
    assert get_policy_maker("arc") is policies.make_arc
    assert get_policy_maker("arc_fixed") is policies.make_arc_fixed
    assert get_policy_maker("slru") is policies.make_slru
    assert get_policy_maker("hazard") is policies.make_hazard


@pytest.mark.parametrize("name", ["lru", "arc", "arc_fixed", "slru", "hazard"])
@pytest.mark.parametrize("number", ["7", None, 7.5, (7,)], ids=str)
def test_a_size_that_is_no_whole_number_is_refused(name, number):
    make = get_policy_maker(name)
    for sizes in ((number, 8), (8, number)):
        with pytest.raises(ValueError, match=r"must be a whole number from 1 on\."):
            make(*sizes)


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


@pytest.mark.parametrize(
    ("name", "make", "error", "match"),
    [
        ("lru", make_mine, ValueError, r"name='lru' is taken; .* none of \['lru', "),
        ("", make_mine, ValueError, "name='' must be a lower-case letter"),
        ("Mine", make_mine, ValueError, "name='Mine' must be a lower-case letter"),
        ("2nd", make_mine, ValueError, "name='2nd' must be a lower-case letter"),
        ("my-own", make_mine, ValueError, "name='my-own' must be a lower-case letter"),
        ("mine\n", make_mine, ValueError, "must be a lower-case letter"),
        (7, make_mine, ValueError, "name=7 must be a lower-case letter"),
        ("mine", make_lru(2, 8), TypeError, r"make=Policy\(.* must be callable"),
        ("mine", None, TypeError, "make=None must be callable"),
    ],
)
def test_refuses_bad_registrations(name, make, error, match):
    before = dict(POLICIES)
    with pytest.raises(error, match=match):
        register_policy(name, make)
    assert dict(POLICIES) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x", "Unknown cache policy: 'x'. Supported: {}"),
        ("LRU", "Unknown cache policy: 'LRU'. Supported: {}. Did you mean 'lru'?"),
        (
            "arc-fixed",
            "Unknown cache policy: 'arc-fixed'. Supported: {}. "
            "Did you mean 'arc_fixed'?",
        ),
        (None, "Unknown cache policy: None. Supported: {}"),
    ],
)
def test_an_unknown_name_is_refused_with_those_there_are(name, message):
    with pytest.raises(ValueError, match="Unknown cache policy") as error:
        get_policy_maker(name)
    assert str(error.value) == message.format(policy_names())

import jax.numpy as jnp
import pytest

from jaxkv import Namespace
from jaxkv.integrations.prefix_template import PrefixTemplate

STORE = {"namespace": Namespace("m", "0", "", "", 4), "num_host_blocks": 4}


@pytest.mark.parametrize("constant", [jnp.nan, 0.0], ids=["kept", "all zero"])
def test_a_leaf_without_tokens_is_compared_by_its_bits(constant):
    prefix = {"key": jnp.zeros((1, 16, 2)), "constant": jnp.full((1,), constant)}
    template = PrefixTemplate(prefix, 16, None, STORE)
    template.store.close()
    for leaf, is_same in ((constant, True), (-0.0, False)):
        _, all_same = template.split(prefix | {"constant": jnp.full((1,), leaf)})
        assert all_same() is is_same, leaf

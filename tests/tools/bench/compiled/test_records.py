import pytest

from jaxkv.tools.bench.compiled.records import Result, block_costs
from tests.tools.bench.compiled.examples import GOOD, program


@pytest.mark.parametrize(
    ("sizes", "chosen"), [((1, 2, 4), 4), ((1, 8, 64), 8), ((16, 64), 16)]
)
def test_a_block_is_costed_by_the_smallest_move_of_eight_or_else_the_largest(
    sizes, chosen
):
    results = [Result(program(num_blocks=size), GOOD, None) for size in sizes]
    (cost,) = block_costs(tuple(results))
    assert cost.num_blocks == chosen

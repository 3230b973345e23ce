"""The measures of results, against sums over single requests."""

import pytest

from jaxkv.tools.replay.measures import Cell, Comparison, format_flops
from jaxkv.tools.replay.model_costs import find_model_costs
from jaxkv.tools.replay.run import OPTIMUM, sweep
from jaxkv.tools.replay.synthetic import make_synthetic_trace


@pytest.fixture(scope="module")
def comparison():
    trace = make_synthetic_trace(60, seed=2, block_size=16)
    results = sweep(trace, ["lru", "slru", OPTIMUM], [30, 90], device_blocks=60)
    return Comparison(trace, results, find_model_costs("qwen3-8b"))


def flops_of_token(position, costs):
    """The matrices, and a query with each key and value up to its own."""
    (layers,) = costs.layers
    attention = layers.num_layers * layers.pair_flops * (position + 1)
    return 2 * costs.num_prefill_parameters + attention


def test_saved_prefill_is_the_sum_over_the_tokens_that_were_found(comparison):
    trace, costs = comparison.trace, comparison.model
    of_token = [
        flops_of_token(position, costs) for position in range(max(trace.input_tokens))
    ]
    total = sum(sum(of_token[:num]) for num in trace.input_tokens)
    assert comparison.prefill_flops == pytest.approx(total, rel=1e-12)
    measures = {measure.key: measure for measure in comparison.measures}
    for result in comparison.results:
        saved = sum(sum(of_token[: 16 * num]) for num in result.hits_by_request)
        on_device = sum(sum(of_token[: 16 * num]) for num in result.device.hits)
        cell = Cell(result.policy, result.capacity_blocks)
        assert measures["flops_both"].ratios[cell] == pytest.approx(saved / total)
        assert measures["flops_both"].device == pytest.approx(on_device / total)
        host = (saved - on_device) / total
        assert measures["flops_host"].ratios[cell] == pytest.approx(host, abs=1e-12)
    assert measures["flops_host"].ratios[Cell(OPTIMUM, 90)] > 0


def test_without_a_model_no_flops_are_measured(comparison):
    trace = comparison.trace
    keys = [m.key for m in Comparison(trace, comparison.results).measures]
    assert keys == ["blocks_both", "blocks_host", "tokens_both", "tokens_host"]
    alone = sweep(trace, ["lru"], [30])
    keys = [m.key for m in Comparison(trace, alone, comparison.model).measures]
    assert keys == ["blocks", "tokens", "flops"]


def test_flops_are_written_with_three_digits_and_a_unit():
    flops = {3.27e18: "3.27 EFLOP", 321.4e15: "321 PFLOP", 24.61e18: "24.6 EFLOP"}
    flops |= {1e12: "1 TFLOP", 5.0: "5 FLOP", 0.0: "0 FLOP"}
    assert {number: format_flops(number) for number in flops} == flops

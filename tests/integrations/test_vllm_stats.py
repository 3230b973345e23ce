from jaxkv.integrations.vllm.stats import OffloadConnectorStats


def test_two_reports_add_up_to_the_sums_the_last_gauges_and_all_samples():
    earlier, later = (
        OffloadConnectorStats(
            {
                "counters": {"loads": {"a": number, f"only {number}": 1}},
                "gauges": {"held": {"": number}},
                "samples": {"delay": [float(number)]},
            }
        )
        for number in (3, 5)
    )
    assert earlier.aggregate(later).to_dict() == {
        "counters": {"loads": {"a": 8, "only 3": 1, "only 5": 1}},
        "gauges": {"held": {"": 5}},
        "samples": {"delay": [3.0, 5.0]},
    }

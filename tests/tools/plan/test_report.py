from types import SimpleNamespace

from jaxkv.tools.plan import report


def test_the_headline_of_the_picture_is_the_recommendation():
    def headline(row):
        recommendation = SimpleNamespace(row=row, reason="nothing comes back")
        demand = SimpleNamespace(num_requests=4)
        plan = SimpleNamespace(recommendation=recommendation, demand=demand)
        return report._headline(None, plan)

    row = SimpleNamespace(host_bytes=64 << 30, policy="lru", saved_s=8.0)
    assert headline(None) == "Offloading does not pay: nothing comes back"
    assert headline(row).startswith("64 GiB with lru (ringed) saves 2")

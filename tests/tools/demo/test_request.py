from jaxkv.tools.demo.request import EngineRequest


def test_the_time_to_the_first_token_is_counted_from_the_arrival():
    request = EngineRequest(0, (1, 2), 1, arrival_s=2.5, chains=(), tokens=[1, 2])
    request.first_token_s = 4.0
    assert request.ttft_s == 1.5

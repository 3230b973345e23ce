"""The batcher by itself, with a scheduler and without a model."""

import pytest

from jaxkv.keys import Extras, KeyChain, Namespace
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tools.demo.engine import Batcher, EngineRequest
from jaxkv.tools.demo.records import EngineConfig

NAMESPACE = Namespace("m", "0", "float32", "flat", block_size=4)


def make_request(number):
    chain = KeyChain(NAMESPACE, Extras(cache_salt=str(number)))
    chain.extend(range(32))
    return EngineRequest(
        number, tuple(range(32)), 40, 0.0, (chain,), list(range(32)), [[]]
    )


class Engine:
    def __init__(self, **rules):
        self.blocks = DeviceBlockPool(33)
        groups = (FullAttention(4),)
        config = EngineConfig(4, 33, 4, 72, "0", chunk_sizes=(32,))
        self.offload = OffloadScheduler(groups, 64, rules=OffloadRules(**rules))
        self.offload.bind_device_block_pool(self.blocks)
        self.batcher = Batcher(config, groups, self.blocks, self.offload)
        self.events = []

    def step(self):
        batch = self.batcher.schedule()
        meta = self.offload.build_connector_meta(batch.output)
        self.events += [meta.store_event] * (meta.store_event != NO_EVENT)
        scheduled = batch.output.num_scheduled_tokens
        for request in batch.prefill + batch.decode:
            request.num_computed_tokens += scheduled[request.request_id]
            if request.num_computed_tokens == request.num_tokens:
                request.append(7)
        self.batcher.cache_computed(batch.prefill + batch.decode)
        return batch

    def stores_arrive(self):
        report = ConnectorOutput(completed_store_events=tuple(self.events))
        self.offload.update_connector_output(report)
        self.events.clear()


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_request_that_lacks_a_block_preempts_one_other(mode):
    engine = Engine(mode=mode)
    requests = [make_request(number) for number in range(4)]
    for request in requests:
        engine.batcher.add(request)
    # The last has computed nothing yet, and its blocks are free at once. The blocks of
    # the third are being stored, and no store arrives meanwhile.
    for _ in range(20):
        engine.step()
    assert [request.num_preemptions for request in requests] == [0, 0, 1, 1]
    engine.stores_arrive()
    assert engine.step().decode == requests[:2]
    assert engine.batcher.num_preemptions == 2


def test_the_time_to_the_first_token_is_counted_from_the_arrival():
    request = EngineRequest(0, (1, 2), 1, arrival_s=2.5, chains=(), tokens=[1, 2])
    request.first_token_s = 4.0
    assert request.ttft_s == 1.5

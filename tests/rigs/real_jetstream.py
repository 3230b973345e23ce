"""JetStream's driver, where it is installed, with the engine of its tests.

    python -m tests.rigs.real_jetstream

in a process with one device, as that engine needs; prints the results as JSON.
"""

import asyncio
import json

from jaxkv.integrations.jetstream import PrefixCache
from tests.rigs.jetstream_double import Flushing

CHUNK, LENGTH, MAX_TOKENS = 4, 64, 2


def answers(prompts, cache):
    """Answer prompts, each with a new driver; count the calls of `prefill`."""
    # Here, since pytest imports every file to look for doctests.
    from jetstream.core import orchestrator
    from jetstream.core.proto import jetstream_pb2
    from jetstream.engine import mock_engine

    num_calls = []

    def make_engine(**arguments):
        return mock_engine.TestEngine(
            batch_size=4, cache_length=LENGTH, use_chunked_prefill=True, **arguments
        )

    class Counting:
        def __init__(self, engine):
            self._engine = engine

        def __getattr__(self, name):
            return getattr(self._engine, name)

        def prefill(self, **arguments):
            num_calls.append(1)
            return self._engine.prefill(**arguments)

    async def answer(prompt):
        engine = make_engine(weight=2.0, prefill_chunk_size=CHUNK)
        generating = make_engine(weight=4.0)
        driver = orchestrator.Driver(
            prefill_engines=[Counting(engine)],
            generate_engines=[generating],
            prefill_params=[engine.load_params_dict()],
            generate_params=[generating.load_params()],
            interleaved_mode=True,
            prefix_cache_inst=cache,
        )
        request = jetstream_pb2.DecodeRequest(
            token_content=jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompt),
            max_tokens=MAX_TOKENS,
        )
        client = orchestrator.LLMOrchestrator(driver=driver)
        found = [
            list(sample.token_ids)
            async for response in client.Decode(request)
            for sample in response.stream_content.samples
        ]
        driver.stop()
        return found

    return [asyncio.run(answer(prompt)) for prompt in prompts], len(num_calls)


def main():
    """Answer prompts without a cache, and with jaxkv's."""
    prompts = [tuple(range(1, 40)), (*range(1, 30), 5, 6, 7), tuple(range(1, 40))]
    expected, chunks_without = answers(prompts, None)
    with PrefixCache(block_size=4, num_host_blocks=64, extras_of=None) as cache:
        found, chunks = answers(prompts, Flushing(cache))
        results = {
            "expected": expected,
            "found": found,
            "chunks_without": chunks_without,
            "chunks": chunks,
            "hit_tokens": cache.stats.hit_tokens,
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()

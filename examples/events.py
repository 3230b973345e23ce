"""Publish the events of the host tier, and read them as a router would.

Needs the extra "events". The subscriber starts too late on purpose, and requests a
replay of everything.
"""

from event_subscriber import EventSubscriber

from jaxkv import Extras, KeyChain, Namespace, OffloadingManager
from jaxkv.observe.kv_events import BlockRemoved, BlockStored
from jaxkv.observe.publisher import EventPublisher

namespace = Namespace("my-model", "v1", "float32", "NHD", block_size=16)
manager = OffloadingManager(block_size=16, num_blocks=4, enable_events=True)

with EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
    prompts = (range(48), None), (range(64), None), (range(100, 133), "my-adapter")
    for tokens, lora in prompts:
        # The chain records the tokens of each key in the publisher's catalogue.
        chain = KeyChain(
            namespace, Extras(lora_name=lora), record=publisher.catalog.record
        )
        keys = chain.extend(tokens)
        manager.prepare_store(keys)
        manager.complete_store(keys)
        publisher.publish(manager.take_events())

    with EventSubscriber(
        publisher.endpoint, publisher.replay_endpoint, start_seq=0
    ) as subscriber:
        subscriber.catch_up()
        while received := subscriber.receive(timeout_s=0):
            for event in received.batch.events:
                match event:
                    case BlockStored():
                        after = "a block" if event.parent_block_hash else "nothing"
                        said = f"tokens {event.token_ids[0]}..{event.token_ids[-1]}"
                        said += f", after {after}, adapter {event.lora_name}"
                    case BlockRemoved():
                        said = "gone"
                num = len(event.block_hashes)
                print(f"batch {received.seq}: {event.medium}, {num} blocks, {said}")

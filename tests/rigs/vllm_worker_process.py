"""The worker's half of the connector in a process of its own, under a runner."""

from tests.rigs.children import FORKS
from tests.rigs.fake_vllm import KVConnectorRole, create_connector, make_configs


def serve(pipe, options):
    """Run steps as they come, until None; answer with what the runner reports."""
    import pytest

    from tests.rigs import fake_engine, fake_vllm

    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_vllm.install(monkeypatch, "0.32")
        config, cache_config = make_configs(**options)
        worker = create_connector(config, KVConnectorRole.WORKER, cache_config)
        windows = options.get("windows", (None,))
        num_blocks = options.get("num_blocks", 24)
        runner = fake_engine.Runner(worker, num_blocks, windows, newer=True)
        pipe.send("ready")
        while (message := pipe.recv()) is not None:
            if message == "drop":
                runner.kv_cache_manager.delete_kv_cache()
                runner.kv_cache_manager.reinitialize_kv_cache()
                runner.weights += 1
                pipe.send("dropped")
            else:
                pipe.send(runner.execute(message))


class RemoteRunner:
    """Has the rig's runner in another process, which gets only what is sent here."""

    def __init__(self, **options):
        self._pipe, other = FORKS.Pipe()
        self._process = FORKS.Process(target=serve, args=(other, options))
        self._process.start()
        other.close()
        assert self._pipe.recv() == "ready"

    def execute(self, output):
        self._pipe.send(output)
        return self._pipe.recv()

    def drop_pool(self):
        """Drop the KV caches, and have other weights."""
        self._pipe.send("drop")
        assert self._pipe.recv() == "dropped"

    def close(self):
        self._pipe.send(None)
        self._process.join(60)
        assert self._process.exitcode == 0

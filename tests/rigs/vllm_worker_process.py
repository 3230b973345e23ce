"""The worker's half of the connector in a process of its own, under a runner."""

from tests.rigs.children import FORKS
from tests.rigs.fake_vllm import KVConnectorRole, create_connector, make_configs


def serve(pipe, options):
    """Run steps until None arrives; answer with the runner's reports."""
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
    """Runs the rig's runner in another process, which receives only these messages."""

    def __init__(self, **options):
        self._pipe, child_end = FORKS.Pipe()
        self._process = FORKS.Process(target=serve, args=(child_end, options))
        self._process.start()
        child_end.close()
        assert self._pipe.recv() == "ready"

    def execute(self, output):
        self._pipe.send(output)
        return self._pipe.recv()

    def drop_pool(self):
        """Drop the KV caches, and change the weights."""
        self._pipe.send("drop")
        assert self._pipe.recv() == "dropped"

    def close(self):
        self._pipe.send(None)
        self._process.join(60)
        assert self._process.exitcode == 0

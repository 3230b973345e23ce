"""A real MaxEngine resumes from the host as if it had computed everything.

Tiny, with random weights, on the CPU. MaxText needs a separate environment:
.ci/maxtext makes it, and runs this there.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Extras, Namespace
from jaxkv.integrations.maxtext import MaxTextOffload
from jaxkv.keys.hashing import NO_EXTRAS

ROOT = Path(__file__).resolve().parents[2]
CHUNK, LONGEST, RING, SLOTS = 8, 64, 16, 4
TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("maxtext") is None,
        reason="no MaxText here; .ci/maxtext runs these tests",
    ),
    pytest.mark.filterwarnings("ignore"),  # MaxText's own.
]


@pytest.fixture(autouse=True)
def as_maxtext_wants():
    """MaxText promotes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def maxtext():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECOUPLE_GCLOUD", "TRUE")
        from maxtext.configs import pyconfig
        from maxtext.inference.maxengine import maxengine
        from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

        yield SimpleNamespace(
            initialize=pyconfig.initialize,
            maxengine=maxengine,
            base=os.path.join(MAXTEXT_CONFIGS_DIR, "base.yml"),
        )


def make_engine(maxtext, tmp_path, **settings):
    defaults = {
        "run_name": "tiny",
        "base_output_directory": str(tmp_path),
        "enable_checkpointing": False,
        "log_config": False,
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "base_num_decoder_layers": 2,
        "base_emb_dim": 32,
        "base_mlp_dim": 64,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "dtype": "float32",
        "weight_dtype": "float32",
        "attention": "dot_product",
        "max_prefill_predict_length": LONGEST,
        "max_target_length": LONGEST + RING,
        "per_device_batch_size": SLOTS / jax.device_count(),
        "use_chunked_prefill": True,
        "prefill_chunk_size": CHUNK,
        "decode_sampling_strategy": "greedy",
    }
    arguments = {**defaults, **settings}
    return maxtext.maxengine.MaxEngine(
        maxtext.initialize(["test", maxtext.base], **arguments)
    )


@pytest.fixture(scope="module", params=["scanned", "unscanned"])
def setup(request, maxtext, tmp_path_factory):
    """An engine, its random weights, and its offload."""
    layers, folder = request.param, tmp_path_factory.mktemp("maxtext")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        engine = make_engine(maxtext, folder, scan_layers=layers == "scanned")
        params = engine.load_params(params=random_params(engine))
        namespace = Namespace("tiny", "0", "float32", layers, CHUNK)
        offload = MaxTextOffload(engine, namespace=namespace, num_host_blocks=256)
    with offload:
        yield SimpleNamespace(engine=engine, params=params, offload=offload)


def random_params(engine):
    """The result of `load_params` without a checkpoint, in a third of the time."""
    from flax import nnx
    from maxtext.utils.model_creation_utils import get_nnx_create_model_fn

    make = get_nnx_create_model_fn(
        engine.config, mesh=engine._mesh, model_mode="prefill"
    )
    with engine._mesh:
        return nnx.state(make(), nnx.Param)


def random_tokens(seed, count):
    return np.random.default_rng(seed).integers(1, 256, count).tolist()


def full_prefill(setup, tokens):
    """MaxEngine's prefill of a whole prompt in one piece."""
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(tokens)] = tokens
    return setup.engine.prefill(
        params=setup.params, padded_tokens=jnp.asarray(padded), true_length=len(tokens)
    )


def answer(setup, prefix, result, steps):
    """Generate greedily, alone in a new decode state."""
    state = setup.engine.init_decode_state()
    state = setup.engine.insert(prefix, state, 0)
    tokens = [int(result.data[0, 0])]
    for _ in range(steps):
        state, result = setup.engine.generate(setup.params, state)
        tokens.append(int(result.data[0, 0]))
    return tokens


class Server:
    """Requests in the slots of one decode state, as an engine loop has them."""

    def __init__(self, setup):
        self.setup = setup
        self.state = setup.engine.init_decode_state()
        self.running = {}

    def begin(self, slot, prompt):
        done = self.setup.offload.prefill(self.setup.params, prompt)
        self.state = self.setup.engine.insert(done.prefix, self.state, slot)
        self.running[slot] = [*prompt, int(done.result.data[0, 0])]

    def steps(self, count):
        for _ in range(count):
            self.state, result = self.setup.engine.generate(
                self.setup.params, self.state
            )
            for slot, tokens in self.running.items():
                tokens.append(int(result.data[slot, 0]))

    def end(self, slot):
        tokens = self.running.pop(slot)
        saved = self.setup.offload.save_slot(tokens, self.state, slot)
        assert saved == (len(tokens) - 1) // CHUNK * CHUNK
        return tokens


def test_two_turns_are_answered_as_without_the_host(setup):
    params, offload = setup.params, setup.offload
    prompts = {
        0: random_tokens(1, 21),
        3: random_tokens(2, 13),
        1: random_tokens(3, 16),
    }
    server = Server(setup)
    server.begin(0, prompts[0])
    server.steps(6)
    server.begin(3, prompts[3])
    server.steps(6)
    ended = {0: server.end(0)}
    server.steps(1)
    server.begin(1, prompts[1])
    server.steps(9)  # The ring has wrapped around: it is at row 22 of 16.
    ended |= {1: server.end(1), 3: server.end(3)}
    assert [len(ended[n]) - len(prompts[n]) for n in (0, 3, 1)] == [13, 17, 10]
    offload.store.flush()
    assert not offload.store.stats.num_dropped_failed
    del server  # Also frees the decode state and its KV.

    for slot, tokens in ended.items():
        prompt = prompts[slot]
        alone = answer(
            setup, *full_prefill(setup, prompt), len(tokens) - len(prompt) - 1
        )
        assert tokens == [*prompt, *alone]

        again = [*tokens, *random_tokens(10 + slot, 9)]
        resumed = offload.prefill(params, again)
        # All but the last token have KV; its full blocks are on the host.
        assert resumed.num_tokens == (len(tokens) - 1) // CHUNK * CHUNK
        assert resumed.num_tokens > len(prompt)
        prefix, result = full_prefill(setup, again)
        error = jnp.abs(resumed.prefix["logits"] - prefix["logits"]).max()
        assert float(error) <= TOLERANCE
        assert int(resumed.prefix["next_pos"][0, 0]) == len(again)
        assert answer(setup, *resumed[:2], 8) == answer(setup, prefix, result, 8)

    # The KV of the second turn is kept too; adapters do not share it.
    offload.store.flush()
    assert offload.resume(again).num_tokens == (len(again) - 1) // CHUNK * CHUNK
    assert offload.resume(again, Extras(lora_name="other")) == (None, 0)
    assert offload.resume(again[:CHUNK], NO_EXTRAS) == (None, 0)  # One is computed.


def test_without_the_guard_maxtext_fails_its_own_assertion(setup, monkeypatch):
    from maxtext.inference.kvcache import KVCache

    def prefill(length):  # Not compiled before, so that MaxText's Python runs.
        tokens = jnp.asarray(random_tokens(8, length), jnp.int32)
        return setup.engine.prefill(
            params=setup.params, padded_tokens=tokens, true_length=length
        )

    guarded = KVCache.kv_cache_chunked_prefill
    assert guarded.is_jaxkv_guard
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "kv_cache_chunked_prefill", guarded.__wrapped__)
        with pytest.raises(AssertionError, match="key_seq_len=1, segment_id_seq_len=3"):
            prefill(3)
    prefill(3)


def test_the_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "maxtext_offload.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    *_, cached, same = done.stdout.splitlines()
    assert cached == "turn 2: 32 of 46 tokens came from the host"
    assert same == "the answer is that of a full prefill: True"

"""A conversation with MaxText's MaxEngine that resumes from KV on the host.

Needs MaxText on Python 3.12; tiny, with random weights, so that it runs on any machine.
"""

import os

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # No Google Cloud, no JetStream.

import jax.numpy as jnp
from maxtext.configs import pyconfig
from maxtext.inference.maxengine.maxengine import MaxEngine
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

from jaxkv import Namespace
from jaxkv.integrations.maxtext import MaxTextOffload

TINY = """run_name=tiny hardware=cpu enable_checkpointing=false log_config=false
skip_jax_distributed_system=true dtype=float32 attention=dot_product vocab_size=256
base_num_decoder_layers=2 base_emb_dim=32 base_mlp_dim=64 base_num_query_heads=4
base_num_kv_heads=2 head_dim=16 max_prefill_predict_length=64 max_target_length=96
use_chunked_prefill=true prefill_chunk_size=8 decode_sampling_strategy=greedy"""

config = ["", f"{MAXTEXT_CONFIGS_DIR}/base.yml", *TINY.split()]
engine = MaxEngine(pyconfig.initialize(config))
params = engine.load_params()
namespace = Namespace("tiny", "0", "float32", "maxtext, scanned", block_size=8)
offload = MaxTextOffload(engine, namespace=namespace, host_bytes="1MiB")


def answer(prefix, first, num_steps):
    """Generate in slot 0; return the tokens, and the decode state with their KV."""
    state = engine.insert(prefix, engine.init_decode_state(), slot=0)  # Donates it.
    tokens = [int(first.data[0, 0])]
    for _ in range(num_steps):
        state, result = engine.generate(params, state)
        tokens.append(int(result.data[0, 0]))
    return tokens, state


# Turn 1. At its end, the KV of the prompt and the generated tokens is saved.
prompt = list(range(100, 121))
prefix, first, _ = offload.prefill(params, prompt)
tokens, state = answer(prefix, first, num_steps=15)
offload.save_slot([*prompt, *tokens], state, slot=0)
offload.store.flush()  # This user answers before the bytes have arrived.
del state  # The engine forgets.

# Turn 2 resumes from there: only the end is computed.
prompt += [*tokens, *range(9)]
prefix, first, from_host = offload.prefill(params, prompt)
print(f"turn 2: {from_host} of {len(prompt)} tokens came from the host")

padded = jnp.array(prompt + [0] * (64 - len(prompt)))
whole = engine.prefill(params=params, padded_tokens=padded, true_length=len(prompt))
same = answer(prefix, first, 8)[0] == answer(*whole, 8)[0]
print(f"the answer is that of a full prefill: {same}")
offload.close()

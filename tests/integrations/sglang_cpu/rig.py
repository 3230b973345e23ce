"""sglang-jax's scheduler in this process, driven by a script, with a random Llama.

sglang-jax runs its reference attention on CPUs. Two faults of its 0.1.0rc0 there are
mended here:

* All steps write their slots into one host array (`cache_loc_host_buf`), which a CPU's
  device arrays share. With overlap, a step may read the slots of the next one: wrong
  tokens, with or without jaxkv. Each step gets an array of its own.
* HiCache writes its loads with a Pallas kernel that CPUs do not have. It is replaced by
  a scatter.
"""

import contextlib
import functools
import json
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from sgl_jax.srt.managers import io_struct
from sgl_jax.srt.managers.communication import CommunicationBackend
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.mem_cache import memory_pool
from sgl_jax.srt.sampling.sampling_params import SamplingParams
from sgl_jax.srt.server_args import ServerArgs

PAGE, CHUNK, RUNNING = 16, 64, 4
HIDDEN, LAYERS, HEADS, HEAD, VOCABULARY, FEED = 256, 4, 2, 128, 1024, 512


def make_model(folder, seed=0):
    """Write a Llama with one KV head, whose tokens depend on all before them."""
    folder.mkdir()
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=FEED,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        hidden_act="silu",
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        torch_dtype="float32",
        attention_bias=False,
        mlp_bias=False,
    )
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)

    def weights(rows, columns, scale=1.0):
        values = rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)
        return values.astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {
        "model.embed_tokens.weight": weights(VOCABULARY, HIDDEN, np.sqrt(HIDDEN)),
        "lm_head.weight": weights(VOCABULARY, HIDDEN, 3.0),
        "model.norm.weight": ones,
    }
    for layer in range(LAYERS):
        tensors |= {
            f"model.layers.{layer}.{name}": value
            for name, value in {
                "self_attn.q_proj.weight": weights(HEADS * HEAD, HIDDEN, 2.5),
                "self_attn.k_proj.weight": weights(HEAD, HIDDEN, 2.5),
                "self_attn.v_proj.weight": weights(HEAD, HIDDEN, 2.0),
                "self_attn.o_proj.weight": weights(HIDDEN, HEADS * HEAD, 2.0),
                "mlp.gate_proj.weight": weights(FEED, HIDDEN),
                "mlp.up_proj.weight": weights(FEED, HIDDEN),
                "mlp.down_proj.weight": weights(HIDDEN, FEED),
                "input_layernorm.weight": ones,
                "post_attention_layernorm.weight": ones,
            }.items()
        }
    save_file(tensors, folder / "model.safetensors")


class Answer(NamedTuple):
    """What a request got: its tokens, and prompt tokens that were not computed."""

    tokens: list[int]
    num_cached: int
    first_s: float
    finished: bool


class _ScriptEnded(Exception):
    pass


class Engine(CommunicationBackend):
    """A scheduler and its clients.

    A script is a generator: each loop of the scheduler resumes it, and handles the
    messages that it yields.
    """

    def __init__(self, model, *, pool_tokens, overlap=False, config=None, **server):
        """Make the scheduler; `config` is that of jaxkv, None for none."""
        arguments = dict(
            model_path=str(model),
            skip_tokenizer_init=True,
            device="cpu",
            device_indexes=[0],
            dtype="float32",
            page_size=PAGE,
            max_total_tokens=pool_tokens,
            max_running_requests=RUNNING,
            chunked_prefill_size=CHUNK,
            max_prefill_tokens=4096,
            context_length=2048,
            max_seq_len=2048,
            disable_overlap_schedule=not overlap,
            precompile_token_paddings=[CHUNK],
            precompile_bs_paddings=[RUNNING],
            mem_fraction_static=0.3,
            random_seed=1,
            log_level="error",
            grammar_backend="none",
            watchdog_timeout=100000,
            # So that the thread of the overlap loop does not keep the process alive.
            enable_single_process=True,
        )
        self.open, self.answers, self.sent, self._script = {}, {}, [], iter(())
        arguments |= server
        self.scheduler = Scheduler(ServerArgs(**arguments), communication_backend=self)
        self.offload = None
        if config is not None:
            from jaxkv.integrations import sglang

            options = dict(config)
            named = {
                k: options.pop(k) for k in ("weights", "keep_on_flush") if k in options
            }
            from jaxkv import OffloadConfig

            self.offload = sglang.attach(
                self.scheduler, OffloadConfig.from_env(options), **named
            )

    def run(self, script):
        """Run the scheduler's loop until a script ends; return the answers."""
        self._script, self.answers = script, {}
        scheduler = self.scheduler
        loop = (
            scheduler.event_loop_overlap
            if scheduler.enable_overlap
            else scheduler.event_loop_normal
        )
        with contextlib.suppress(_ScriptEnded):
            loop()
        return self.answers

    def request(self, name, tokens, num_new, **options):
        """Return a message that asks for greedy tokens."""
        sampling = SamplingParams(
            temperature=0.0, max_new_tokens=num_new, ignore_eos=True
        )
        sampling.normalize(None)
        self.open[name] = [time.perf_counter(), None, []]
        return io_struct.TokenizedGenerateReqInput(
            rid=name,
            text="",
            input_ids=list(tokens),
            sampling_params=sampling,
            stream=True,
            **dict(
                return_logprob=False,
                return_output_logprob_only=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=[],
            )
            | options,
        )

    def wave(self, requests):
        """Send requests together, and wait until all have ended."""
        yield [self.request(*each) for each in requests]
        while self.open:
            yield []

    def waves(self, waves, steps_between=20):
        """Send waves one after another, each some steps after the last has ended."""
        for requests in waves:
            yield from self.wave(requests)
            for _ in range(steps_between):
                yield []

    # What the scheduler calls.

    def recv_requests(self):
        """Return the next messages of the script."""
        try:
            return next(self._script)
        except StopIteration:
            raise _ScriptEnded from None

    def wait_for_new_requests(self, timeout_s):
        """Wait a little."""
        time.sleep(timeout_s)

    def send_pyobj(self, message):
        """Keep what the scheduler sends."""
        if isinstance(message, io_struct.AbortReq):
            self._end(message.rid, 0, False)
            return
        if not isinstance(message, io_struct.BatchTokenIDOut):
            self.sent.append(message)
            return
        for row, name in enumerate(message.rids):
            if name not in self.open:
                continue
            ids = message.output_ids or message.decode_ids
            state = self.open[name]
            if state[1] is None and len(ids[row]):
                state[1] = time.perf_counter() - state[0]
            state[2] += map(int, ids[row])
            reason = message.finished_reasons[row]
            if reason is not None:
                self._end(name, message.cached_tokens[row], reason["type"] != "abort")

    def _end(self, name, num_cached, finished):
        if name in self.open:
            _, first_s, tokens = self.open.pop(name)
            answer = Answer(tokens, int(num_cached), first_s, finished)
            self.answers[name] = answer


def flush(name="flush"):
    """Return a message that flushes the caches."""
    return io_struct.FlushCacheReqInput(rid=name)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6), donate_argnums=2)
def _write_kv_layer(layer_kv, loc, kv_cache, page_size, *_):
    num_slots = kv_cache.shape[0] * page_size
    loc = jnp.where(loc < 0, num_slots, loc)
    values = layer_kv.reshape(loc.shape[0], *kv_cache.shape[2:])
    return kv_cache.at[loc // page_size, loc % page_size].set(
        values, mode="drop", out_sharding=jax.typeof(kv_cache).sharding
    )


def _new_buffer(pool):
    buffer = vars(pool).get("cache_loc_host_buf")
    return None if buffer is None else np.zeros_like(buffer)


memory_pool.write_kv_layer = _write_kv_layer
memory_pool.ReqToTokenPool.cache_loc_host_buf = property(
    _new_buffer, lambda pool, buffer: vars(pool).update(cache_loc_host_buf=buffer)
)

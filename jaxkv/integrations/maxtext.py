"""KV of MaxText's MaxEngine on the host: kept, and resumed from.

MaxEngine has no pages: a prefill gives the cache of one prompt, `insert` copies it into
a slot of the decode state, and a prefill goes on from a cache that it is given as
`existing_prefix`. So KV is taken out after a prefill and at the end of a request, and
put back before the next prefill.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import Extras, Namespace, Policy
from jaxkv.closing import Closing
from jaxkv.hashing import NO_EXTRAS, TokenIds
from jaxkv.integrations import maxtext_cache, maxtext_guards
from jaxkv.integrations.prefix_store import PrefixStore
from jaxkv.transfer import memory
from jaxkv.types import PyTree


class Resumption(NamedTuple):
    """Where a prefill may go on.

    Attributes:
        existing_prefix: What `MaxEngine.prefill` takes under this name; None if nothing
            was found.
        num_tokens: The tokens that it covers, from the first on.
    """

    existing_prefix: Any
    num_tokens: int


class Prefill(NamedTuple):
    """What the prefill of a whole prompt gave.

    Attributes:
        prefix: As of the last `MaxEngine.prefill`; for `insert`, which donates it.
        result: Its first token, as of that call too.
        num_tokens: The tokens of the prompt that were not computed, but brought back.
    """

    prefix: Any
    result: Any
    num_tokens: int


class MaxTextOffload(Closing):
    """Keeps the KV of a MaxEngine's requests on the host, and resumes from it.

    Around the calls that an engine loop makes anyway:

    * `prefill` instead of the engine's own; or, around one's own chunks, `resume`
      before the first of them and `save_prefix` after the last, before `insert`.
    * `save_slot` when a request ends, before its slot is given to another.

    Neither of the saves waits for the device. Any thread may call.

    Attributes:
        store: The blocks, their counters, `flush` and `clear`.
    """

    def __init__(
        self,
        engine: Any,
        *,
        namespace: Namespace,
        num_host_blocks: int | None = None,
        host_bytes: str | SupportsIndex | None = None,
        cache_policy: str | Policy = "lru",
        cache_like: PyTree | None = None,
    ):
        """Set up the host memory, and the guards that this version of MaxText needs.

        The guards (`jaxkv.integrations.maxtext_guards`) change classes of MaxText's.

        Args:
            engine: A MaxEngine whose parameters are loaded.
            namespace: What the KV depends on besides the tokens; says how many tokens a
                block has. The engine's chunk is a good size, or a divisor of it.
            num_host_blocks: Blocks that the host holds.
            host_bytes: How much host memory to set aside instead, such as ``"8GiB"``.
            cache_policy: What to give up when it is full, as for `OffloadingManager`.
            cache_like: The cache of some prefill, `prefix["cache"]`, or the shapes of
                one; asked of the engine unless given.

        Raises:
            ImportError: There is no MaxText.
            ValueError: The engine cannot resume, or its cache cannot be cut by tokens;
                the message says why. Or an argument is wrong.
            MemoryError: There is not that much host memory.
        """
        check_config(engine.config)
        if cache_like is None:
            cache_like = _cache_like(engine)
        self._engine = engine
        self._cache_like = jax.tree.map(_shape_of, cache_like)
        kv_like = maxtext_cache.prompt_kv(self._cache_like)
        self._prefix_class = maxtext_guards.find_prefix_class()
        maxtext_guards.guard_chunked_prefill()
        maxtext_guards.guard_stub_results()
        self.store = PrefixStore(
            kv_like,
            namespace=namespace,
            num_host_blocks=num_host_blocks,
            host_bytes=host_bytes,
            cache_policy=cache_policy,
            sequence_axis=maxtext_cache.SEQUENCE_AXIS,
        )

    @property
    def chunk_size(self) -> int:
        """Tokens that one prefill computes; what is resumed is a multiple of it.

        MaxEngine compiles its prefill for each length of an existing prefix, so that
        there should be few of them.
        """
        return int(self._engine.config.prefill_chunk_size)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt, and so of what is kept of any request."""
        return self.store.max_tokens

    def resume(self, tokens: TokenIds, extras: Extras = NO_EXTRAS) -> Resumption:
        """Find where the prefill of a prompt may go on. Waits for the bytes.

        Args:
            tokens: int[n]. The prompt. At least its last token is left to compute.
            extras: The adapter and salt that its KV depends on.
        """
        most = (len(tokens) - 1) // self.chunk_size * self.chunk_size
        hit = None
        if most > 0:
            hit = self.store.load(tokens[:most], extras, min_tokens=self.chunk_size)
        if hit is None:
            return Resumption(None, 0)
        # The blocks may end within a chunk.
        num_tokens = hit.num_tokens // self.chunk_size * self.chunk_size
        cache = maxtext_cache.resume_cache(self._cache_like, hit.kv, num_tokens)
        return Resumption(self._existing(cache, tokens[:num_tokens]), num_tokens)

    def prefill(
        self,
        params: Any,
        tokens: TokenIds,
        extras: Extras = NO_EXTRAS,
        **arguments: Any,
    ) -> Prefill:
        """Prefill a prompt in chunks, from what is kept of it on; keep the rest.

        Args:
            params: As for `MaxEngine.prefill`.
            tokens: int[n]. The prompt.
            extras: The adapter and salt that its KV depends on.
            arguments: More for `MaxEngine.prefill`, in each chunk.

        Raises:
            ValueError: The prompt is empty, or too long for the engine.
        """
        chunk, num_tokens = self.chunk_size, len(tokens)
        end = -(-num_tokens // chunk) * chunk
        if not 0 < end <= self.max_tokens:
            raise ValueError(
                f"the prompt has {num_tokens} tokens; it must have between 1 and "
                f"{self.max_tokens // chunk * chunk}, the chunks of {chunk} that "
                "max_prefill_predict_length has room for."
            )
        padded = np.zeros(end, np.int32)
        padded[:num_tokens] = tokens
        existing, start = self.resume(tokens, extras)
        prefix = result = None
        for begin in range(start, end, chunk):
            if begin > start:
                assert prefix is not None
                existing = self._existing(prefix["cache"], padded[:begin])
            prefix, result = self._engine.prefill(
                params=params,
                existing_prefix=existing,
                padded_tokens=jnp.asarray(padded[begin : begin + chunk]),
                true_length=min(num_tokens - begin, chunk),
                **arguments,
            )
        self.save_prefix(tokens, prefix, extras)
        return Prefill(prefix, result, start)

    def save_prefix(
        self, tokens: TokenIds, prefix: Any, extras: Extras = NO_EXTRAS
    ) -> int:
        """Keep the KV of a prompt after its prefill; before `insert`, which donates it.

        Args:
            tokens: int[n]. The whole prompt, what it was resumed from included.
            prefix: What the last prefill of it gave.
            extras: The adapter and salt that its KV depends on.

        Returns:
            The tokens, from the first on, that are held or on their way.

        Raises:
            ValueError: The prefix is not of this engine, or of fewer tokens.
            RuntimeError: It has been donated, or the store was closed.
        """
        return self.store.save(
            tokens, maxtext_cache.prompt_kv(prefix["cache"]), extras=extras
        )

    def save_slot(
        self,
        tokens: TokenIds,
        decode_state: Mapping[str, Any],
        slot: int,
        extras: Extras = NO_EXTRAS,
    ) -> int:
        """Keep the KV of a request at its end: of its prompt, and of what it generated.

        Call it before anything is inserted into the slot again; steps of others may
        have come between. If the slot turns out not to have that many tokens, or the
        ring has overwritten some, nothing is kept (`store.stats.failed_saves`).

        Args:
            tokens: int[n]. All tokens of the request: its prompt, and what it
                generated. The last has no KV yet. What exceeds `max_tokens` is not
                kept, since no prefill could resume from it.
            decode_state: As the last `generate` gave it.
            slot: The request's slot.
            extras: The adapter and salt that its KV depends on.

        Returns:
            The tokens, from the first on, that are held or on their way.

        Raises:
            ValueError: There is no such slot, or no token. Or the model has windows of
                attention, with which what MaxText generates is not what it would
                prefill.
            RuntimeError: The decode state has been donated, or the store was closed.
        """
        for name in WINDOWS:
            if window := getattr(self._engine.config, name, 0):
                raise ValueError(
                    f"{name}={window} must be 0: with it MaxText generates other KV "
                    "than it prefills, so that only prompts can be kept (save_prefix)."
                )
        slot = operator.index(slot)
        num_slots = decode_state["generated_tokens"].shape[0]
        if not 0 <= slot < num_slots:
            raise ValueError(f"{slot=} must be in [0, {num_slots}).")
        if not len(tokens):
            raise ValueError("tokens is empty; it must be all tokens of the request.")
        num_tokens = min(len(tokens) - 1, self.max_tokens)
        needed = {name: decode_state[name] for name in ("cache", "generated_tokens")}
        kv, has_all = maxtext_cache.slot_kv(needed, slot, num_tokens)
        return self.store.save(
            tokens, kv, num_tokens, extras, only_if=lambda: bool(has_all)
        )

    def close(self) -> None:
        """Wait for what is on its way; no calls after this."""
        self.store.close()

    def _existing(self, cache: PyTree, tokens: TokenIds) -> Any:
        covered = jnp.asarray(np.asarray(tokens, np.int32))
        return self._prefix_class(cache=cache, common_prefix_tokens=covered)


WANTED = {
    "use_chunked_prefill": (True, "it is the only prefill that can resume"),
    "prefill_cache_axis_order": ("1,2,0,3", "chunked prefill is right for no other"),
    "ar_cache_axis_order": ("1,2,0,3", "no other is known to jaxkv"),
    "quantize_kvcache": (False, "chunked prefill refuses quantised KV"),
    "use_ragged_attention": (False, "it gives each slot a ring index of its own"),
}
"""Settings of MaxText's -> what they must be, and why."""

ATTENTIONS = ("global", "local_sliding", "chunk")

WINDOWS = ("sliding_window_size", "chunk_attn_window_size")
"""Settings of MaxText's that are 0 if it generates the KV that it would prefill."""


def check_config(config: Any) -> None:
    """Refuse a configuration of MaxText's that `MaxTextOffload` cannot serve.

    Raises:
        ValueError: A setting is wrong; the message says which, and why.
    """
    for name, (wanted, why) in WANTED.items():
        found = getattr(config, name, wanted)
        if found != wanted:
            raise ValueError(f"{name}={found!r} must be {wanted!r}: {why}.")
    attention = getattr(config, "attention_type", "global")
    if attention not in ATTENTIONS:
        raise ValueError(
            f"attention_type={attention!r} must be one of {ATTENTIONS}: in MaxText the "
            "prefill of latent attention pays no heed to an existing prefix, and "
            "others look at later tokens."
        )
    if getattr(config, "stack_prefill_result_cache", False) and not config.scan_layers:
        raise ValueError(
            "stack_prefill_result_cache=True must be False with scan_layers=False: a "
            "prefill would give a stacked cache and resume only from an unstacked one."
        )


def _cache_like(engine: Any) -> PyTree:
    """Ask an engine for the shapes of its prefill cache, as they lie on its mesh."""
    make = getattr(engine, "_nnx_init_cache_dict", None)
    shardings = getattr(engine, "prefill_kv_cache_shardings", None)
    if make is None or shardings is None:
        raise ValueError(
            "the engine does not tell what its cache looks like: load its parameters "
            'first; or give cache_like, prefix["cache"] of any prefill.'
        )
    return jax.tree.map(
        lambda leaf, sharding: memory.array_spec(leaf.shape, leaf.dtype, sharding),
        jax.eval_shape(make),
        shardings,
    )


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return memory.array_spec(leaf.shape, leaf.dtype, leaf.sharding)

"""Keeps the KV of MaxText's MaxEngine on the host, and resumes prefills from it.

MaxEngine has no pages: a prefill returns the cache of one prompt, `insert` copies it
into a slot of the decode state, and a prefill can continue from a cache passed as
`existing_prefix`. So KV is saved after a prefill and at the end of a request, and
loaded before the next prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import Extras, Namespace
from jaxkv._util import Resource, check_whole, shown
from jaxkv.integrations import maxtext_cache, maxtext_guards
from jaxkv.integrations.prefix_layout import describe
from jaxkv.integrations.prefix_store import PrefixStore, StoreKeys, epoch_of
from jaxkv.keys.hashing import NO_EXTRAS, TokenIds, token_bytes
from jaxkv.transfer import memory
from jaxkv.types import PyTree


class Resumption(NamedTuple):
    """The loaded prefix that a prefill may continue."""

    existing_prefix: Any  # The argument for `MaxEngine.prefill`; None for a miss.
    num_tokens: int  # Tokens that it covers, from the first on.


class Prefill(NamedTuple):
    """The result of the prefill of a whole prompt."""

    prefix: Any  # From the last `MaxEngine.prefill`; for `insert`, which donates it.
    result: Any  # The first token, from the same call.
    num_tokens: int  # Tokens of the prompt that were loaded, not computed.


class MaxTextOffload(Resource):
    """Keeps the KV of a MaxEngine's requests on the host, and resumes from it.

    An engine loop adds these calls:

    * `prefill` instead of the engine's; or, with your own chunks, `resume` before the
      first chunk and `save_prefix` after the last, before `insert`.
    * `save_slot` when a request ends, before its slot is reused.

    The saves do not wait for the device. Any thread may call. `tokens` are int[n],
    `extras` the adapter and salt that their KV depends on, and `epoch` says which
    parameters compute it, as for `PrefixStore`: after the first `store.clear`, each
    call without it raises ValueError.

    Attributes:
        store: The blocks, their counters, `epoch`, `flush` and `clear`.
    """

    def __init__(
        self,
        engine: Any,
        *,
        namespace: Namespace,
        cache_like: PyTree | None = None,
        **store: Unpack[StoreKeys],
    ):
        """Set up the host memory, and the guards that this version of MaxText needs.

        The guards (`jaxkv.integrations.maxtext_guards`) change classes of MaxText.

        Args:
            engine: A MaxEngine whose parameters are loaded.
            namespace: What the KV depends on besides the tokens, with the block size.
                The engine's chunk size or a divisor of it is a good block size.
            cache_like: The cache of a prefill, `prefix["cache"]`, or its shapes; by
                default the engine's.
            store: As for `PrefixStore`: its size, ``num_host_blocks`` or
                ``host_bytes``, and perhaps ``cache_policy``, or a ``recorder``, which
                records each `resume` or `prefill` as a request.

        Raises:
            ImportError: MaxText is not installed.
            ValueError: The engine cannot resume, its cache cannot be cut by tokens, or
                an argument is wrong.
            MemoryError: There is not enough host memory.
        """
        check_config(engine.config)
        if cache_like is None:
            cache_like = prefill_cache_like(engine)
        self._engine = engine
        self._cache_like = describe(cache_like)
        kv_like = maxtext_cache.prompt_kv(self._cache_like)
        self._prefix_class = maxtext_guards.find_prefix_class()
        maxtext_guards.guard_chunked_prefill()
        maxtext_guards.guard_stub_results()
        self.store = PrefixStore(
            kv_like,
            namespace=namespace,
            sequence_axis=maxtext_cache.SEQUENCE_AXIS,
            **store,
        )

    @property
    def chunk_size(self) -> int:
        """Tokens that one prefill computes; resumed lengths are multiples of it.

        MaxEngine compiles its prefill for each length of an existing prefix, so there
        should be few lengths.
        """
        return int(self._engine.config.prefill_chunk_size)

    def resume(
        self, tokens: TokenIds, extras: Extras = NO_EXTRAS, *, epoch: int | None = None
    ) -> Resumption:
        """Load the longest prefix to continue a prefill from. Waits for the bytes.

        At least the last token of the prompt is left to compute.
        """
        token_bytes(tokens)  # Refuses invalid tokens.
        epoch = epoch_of(epoch, self.store.epoch)
        max_tokens = (len(tokens) - 1) // self.chunk_size * self.chunk_size
        hit = None
        if max_tokens > 0:
            hit = self.store.load(
                tokens[:max_tokens], extras, min_tokens=self.chunk_size, epoch=epoch
            )
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
        *,
        epoch: int | None = None,
        **arguments: Any,
    ) -> Prefill:
        """Prefill a prompt in chunks, after its longest saved prefix, and save it.

        Each `MaxEngine.prefill` gets `params` and the other `arguments`. If
        `store.clear` is called meanwhile, nothing is saved.

        Raises:
            ValueError: The prompt is empty, or too long for the engine.
        """
        token_bytes(tokens)  # Refuses invalid tokens.
        chunk, num_tokens = self.chunk_size, len(tokens)
        end = -(-num_tokens // chunk) * chunk
        if not 0 < end <= self.store.max_tokens:
            raise ValueError(
                f"the prompt has {num_tokens} tokens; it must have between 1 and "
                f"{self.store.max_tokens // chunk * chunk}, the chunks of {chunk} that "
                "max_prefill_predict_length has room for."
            )
        padded = np.zeros(end, np.int32)
        padded[:num_tokens] = tokens
        epoch = epoch_of(epoch, self.store.epoch)
        existing, start = self.resume(tokens, extras, epoch=epoch)
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
        self.save_prefix(tokens, prefix, extras, epoch=epoch)
        return Prefill(prefix, result, start)

    def save_prefix(
        self,
        tokens: TokenIds,
        prefix: Any,
        extras: Extras = NO_EXTRAS,
        *,
        epoch: int | None = None,
    ) -> int:
        """Save the KV of a prompt after its prefill; before `insert`, which donates it.

        Args:
            tokens: The whole prompt, with the resumed tokens.
            prefix: The result of its last prefill.
            extras: Its adapter and salt.
            epoch: The epoch of the parameters that computed it.

        Returns:
            As for `PrefixStore.save`.

        Raises:
            ValueError: The prefix is not of this engine, or has fewer tokens.
            RuntimeError: It has been donated, or the store was closed.
        """
        kv = maxtext_cache.prompt_kv(_entry("prefix", prefix, "cache"))
        return self.store.save(tokens, kv, extras=extras, epoch=epoch)

    def save_slot(
        self,
        tokens: TokenIds,
        decode_state: Mapping[str, Any],
        slot: int,
        extras: Extras = NO_EXTRAS,
        *,
        epoch: int | None = None,
    ) -> int:
        """Save the KV of a request at its end, of its prompt and generated tokens.

        Call it before anything is inserted into the slot again; steps of other requests
        may have run since. If the slot has fewer tokens, or the ring has overwritten
        some, nothing is kept (`store.stats.num_dropped_failed`).

        Args:
            tokens: All tokens of the request, prompt and generated. The last one has no
                KV yet. Tokens beyond `store.max_tokens` are not kept,
                since no prefill could resume from them.
            decode_state: The result of the last `generate`.
            slot: The request's slot.
            extras: Its adapter and salt.
            epoch: The epoch of the parameters that computed its prompt.

        Returns:
            As for `PrefixStore.save`.

        Raises:
            ValueError: There is no such slot or no token, or the model has attention
                windows: then MaxText generates other KV than it prefills.
            RuntimeError: The decode state has been donated, or the store was closed.
        """
        for name in WINDOWS:
            if window := getattr(self._engine.config, name, 0):
                raise ValueError(
                    f"{name}={window} must be 0: with it MaxText generates other KV "
                    "than it prefills, so that only prompts can be kept (save_prefix)."
                )
        needed = {
            name: _entry("decode_state", decode_state, name)
            for name in ("cache", "generated_tokens")
        }
        num_slots = needed["generated_tokens"].shape[0]
        check_whole(0, slot=slot)
        if slot >= num_slots:
            raise ValueError(f"{slot=} must be in [0, {num_slots}).")
        if not token_bytes(tokens):
            raise ValueError("tokens is empty; it must be all tokens of the request.")
        num_tokens = min(len(tokens) - 1, self.store.max_tokens)
        kv, has_all = maxtext_cache.slot_kv(needed, slot, num_tokens)
        return self.store.save(
            tokens, kv, num_tokens, extras, only_if=lambda: bool(has_all), epoch=epoch
        )

    def close(self) -> None:
        """Wait for transfers in flight; no calls after this."""
        self.store.close()

    def _existing(self, cache: PyTree, tokens: TokenIds) -> Any:
        covered = jnp.asarray(np.asarray(tokens, np.int32))
        return self._prefix_class(cache=cache, common_prefix_tokens=covered)


def _entry(name: str, result: Any, key: str) -> Any:
    """Return an entry of a MaxEngine's result."""
    try:
        return result[key]
    except (TypeError, LookupError):
        raise TypeError(
            f"{name}={shown(result)} must be what MaxEngine returned, with {key!r}."
        ) from None


REQUIRED = {
    "use_chunked_prefill": (True, "it is the only prefill that can resume"),
    "prefill_cache_axis_order": ("1,2,0,3", "chunked prefill is right for no other"),
    "ar_cache_axis_order": ("1,2,0,3", "no other is known to jaxkv"),
    "quantize_kvcache": (False, "chunked prefill refuses quantised KV"),
    "use_ragged_attention": (False, "it gives each slot its own ring index"),
}
"""Settings of MaxText -> their required values, and the reasons."""

ATTENTIONS = ("global", "local_sliding", "chunk")

WINDOWS = ("sliding_window_size", "chunk_attn_window_size")
"""Settings of MaxText that are 0 if generated KV equals prefilled KV."""


def check_config(config: Any) -> None:
    """Raise ValueError for a setting of MaxText that `MaxTextOffload` cannot serve."""
    for name, (required, reason) in REQUIRED.items():
        value = getattr(config, name, required)
        if value != required:
            raise ValueError(f"{name}={value!r} must be {required!r}: {reason}.")
    attention = getattr(config, "attention_type", "global")
    if attention not in ATTENTIONS:
        raise ValueError(
            f"attention_type={attention!r} must be one of {ATTENTIONS}: in MaxText the "
            "prefill of latent attention ignores an existing prefix, and others attend "
            "to later tokens."
        )
    if getattr(config, "stack_prefill_result_cache", False) and not config.scan_layers:
        raise ValueError(
            "stack_prefill_result_cache=True must be False with scan_layers=False: a "
            "prefill returns a stacked cache and resumes only from an unstacked one."
        )


def prefill_cache_like(engine: Any) -> PyTree:
    """Return the shapes and shardings of an engine's prefill cache.

    ValueError if the engine's parameters are not loaded.
    """
    make = getattr(engine, "_nnx_init_cache_dict", None)
    shardings = getattr(engine, "prefill_kv_cache_shardings", None)
    if make is None or shardings is None:
        raise ValueError(
            "the engine does not know the shapes of its cache: load its parameters "
            'first, or pass cache_like, prefix["cache"] of any prefill.'
        )
    return jax.tree.map(
        lambda leaf, sharding: memory.array_spec(leaf.shape, leaf.dtype, sharding),
        jax.eval_shape(make),
        shardings,
    )

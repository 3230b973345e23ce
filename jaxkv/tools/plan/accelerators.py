"""Published speeds of accelerators, which `jaxkv plan` assumes unless they are given.

FLOP/s and HBM come from pages of the makers, TPUs' links from the JAX team's book:

* https://docs.cloud.google.com/tpu/docs/v5e, and its siblings v5p, v6e and tpu7x;
* https://jax-ml.github.io/scaling-book/tpus: PCIe has "typically around 1.5e10 bytes /
  second per chip", and 32 GB/s on v6e. No source gives the link of TPU7x.
* https://jax-ml.github.io/scaling-book/gpus, after
  https://www.nvidia.com/en-us/data-center/h100/: SXM modules, without sparsity;
* https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth: PCIe Gen 5 has
  "64 GB/sec in each direction".

JAX sees a TPU7x chip as two devices, and gives its HBM bandwidth in
`jax.experimental.pallas.tpu.TpuInfo`. No page describes the CPU of a reader: its speeds
are measured.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

_ROWS = 1024
_ROUNDS = 5


class Accelerator(NamedTuple):
    """The peak speeds of a JAX device; None where no source gives one."""

    name: str
    kinds: tuple[str, ...]  # Its names in JAX (`device_kind`)
    flops_per_s: float | None = None  # In bfloat16
    hbm_bytes: float | None = None
    hbm_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None  # To the host and back, each way

    @property
    def text(self) -> str:
        """Its name and its memory.

        >>> ACCELERATORS["v6e"].text
        'v6e, each device with 32 GB of HBM at 1,638 GB/s'
        """
        if self.hbm_bytes is None or self.hbm_bytes_per_s is None:
            return self.name
        size, rate = self.hbm_bytes / 1e9, self.hbm_bytes_per_s / 1e9
        return f"{self.name}, each device with {size:.0f} GB of HBM at {rate:,.0f} GB/s"


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16e9, 819e9, 15e9),
        Accelerator("v5p", ("TPU v5", "TPU v5p"), 459e12, 95 << 30, 2765e9, 15e9),
        Accelerator("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32e9, 1638e9, 32e9),
        Accelerator("tpu7x", ("TPU7x",), 2307e12 / 2, 96 << 30, 7.4e12 / 2),
        Accelerator("h100", ("NVIDIA H100 80GB HBM3",), 990e12, 80e9, 3.35e12, 64e9),
        Accelerator("h200", ("NVIDIA H200",), 990e12, 141e9, 4.8e12, 64e9),
        Accelerator("cpu", ("cpu",)),
    )
}


def find_accelerator(device_kind: str) -> Accelerator | None:
    """Return the accelerator that JAX names so.

    >>> find_accelerator("TPU v6 lite").name, find_accelerator("TPU v2")
    ('v6e', None)
    """
    found = (row for row in ACCELERATORS.values() if device_kind in row.kinds)
    return next(found, None)


def measure_flops_per_s() -> float:
    product = jax.jit(jnp.matmul)
    rows = jnp.ones((_ROWS, _ROWS), jnp.float32)
    product(rows, rows).block_until_ready()
    seconds = []
    for _ in range(_ROUNDS):
        begun_s = time.perf_counter()
        product(rows, rows).block_until_ready()
        seconds.append(time.perf_counter() - begun_s)
    return float(2 * _ROWS**3 / min(seconds))

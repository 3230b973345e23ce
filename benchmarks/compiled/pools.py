"""The pools whose programs are compiled."""

from __future__ import annotations

import dataclasses
import math

from benchmarks.compiled.targets import NUM_DEVICES

LANES = 128
"""Elements of the last dimension that a TPU moves together."""


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """A pool of equal leaves."""

    name: str  # For people
    shape: tuple[int, ...]  # The shape of a leaf, over all devices
    num_leaves: int  # Number of leaves
    block_axis: int = 0  # The axis that counts the blocks
    dtype: str = "bfloat16"  # Name of the dtype of its elements
    # The axis that is spread over `NUM_DEVICES` devices; None for a pool on one device.
    sharded_axis: int | None = None
    # Whether its arrays are laid out in the order of their dimensions; if not, as XLA
    # likes best.
    row_major: bool = False
    blocks_per_host_block: int = 1  # Device blocks that move as one
    # The shapes of leaves of float32 beside the others
    scales: tuple[tuple[int, ...], ...] = ()

    @property
    def num_shards(self) -> int:
        """Shards of the block axis."""
        return NUM_DEVICES if self.sharded_axis == self.block_axis else 1

    @property
    def shard_blocks(self) -> int:
        """Blocks of one shard, those that move as one counted once."""
        num_blocks = self.shape[self.block_axis] // self.num_shards
        return num_blocks // self.blocks_per_host_block

    @property
    def text(self) -> str:
        """The shape in one line, for people."""
        dims = ",".join(map(str, self.shape))
        line = f"{self.num_leaves} x {self.dtype}[{dims}]"
        if self.block_axis:
            line += f", blocks on axis {self.block_axis}"
        if self.sharded_axis is not None:
            line += f", axis {self.sharded_axis} over {NUM_DEVICES} devices"
        if self.blocks_per_host_block > 1:
            line += f", {self.blocks_per_host_block} together"
        for scale in dict.fromkeys(self.scales):
            dims = ",".join(map(str, scale))
            line += f", and {self.scales.count(scale)} x float32[{dims}]"
        return line + (", row-major" if self.row_major else "")


def check_pool(pool: PoolShape) -> None:
    """Refuse a pool that cannot be."""
    num_axes = len(pool.shape)
    if not pool.shape or min(pool.shape) < 1:
        raise ValueError(f"shape {list(pool.shape)} must have sizes from 1")
    for name, axis in (
        ("block axis", pool.block_axis),
        ("sharded axis", pool.sharded_axis),
    ):
        if axis is not None and not 0 <= axis < num_axes:
            raise ValueError(
                f"{name} {axis} must be from 0 to {num_axes - 1}: the shape is "
                f"{list(pool.shape)}"
            )
    axis = pool.sharded_axis
    if axis is not None and pool.shape[axis] % NUM_DEVICES:
        raise ValueError(
            f"axis {axis} has {pool.shape[axis]}, which {NUM_DEVICES} devices cannot "
            "share equally"
        )


def default_pools(num_layers: int = 32) -> tuple[PoolShape, ...]:
    """Return pools as the engines around jaxkv lay them out.

    The model has eight KV heads; blocks have 16 tokens. Names state the
    layers of models if `num_layers` is 32. Each layer is a leaf, except in the pool
    with all layers in one array, which always has 32: few would hide its copies.
    """
    layers, blocks = num_layers, 2048
    return (
        PoolShape("tpu-inference", (blocks, 16, 8, 2, 128), layers),
        # K and V of a head side by side fill the lanes.
        PoolShape("head_dim 64, packed", (blocks, 16, 4, 2, 128), layers),
        PoolShape(
            "head_dim 64, row-major", (blocks, 16, 8, 2, 64), layers, row_major=True
        ),
        # 512 latent and 64 rotary elements, as tpu-inference pads them.
        PoolShape("MLA, padded to 640", (blocks, 8, 2, 640), layers),
        PoolShape("MLA 576, row-major", (blocks, 16, 576), layers, row_major=True),
        PoolShape("k and v apart", (blocks, 16, 8, 128), 2 * layers),
        PoolShape("MaxText pages", (8, blocks, 16, 128), 2 * layers, block_axis=1),
        PoolShape("MaxText prefix", (128, 16, 8, 1, 128), 2 * layers),
        PoolShape(
            "MaxText prefix, scanned", (layers, 128, 16, 8, 1, 128), 2, block_axis=1
        ),
        PoolShape("one array", (32, 2, blocks, 16, 8, 128), 1, block_axis=2),
        # Of a model of 80 layers over eight devices, each has one KV head.
        PoolShape(
            "80 layers, one of 8 devices", (blocks, 16, 1, 2, 128), 5 * layers // 2
        ),
        PoolShape("MLA, 61 layers", (blocks, 8, 2, 640), 2 * layers - 3),
        PoolShape(
            "int8, all scales in one leaf",
            (blocks, 16, 8, 2, 128),
            layers,
            dtype="int8",
            scales=((blocks, 2, 128),),
        ),
        PoolShape(
            "rows of tokens",
            (16, 16 * blocks, 2, 128),
            2,
            block_axis=1,
            blocks_per_host_block=16,
        ),
        PoolShape("heads over 4", (blocks, 16, 8, 2, 128), layers, sharded_axis=2),
        PoolShape("blocks over 4", (4 * blocks, 16, 8, 2, 128), layers, sharded_axis=0),
    )


def costly_pools() -> tuple[PoolShape, ...]:
    """Return pools that TPUs lay out at great cost, as jaxkv warns of.

    Where the last dimension does not fill the lanes, XLA makes the blocks the fastest
    dimension, and a program has to turn the whole pool around. Leaves of scales are
    copied one by one.
    """
    blocks = 2048
    return (
        PoolShape(
            "int8, scales of each layer",
            (blocks, 16, 8, 2, 128),
            32,
            dtype="int8",
            scales=((blocks, 8),) * 32,
        ),
        PoolShape("float16", (blocks, 16, 8, 2, 128), 32, dtype="float16"),
        PoolShape("head_dim 64", (blocks, 16, 8, 2, 64), 32),
        PoolShape("MLA 576", (blocks, 16, 576), 32),
    )


def align(size: int, multiple: int) -> int:
    """Round up to a multiple."""
    return math.ceil(size / multiple) * multiple

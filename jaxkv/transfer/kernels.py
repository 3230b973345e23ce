"""Compiled programs that copy the blocks of one extent, in two modes."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from numpy.typing import NDArray

from jaxkv._util import shown
from jaxkv.transfer import dma, memory, rows
from jaxkv.transfer.codecs import Compression
from jaxkv.transfer.extents import Bundle, Extent, ExtentLayout
from jaxkv.transfer.jax_internals import Carrier, Putter
from jaxkv.transfer.layout import PoolLayout
from jaxkv.transfer.plans import NOTHING, SavePlan

_log = logging.getLogger(__name__)

_DEVICE = jax.memory.Space.Device
# To start a program costs the thread that owns the engine the same for one extent or
# several. Each number is one more program to compile, so pools of many leaves have few.
MAX_EXTENTS_PER_PROGRAM = 4
_EXTENTS_PER_PROGRAM = (MAX_EXTENTS_PER_PROGRAM, 2, 1)
_MAX_LEAVES_PER_PROGRAM = 160

SaveKind: TypeAlias = Literal["gather", "write", "merge"]
"""Programs of a save: for all rows of an extent, some, or some with carried rows."""

Mode: TypeAlias = Literal["fused", "staged"]
MODES: tuple[Mode, ...] = get_args(Mode)

Kernel: TypeAlias = Literal["xla", "dma"]
"""How rows are copied on a device: by XLA's gathers and scatters, or by `dma`."""
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
# Where "dma" is the default in the mode "staged".
_DMA_PLATFORMS = ("tpu",)

SAVE_KINDS: dict[Mode, tuple[SaveKind, ...]] = {
    "fused": ("gather", "write", "merge"),
    "staged": ("gather", "merge"),
}


class RowCopier(Protocol):
    """Copies rows inside a program, on the parts of pool and extent on one device.

    `rows` does it by XLA's gathers and scatters, `dma` by asynchronous copies. Leaves
    are given by their indices in the pool.
    """

    def gather_rows(
        self,
        extents: ExtentLayout,
        bundles: Sequence[Bundle],
        leaves: Mapping[int, jax.Array],
        sources: jax.Array,
        carry: Extent | None,
    ) -> Extent:
        """Return the arrays of `bundles` for a new extent.

        `sources` are the `SavePlan.row_sources` of a shard, i32[2 * rows]. Carried rows
        come from `carry`, arrays of `bundles` that may be written in place; other rows
        without a source have any value.
        """

    def scatter_rows(
        self,
        extents: ExtentLayout,
        bundles: Sequence[Bundle],
        leaves: Mapping[int, jax.Array],
        targets: jax.Array,
        arrays: Extent,
    ) -> dict[int, jax.Array]:
        """Return the leaves of `bundles` after writing an extent's `arrays` to them.

        `targets`, i32[rows], has the block for each row, distinct; NOTHING for none.
        `bundles` have all arrays of their leaves.
        """


_ROW_COPIERS: dict[bool, RowCopier] = {True: dma, False: rows}
"""By whether asynchronous copies are used."""


class Copier:
    """Copies blocks between the leaves of one pool layout and extents on the host.

    An extent is written once and never changed: where only some rows are new, the
    others are carried over from another extent into a new one. So a failed save does
    not damage older blocks.

    In the mode ``"fused"`` one program does all the work: a save writes its rows
    directly into the host memory of a free extent (donated), a load copies to the
    device and scatters. In the mode ``"staged"`` the programs stay on the device, and
    one call of `jax.device_put` copies to or from the host. Fused is faster on CPU;
    elsewhere a program that accesses the host blocks the compute stream until its copy
    is done, so staged hides the copy behind the next step.

    On TPU the staged programs consist of asynchronous copies (the kernel ``"dma"``),
    for the leaves that these can copy and that are not compressed. If the compiler
    refuses them, all programs are XLA's, and a warning is logged.

    If the pool is spread over devices, every program runs on each shard separately with
    ids that count within the shard; no program contains a collective.

    Programs are compiled ahead of time, on first use, so that arrays committed to a
    device and uncommitted ones share a program. A copier holds no other state, so
    engines can share it (`copier_of`).
    """

    def __init__(
        self,
        extents: ExtentLayout,
        mode: Mode,
        kernel: Kernel | None = None,
        max_extents: int = 1,
    ):
        """Prepare programs for up to `max_extents` extents in flight.

        Without `kernel`, the best that compiles. Where there is no TPU, ``"dma"`` is
        interpreted, for tests. ValueError if it cannot copy any leaf in this mode.
        """
        self.mode = mode
        self.extents = extents
        self._pool = extents.pool
        self._platform = self._pool.platform
        self._plan = self._pool.plan_sharding()
        self._plan_putter = Putter(self._plan)
        self._host = extents.shardings(memory.HOST_KIND)
        self._device = extents.shardings(None)
        self._to_host = Carrier(self._host)
        self._to_device = Carrier(self._device)
        self._token = _token if self._platform == "cpu" else _first
        self._may_fall_back = kernel is None
        self._by_dma = self._choose_by_dma(kernel)
        num_leaves = len(self._pool.leaves)
        self.extents_per_program = tuple(
            number
            for number in _EXTENTS_PER_PROGRAM
            if number == 1
            or (
                mode == "staged"
                and number <= max_extents
                and number * num_leaves <= _MAX_LEAVES_PER_PROGRAM
            )
        )
        """How many extents a program can copy, in descending order."""
        self.save_program = functools.cache(self._compile_save)
        self.load_program = functools.cache(self._compile_load)
        self.new_extent = functools.cache(self._compile_zeros)

    @property
    def kernel(self) -> Kernel:
        """``"dma"`` if some leaves are copied by it, else ``"xla"``."""
        return "dma" if self._by_dma else "xla"

    def warm_up(self) -> None:
        """Compile every program."""
        for kind in SAVE_KINDS[self.mode]:
            self.save_program(kind)
        self.load_program()
        for number in self.extents_per_program[:-1]:
            self.save_program("gather", number)
            self.load_program(number)

    def _compile_zeros(self) -> Callable[[], Extent]:
        """Compile a program that allocates an extent of zeros on the host."""
        specs = self.extents.specs(memory.HOST_KIND)
        zeros = jax.jit(
            lambda: tuple(jnp.zeros(spec.shape, spec.dtype) for spec in specs),
            out_shardings=self._host,
        )
        return memory.compile_program(zeros.lower(), self._platform)

    def save(
        self,
        leaves: list[jax.Array],
        plans: Sequence[SavePlan],
        carry: Extent | None,
        spare: Extent | None,
    ) -> tuple[list[Extent], list[list[jax.Array]]]:
        """Copy device blocks into new extents on the host, as many as there are plans.

        There is one plan if rows are carried over, or in the mode ``"fused"``, which
        donates `spare`. `carry` is only read. Returns the extents, and for each, arrays
        that are ready when it is copied.
        """
        if self.mode == "fused":
            extent, token = self._save_fused(leaves, plans[0], carry, spare)
            return [extent], [[token]]
        if carry is not None:
            merge = self.save_program("merge")
            old = self._to_device.copy(carry)
            staged, _ = self._run(merge, leaves, plans[0].row_sources, old)
        else:
            number = len(plans)
            several = (number,) if number > 1 else ()
            gather = self.save_program("gather", *several)
            rows = [plan.row_sources for plan in plans]
            plan = np.concatenate(rows, axis=1) if several else rows[0]
            staged, _ = self._run(gather, leaves, plan)
        copied = self._to_host.copy(staged)
        size = len(self._host)
        extents = [copied[n : n + size] for n in range(0, len(copied), size)]
        return extents, [list(extent) for extent in extents]

    def _save_fused(
        self,
        leaves: list[jax.Array],
        plan: SavePlan,
        carry: Extent | None,
        spare: Extent | None,
    ) -> tuple[Extent, jax.Array]:
        kind: SaveKind
        extents: tuple[Extent | None, ...]
        if carry is not None:
            kind, extents = "merge", (carry, spare)
        elif (plan.sources != NOTHING).all():
            kind, extents = "gather", (spare,)
        else:
            kind, extents = "write", (spare,)
        lists = self._takes_lists(kind)
        rows = plan.row_lists() if lists else plan.row_sources
        saved: tuple[Extent, jax.Array] = self._run(
            self.save_program(kind), leaves, rows, *extents
        )
        return saved

    def stage(self, extents: Sequence[Extent]) -> list[Extent]:
        """Copy extents to the device, in one call."""
        size = len(self._device)
        copied = self._to_device.copy(tuple(itertools.chain(*extents)))
        return [copied[n : n + size] for n in range(0, len(copied), size)]

    def load(
        self,
        leaves: list[jax.Array],
        targets: Sequence[NDArray[np.int32]],
        extents: Sequence[Extent],
    ) -> jax.Array:
        """Copy blocks of extents into the pool.

        The pool's leaves are donated, and replaced in the list. `targets` has
        i32[shards, rows] for each extent: the device block for each row, counted within
        its shard, NOTHING for none. `extents` are from `stage`, or on the host in the
        mode ``"fused"``. As many as `extents_per_program` has; the later ones are
        written last. Returns an array that is ready when the copies are done.
        """
        number = len(extents)
        several = (number,) if number > 1 else ()
        program = self.load_program(*several)
        plan = np.concatenate(targets, axis=1) if several else targets[0]
        token: jax.Array
        leaves[:], token = self._run(program, leaves, plan, *extents)
        return token

    def _run(
        self,
        program: jax.stages.Compiled,
        leaves: list[jax.Array],
        plan: NDArray[np.int32],
        *extents: Extent | None,
    ) -> Any:
        """Run a program with a plan that nothing changes: XLA may read it late."""
        config: Any = jax.config
        if config.jax_debug_nans or config.jax_debug_infs:
            # Bytes are only moved: a NaN among them is no error.
            with jax.debug_nans(False), jax.debug_infs(False):
                return self._run(program, leaves, plan, *extents)
        if not memory.is_guarded():
            return program(leaves, self.placed(plan), *extents)
        # Transfer guards refuse implicit transfers; the plan's is intended, and costs
        # less than a `device_put`.
        with jax.transfer_guard_host_to_device("allow"):
            return program(leaves, self.placed(plan), *extents)

    def placed(self, plan: NDArray[np.int32]) -> NDArray[np.int32] | jax.Array:
        """Spread a plan over the devices of the pool, if they are several."""
        if not isinstance(self._plan, jax.sharding.NamedSharding):
            return plan
        return self._plan_putter.put(plan)

    def _takes_lists(self, kind: SaveKind) -> bool:
        """Whether the plan of a save program is `SavePlan.row_lists`."""
        # For all rows a gather is faster, since XLA:CPU uses several threads; for a few
        # rows a loop is, since it leaves the others unwritten.
        return self.mode == "fused" and kind != "gather"

    def _compile_save(self, kind: SaveKind, number: int = 1) -> jax.stages.Compiled:
        fused, merges = self.mode == "fused", kind == "merge"
        in_lists = self._takes_lists(kind)

        def write(
            leaves: list[jax.Array], plan: jax.Array, *extents: Extent
        ) -> tuple[Extent, jax.Array]:
            *carry, spare = extents
            written = rows.write_rows(self.extents, leaves, plan[0], carry, spare)
            return written, self._token(plan)

        def gather(
            leaves: list[jax.Array], plan: jax.Array, *carry: Extent
        ) -> tuple[Extent, jax.Array]:
            extents = [
                self._gather(leaves, sources, *carry)
                for sources in jnp.split(plan[0], number)
            ]
            return tuple(itertools.chain(*extents)), self._token(plan)

        def program(
            leaves: list[jax.Array], plan: jax.Array, *extents: Extent
        ) -> tuple[Extent, jax.Array]:
            # A program that writes whole extents takes the memory of the spare one, but
            # does not read it: it stays on the host.
            read = extents if in_lists else extents[:merges]
            read = jax.device_put(read, _DEVICE) if fused else read
            specs = (self._leaf_specs(), self._shard_spec())
            extent = self.extents.partition_specs()
            result: tuple[Extent, jax.Array] = self._per_shard(
                write if in_lists else gather,
                in_specs=(*specs, *[extent] * len(read)),
                out_specs=(extent * number, self._shard_spec()),
            )(leaves, plan, *read)
            return result

        # Donate within one memory kind only: XLA:CPU aborts the process if a device
        # buffer is donated to a host result. The pool is only read, never donated.
        memory_kind = memory.HOST_KIND if fused else None
        extents = [self.extents.specs(memory_kind)] * (merges + fused)

        def lower() -> jax.stages.Lowered:
            num_rows = self.extents.rows
            return _new_jit(
                program,
                # The last extent: the spare one, or the staged copy of the carried one.
                donate_argnums=(1 + len(extents),) if extents else (),
                keep_unused=True,
                out_shardings=(
                    (self._host if fused else self._device) * number,
                    self._plan,
                ),
            ).lower(
                self._pool.pool_specs(),
                self._plan_spec(
                    3 * num_rows + 2 if in_lists else 2 * num_rows * number
                ),
                *extents,
            )

        return self._compile(lower)

    def _compile_load(self, number: int = 1) -> jax.stages.Compiled:
        fused = self.mode == "fused"

        def scatter(
            leaves: list[jax.Array], plan: jax.Array, *extents: Extent
        ) -> tuple[list[jax.Array], jax.Array]:
            for targets, extent in zip(
                jnp.split(plan[0], number), extents, strict=True
            ):
                leaves = self._scatter(leaves, targets, extent)
            return leaves, self._token(plan)

        def program(
            leaves: list[jax.Array], plan: jax.Array, *extents: Extent
        ) -> tuple[list[jax.Array], jax.Array]:
            extents = jax.device_put(extents, _DEVICE) if fused else extents
            specs = (self._leaf_specs(), self._shard_spec())
            extent = self.extents.partition_specs()
            result: tuple[list[jax.Array], jax.Array] = self._per_shard(
                scatter, in_specs=(*specs, *[extent] * number), out_specs=specs
            )(leaves, plan, *extents)
            return result

        def lower() -> jax.stages.Lowered:
            extent = self.extents.specs(memory.HOST_KIND if fused else None)
            return _new_jit(
                program,
                donate_argnums=0,
                out_shardings=(self._placements(), self._plan),
            ).lower(
                self._pool.pool_specs(),
                self._plan_spec(self.extents.rows * number),
                *[extent] * number,
            )

        return self._compile(lower)

    def _compile(self, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Compile a program, if need be without the kernel ``"dma"``."""
        if self._by_dma and self._may_fall_back:
            try:
                return memory.compile_program(lower(), self._platform)
            except Exception as error:  # Pallas raises private classes of its own.
                by_dma, self._by_dma = self._by_dma, frozenset()
                compiled = memory.compile_program(lower(), self._platform)
                # Without the kernel it compiles, so the kernel was at fault.
                _log.warning(
                    "The compiler refuses the asynchronous copies of %d arrays; "
                    "XLA's programs are used instead: %s",
                    len(by_dma),
                    str(error).partition("\n")[0] or type(error).__name__,
                )
                return compiled
        return memory.compile_program(lower(), self._platform)

    def _gather(
        self, leaves: list[jax.Array], sources: jax.Array, carry: Extent | None = None
    ) -> Extent:
        """Gather the arrays of an extent, see `SavePlan.row_sources`."""
        pool = dict(enumerate(leaves))
        bundles = self.extents.bundles
        gathered: dict[int, jax.Array] = {}
        for copier, numbers in self._by_copier([bundle.leaves for bundle in bundles]):
            old = None if carry is None else tuple(carry[n] for n in numbers)
            arrays = copier.gather_rows(
                self.extents, [bundles[n] for n in numbers], pool, sources, old
            )
            gathered.update(zip(numbers, arrays, strict=True))
        return tuple(gathered[n] for n in range(len(bundles)))

    def _scatter(
        self, leaves: list[jax.Array], targets: jax.Array, extent: Extent
    ) -> list[jax.Array]:
        """Write the arrays of an extent into the leaves."""
        pool = dict(enumerate(leaves))
        bundles = self.extents.bundles
        for copier, numbers in self._by_copier([bundle.leaves for bundle in bundles]):
            arrays = tuple(extent[n] for n in numbers)
            pool |= copier.scatter_rows(
                self.extents, [bundles[n] for n in numbers], pool, targets, arrays
            )
        return list(pool.values())

    def _by_copier(
        self, leaves: Sequence[tuple[int, ...]]
    ) -> list[tuple[RowCopier, list[int]]]:
        """Split groups of leaves, as their numbers, by the copier of their rows."""
        split: dict[bool, list[int]] = {}
        for number, indices in enumerate(leaves):
            by_dma = self._by_dma.issuperset(indices)
            split.setdefault(by_dma, []).append(number)
        return [(_ROW_COPIERS[by_dma], numbers) for by_dma, numbers in split.items()]

    def _choose_by_dma(self, kernel: Kernel | None) -> frozenset[int]:
        """Choose the leaves that the kernel ``"dma"`` copies."""
        if kernel not in (None, *KERNELS):
            raise ValueError(f"kernel={shown(kernel)} must be one of {KERNELS}.")
        works_here = self.mode == "staged" and self._platform != "gpu"
        if kernel == "dma" and not works_here:
            raise ValueError(
                f"{kernel=} is for mode 'staged' on TPU, not for mode {self.mode!r} on "
                f"{self._platform}: it copies between buffers of one TPU."
            )
        is_best = works_here and self._platform in _DMA_PLATFORMS
        if kernel == "xla" or (kernel is None and not is_best):
            return frozenset()
        accepted = frozenset(
            index
            for index, leaf in enumerate(self._pool.leaves)
            if self.extents.codecs[index].keeps(leaf) and dma.accepts(leaf)
        )
        if kernel == "dma" and not accepted:
            raise ValueError(
                f"{kernel=} can copy no leaf of this pool: each is compressed, of a "
                "dtype that Pallas lacks, or has blocks along one of the last two axes "
                "in memory. Leave out the kernel, or take 'xla'."
            )
        return accepted

    def _placements(self) -> list[jax.sharding.Sharding | Format]:
        return [leaf.placed(leaf.sharding) for leaf in self._pool.leaves]

    def _per_shard(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Run `function` on each shard separately."""
        if self._pool.mesh is None:
            return function
        # check_vma proves that replicas are equal, which holds here by construction.
        return jax.shard_map(
            function,
            mesh=self._pool.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _leaf_specs(self) -> list[jax.sharding.PartitionSpec]:
        return [memory.partition_spec(*leaf.spec) for leaf in self._pool.leaves]

    def _shard_spec(self) -> jax.sharding.PartitionSpec:
        return memory.partition_spec(self._pool.shard_axes or None)

    def _plan_spec(self, size: int) -> jax.ShapeDtypeStruct:
        shape = (self._pool.num_shards, size)
        return memory.array_spec(shape, np.dtype(np.int32), self._plan)


def _new_jit(function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """Return ``jax.jit(function)``, which also traces what jax has traced before."""
    return jax.jit(functools.partial(function), **options)


def _token(plan: jax.Array) -> jax.Array:
    """Return f32[1, 1] that is ready when the program is done and is never donated.

    The pool may have been donated again by then. The arithmetic is on purpose: XLA:CPU
    runs a program with less than a thousand floating-point operations in the calling
    thread, however many bytes it moves, and any other in the background.
    """
    ramp = jnp.arange(1024, dtype=jnp.float32)[None]
    return jnp.sum(ramp * _first(plan), axis=1, keepdims=True)


def _first(plan: jax.Array) -> jax.Array:
    """Return the token where all programs run in the background: one operation."""
    return plan[:, :1].astype(jnp.float32)


def choose_mode(mode: Mode | None, platform: str) -> Mode:
    """Check a mode, or choose the best on `platform`; ValueError if it cannot work."""
    if mode is None:
        return "fused" if platform == "cpu" else "staged"
    if mode not in MODES:
        raise ValueError(f"mode={shown(mode)} must be one of {MODES} or None.")
    if mode == "fused" and platform != "cpu":
        raise ValueError(
            f"{mode=} is for pools on CPU, and this one is on {platform}, where a "
            "program that writes host memory would hold up the model: use 'staged'."
        )
    return mode


class CopierSpec(NamedTuple):
    """The arguments of `ExtentLayout.of` and `Copier`."""

    pool: PoolLayout
    rows: int
    compression: Compression | None
    mode: Mode
    kernel: Kernel | None
    max_extents: int = 1

    def extents(self) -> ExtentLayout:
        """Lay out the extents."""
        return ExtentLayout.of(
            self.pool,
            self.rows,
            stacked=self.mode == "staged",
            compression=self.compression,
        )

    def make(self) -> Copier:
        """Make a copier."""
        return Copier(self.extents(), self.mode, self.kernel, self.max_extents)


def copier_of(spec: CopierSpec) -> Copier:
    """Return the copier that engines of one pool share: only the first compiles."""
    try:
        hash(spec)
    except TypeError:  # Such as head axes in a dict.
        return spec.make()
    return shared_copier(spec)


shared_copier = functools.lru_cache(maxsize=8)(CopierSpec.make)
"""The copiers of the last few pools."""

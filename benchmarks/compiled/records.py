"""The compilers' figures for each program."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from benchmarks.compiled.hlo import Census
from benchmarks.compiled.plan import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures(Census):
    """The compiler's figures for one program, on one device."""

    kernel: str  # What moves the rows: ``"xla"`` or ``"dma"``
    leaves: int  # Number of leaves of the pool
    block_bytes: int  # Bytes of a block in all leaves, without padding
    pool_bytes: int  # Bytes of the pool as it lies on the device, padding included
    moved_bytes: int  # Bytes of the moved blocks as they lie there
    # Bytes of an extent of these blocks as it lies on the host, padding included; None
    # if not asked for.
    extent_host_bytes: int | None
    # Bytes that the program reads and writes by XLA's estimate, loops counted once;
    # None if the compiler gives none.
    accessed_bytes: int | None
    # Seconds that it takes by XLA's estimate; None if there is none
    estimated_s: float | None
    # Memory that it takes beside its arguments and results, on device and host
    temp_bytes: int
    alias_bytes: int  # Bytes of arguments that results are written into
    compile_s: float  # Seconds of CPU time that lowering and compiling took

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes accessed over the least there can be: read once and written once."""
        if self.accessed_bytes is None:
            return None
        return self.accessed_bytes / (2 * self.moved_bytes)

    @property
    def temp_ratio(self) -> float:
        """Temporary memory over what is moved."""
        return self.temp_bytes / self.moved_bytes

    @property
    def alias_ratio(self) -> float:
        return self.alias_bytes / self.pool_bytes


Reply: TypeAlias = tuple[Figures | None, str | None]
"""What the compiling process says of a program: figures, or why there are none."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A program and its outcome."""

    program: Program  # The program
    figures: Figures | None  # What the compiler says; None if it did not compile
    error: str | None  # Why it did not compile; None if it did
    broken: tuple[str, ...] = ()  # The bounds that it breaks, a line each
    known: str | None = None  # Why it is known to break them; None if it is not

    @property
    def fails(self) -> bool:
        """Whether it breaks a bound that it is not known to break."""
        return bool(self.broken) and self.known is None

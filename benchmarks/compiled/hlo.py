"""Reads what a compiled program does from the text of its HLO."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping

HOST_SPACE = 5
"""The number that XLA gives to the host's memory: ``S(5)`` in a layout."""

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
    "send",
    "recv",
)

# They name, order or take apart what other operations have computed.
_NO_WORK = {
    "after-all",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
_NO_WORK_TARGETS = {
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "ConcatBitcast",
    "Sharding",
    "annotate_device_placement",
}
# Loop counters and the like: no operation on blocks is as small.
_SCALAR_BYTES = 64

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_START = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_CALLED = re.compile(r"\b(?:to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|\w+_computation=(\S+))")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """The shape of an array."""

    dtype: str  # XLA's name of the type of its elements, such as ``"bf16"``
    dims: tuple[int, ...]  # Its dimensions
    # XLA's number of the memory that it is in; 0 is the device's main memory,
    # `HOST_SPACE` the host's.
    memory_space: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, without padding."""
        return math.prod(self.dims) * _element_bits(self.dtype) // 8

    @property
    def on_host(self) -> bool:
        return self.memory_space == HOST_SPACE


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a computation."""

    name: str  # Its name, without ``%``
    opcode: str  # What it does, such as ``"fusion"``
    shapes: tuple[ArrayShape, ...]  # The arrays of its result
    operands: tuple[str, ...]  # Names of the operations that it reads
    attributes: str  # The rest of the line
    is_root: bool  # Whether it is the result of the computation

    @property
    def works(self) -> bool:
        """Whether it does work on the device, rather than to name or order."""
        if self.opcode in _NO_WORK or self.opcode.endswith("-done"):
            return False
        if self.opcode == "custom-call":
            return self.target not in _NO_WORK_TARGETS
        return True

    @property
    def target(self) -> str:
        """The target of a custom call; empty for other operations."""
        match = _TARGET.search(self.attributes)
        return match[1] if match else ""

    @property
    def is_copy(self) -> bool:
        """Whether it copies an array as a whole."""
        return self.opcode in ("copy", "copy-start")


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    # The operations of each computation, by its name
    computations: Mapping[str, tuple[Operation, ...]]
    entry: str  # Name of the computation that runs first

    @classmethod
    def parse(cls, text: str) -> Module:
        """Read the text of a module."""
        computations: dict[str, tuple[Operation, ...]] = {}
        entry = current = ""
        operations: list[Operation] = []
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current, operations = head[2], []
                entry = current if head[1] else entry
            elif line.startswith("}"):
                computations[current] = tuple(operations)
            elif operation := _parse_operation(line):
                operations.append(operation)
        if not entry:
            raise ValueError(f"{text[:80]!r} has no entry computation.")
        return cls(computations, entry)

    def executed(self) -> Iterator[tuple[Operation, int | None]]:
        """Yield every operation that is run by itself, and how often.

        What is inside a fusion is left out: it is one operation. Times are None in a
        loop whose trip count the compiler does not know.
        """
        yield from self._executed(self.entry, 1)

    def _executed(
        self, name: str, times: int | None
    ) -> Iterator[tuple[Operation, int | None]]:
        for operation in self.computations.get(name, ()):
            yield operation, times
            if operation.opcode == "while":
                trips = trip_count(operation)
                inner = None if times is None or trips is None else times * trips
                yield from self._executed(_found(_BODY, operation), inner)
            elif operation.opcode == "call":
                yield from self._executed(_found(_CALLED, operation), times)
            elif operation.opcode == "conditional":
                for match in _BRANCHES.finditer(operation.attributes):
                    for branch in _words(match[1] or match[2]):
                        yield from self._executed(branch, times)

    @functools.cached_property
    def _by_name(self) -> dict[str, Operation]:
        return {
            operation.name: operation
            for operations in self.computations.values()
            for operation in operations
        }

    def operand_shapes(self, operation: Operation) -> list[ArrayShape]:
        operands = (self._by_name.get(name) for name in operation.operands)
        return [shape for operand in operands if operand for shape in operand.shapes]

    def in_place(self, operation: Operation) -> bool:
        """Return whether an operation writes its result into one of its operands."""
        attributes = operation.attributes
        if '"aliasing_operands":{"lists":[' in attributes:
            # XLA:TPU says so of each fusion.
            return '"aliasing_operands":{"lists":[]' not in attributes
        if "output_to_operand_aliasing={{" in attributes:
            return True
        # Where the operand is still needed, XLA has put a copy before these.
        return self._updates(operation)

    def _updates(self, operation: Operation) -> bool:
        if operation.opcode in ("scatter", "dynamic-update-slice"):
            return True
        if operation.opcode in ("bitcast", "tuple"):
            made = [self._by_name.get(name) for name in operation.operands]
            return bool(made) and all(
                op is not None and self._updates(op) for op in made
            )
        if operation.opcode == "fusion":
            fused = self.computations.get(_found(_CALLED, operation), ())
            return any(op.is_root and self._updates(op) for op in fused)
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Census:
    """The counted operations of a program."""

    # Operations that run on the device, a loop's body once. Copies between memories,
    # which the copy engines do, are not among them.
    kernels: int
    host_copies: int  # Copies between host and device, a loop's body once
    # Bytes that they move; in a loop without a known trip count, of one turn
    host_bytes: int
    collectives: tuple[str, ...]  # The collectives, by opcode
    loops: int  # The loops
    unknown_loops: int  # Those whose trip count the compiler does not know
    # Operations on a whole leaf that are not in place: opcode, or name of the fusion
    whole_leaf: tuple[str, ...]


def take_census(
    text: str,
    leaf_bytes: Collection[int],
    extent_dims: Collection[tuple[int, ...]] = (),
) -> Census:
    module = Module.parse(text)
    spared = {_dims_key(dims) for dims in extent_dims}
    kernels = host_copies = host_bytes = loops = unknown_loops = 0
    collectives: list[str] = []
    whole_leaf: list[str] = []
    for operation, times in module.executed():
        if operation.opcode == "while":
            loops += 1
            unknown_loops += trip_count(operation) is None
        if operation.opcode.removesuffix("-start") in COLLECTIVES:
            collectives.append(operation.opcode.removesuffix("-start"))
        if not operation.works:
            continue
        crossing = _crossing_bytes(module, operation)
        if crossing:
            host_copies += 1
            host_bytes += crossing * (1 if times is None else times)
        kernels += not (crossing and operation.opcode != "fusion") and _is_kernel(
            operation
        )
        if any(
            shape.num_bytes in leaf_bytes and _dims_key(shape.dims) not in spared
            for shape in operation.shapes
        ) and not module.in_place(operation):
            whole_leaf.append(_label(operation))
    return Census(
        kernels=kernels,
        host_copies=host_copies,
        host_bytes=host_bytes,
        collectives=tuple(sorted(collectives)),
        loops=loops,
        unknown_loops=unknown_loops,
        whole_leaf=tuple(sorted(whole_leaf)),
    )


def trip_count(loop: Operation) -> int | None:
    """Return how often a loop runs; None if the compiler does not know."""
    match = _TRIPS.search(loop.attributes)
    return int(match[1]) if match else None


def _is_kernel(operation: Operation) -> bool:
    """Return whether work within the device's memories is done by its cores."""
    if not operation.is_copy:
        return True
    num_bytes = max((shape.num_bytes for shape in operation.shapes), default=0)
    return operation.opcode == "copy" and num_bytes > _SCALAR_BYTES


def _crossing_bytes(module: Module, operation: Operation) -> int:
    """Return the bytes that an operation moves between host and device."""
    read = module.operand_shapes(operation)
    sides = {shape.on_host for shape in (*read, *operation.shapes) if shape.dims}
    if len(sides) < 2:
        return 0
    arrays = [shape.num_bytes for shape in operation.shapes if shape.dims]
    if operation.opcode.startswith("dynamic-update-slice"):
        # The array itself stays where it is; the second operand goes into it.
        update = module.operand_shapes(operation)[1:2]
        return sum(shape.num_bytes for shape in update)
    if operation.is_copy:
        return max(arrays, default=0)
    # A kernel that reads or writes the host's memory: what it makes, at most.
    on_device = [s.num_bytes for s in (*read, *operation.shapes) if not s.on_host]
    on_host = [s.num_bytes for s in (*read, *operation.shapes) if s.on_host]
    return min(sum(on_device), sum(on_host))


def _label(operation: Operation) -> str:
    if "cross_program_prefetch_index" in operation.attributes:
        return "prefetch"
    if operation.opcode == "fusion":
        return re.sub(r"[.\d]+$", "", operation.name)
    return operation.target or operation.opcode


def _dims_key(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Make a key that transposes and dimensions of 1 do not change."""
    return tuple(sorted(size for size in dims if size != 1))


def _parse_operation(line: str) -> Operation | None:
    start = _START.match(line)
    if start is None:
        return None
    rest = line[start.end() :]
    # A tuple's shape holds blanks; an array's does not.
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opcode, bracket, _ = rest.partition("(")
    if not bracket:
        return None
    close = _closing(rest, len(opcode))
    operands, attributes = rest[len(opcode) + 1 : close], rest[close + 1 :]
    return Operation(
        start[2],
        opcode,
        tuple(_array(match) for match in _ARRAY.finditer(result)),
        tuple(_NAME.findall(operands)),
        attributes,
        bool(start[1]),
    )


def _closing(text: str, opening: int) -> int:
    """Find the bracket that closes the one at `opening`."""
    depth = 0
    for match in re.finditer(r"[()]", text[opening:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return opening + match.start()
    raise ValueError(f"{text[:80]!r} has a bracket that nothing closes.")


def _array(match: re.Match[str]) -> ArrayShape:
    dims = tuple(int(size) for size in match[2].split(",") if size)
    space = _SPACE.search(match[3] or "")
    return ArrayShape(match[1], dims, int(space[1]) if space else 0)


def _element_bits(dtype: str) -> int:
    if dtype in ("pred", "token"):
        return 8 if dtype == "pred" else 0
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else 0


def _found(pattern: re.Pattern[str], operation: Operation) -> str:
    match = pattern.search(operation.attributes)
    return match[1] if match else ""


def _words(names: str) -> list[str]:
    return [name.strip(" %,") for name in names.split(",")]

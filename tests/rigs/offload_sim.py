"""Contents of blocks, and workers that move them on command.

The content of a block is the group of layers and the prefix of tokens up to the last
one written into it: two blocks have the same bytes if these are the same. Any other
content is a unique number.
"""

import dataclasses
import hashlib
import itertools
from collections import deque

from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput
from jaxkv.search.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from jaxkv.types import NO_BLOCK, NULL_BLOCK

_numbers = itertools.count()


def garbage():
    """Unknown bytes."""
    return next(_numbers)


class Prefixes:
    """Prefixes of tokens as numbers; 0 is the empty one."""

    def __init__(self):
        self._children = {}
        self.parents = [0]
        self.lengths = [0]
        self._keys = {}

    def extend(self, prefix, token):
        child = self._children.get((prefix, token))
        if child is None:
            child = self._children[prefix, token] = len(self.parents)
            self.parents.append(prefix)
            self.lengths.append(self.lengths[prefix] + 1)
        return child

    def is_part(self, prefix, longer):
        """Whether a prefix is a prefix of another."""
        while self.lengths[longer] > self.lengths[prefix]:
            longer = self.parents[longer]
        return longer == prefix

    def key(self, content, length=32):
        """The key of a full block."""
        key = self._keys.get(content)
        if key is None:
            key = hashlib.sha256(repr(content).encode()).digest()[:length]
            self._keys[content] = key
        return key


def first_read(spec, num_tokens):
    """The first block that the next token reads."""
    match spec:
        case FullAttention():
            return 0
        case SlidingWindow(block_size, window):
            return max(num_tokens - window + 1, 0) // block_size
        case ChunkedLocal(block_size, chunk):
            return num_tokens // chunk * chunk // block_size
        case Mamba(block_size):
            return max(num_tokens - 1, 0) // block_size


def longest_prefix(specs, counts, has, max_tokens, step):
    """The longest prefix for which every group has what the next token reads.

    Args:
        specs: The groups.
        counts: Full blocks of each.
        has: Whether a block of a group is available.
        max_tokens: Maximum tokens of the prefix.
        step: Its length is a multiple of this.
    """
    for num_tokens in range(max(max_tokens, 0) // step * step, 0, -step):
        if all(
            num_tokens // spec.block_size <= counts[g]
            and all(
                has(g, index)
                for index in range(
                    first_read(spec, num_tokens), num_tokens // spec.block_size
                )
            )
            for g, spec in enumerate(specs)
        ):
            return num_tokens
    return 0


@dataclasses.dataclass(eq=False)
class Sent:
    """A transfer in flight: pairs of rows of device blocks and a host block."""

    name: object
    rows: list
    contents: list


class SimWorker:
    """A worker's part of the bytes: starts transfers at once and ends them later.

    A store may read its device blocks until it ends, and its host blocks are unreadable
    until then; a load likewise in the other direction. Each direction ends in order.
    What is given a host block last has it, whatever ends later.
    """

    def __init__(self, num_device_blocks, num_host_blocks, factor):
        self.device = [garbage() for _ in range(num_device_blocks)]
        self.host = [(garbage(),) * factor for _ in range(num_host_blocks)]
        self.stores = deque()
        self.loads = deque()
        self._factor = factor
        self._report = {}
        self._owners = {}  # Of host blocks: what was given them last.

    def give(self, host_blocks, owner):
        """Give host blocks to what is to write them; their bytes are gone."""
        for host in host_blocks:
            self._owners[host] = owner
            self.host[host] = (garbage(),) * self._factor

    def fill(self, host, owner, content):
        """Write a host block, unless another was given it."""
        if self._owners[host] is owner:
            self.host[host] = content

    def being_read(self):
        """Device blocks that stores read."""
        return {b for sent in self.stores for row, _ in sent.rows for b in row}

    def being_written(self):
        """Device blocks that loads write."""
        return {b for sent in self.loads for row, _ in sent.rows for b in row}

    def write(self, block, content):
        """Write blocks, as the model does."""
        assert block != NULL_BLOCK, "the null block is written"
        assert block not in self.being_read(), f"{block} is overwritten while stored"
        assert block not in self.being_written(), f"{block} is written while loaded"
        self.device[block] = content

    def read(self, block):
        """Read blocks, as the model or a copy does."""
        assert block not in self.being_written(), f"{block} is read while loaded"
        return self.device[block]

    def start(self, meta):
        """Start the transfers of a step, as `jaxkv.scheduling.worker` does."""
        if meta.need_flush:
            self.drain()
        if meta.store_event != NO_EVENT:
            rows = self._rows(meta.store_device_blocks, meta.store_host_blocks)
            contents = [tuple(map(self.read, blocks)) for blocks, _ in rows]
            hosts = [host for _, host in rows]
            assert len(set(hosts)) == len(hosts)
            read = [host for sent in self.loads for _, host in sent.rows]
            assert not set(hosts) & set(read), "a host block is stored while loaded"
            self.stores.append(Sent(meta.store_event, rows, contents))
            self.give(hosts, self.stores[-1])
        sources, targets = meta.copy_from_blocks, meta.copy_to_blocks
        assert len(set(targets)) == len(targets)
        assert not set(targets) & set(sources)
        for source, target in zip(sources, targets, strict=True):
            self.write(target, self.read(source))
        if meta.load_event != NO_EVENT:
            rows = [
                ([block for block in blocks if block != NO_BLOCK], host)
                for blocks, host in self._rows(
                    meta.load_device_blocks, meta.load_host_blocks
                )
            ]
            contents = []
            all_rows = self._rows(meta.load_device_blocks, meta.load_host_blocks)
            for blocks, host in all_rows:
                pairs = zip(blocks, self.host[host], strict=True)
                contents.append([c for b, c in pairs if b != NO_BLOCK])
            written = [block for blocks, _ in rows for block in blocks]
            assert len(set(written)) == len(written)
            for block in written:
                self.write(block, garbage())
            names = meta.load_event_to_reqs[meta.load_event]
            self.loads.append(Sent(names, rows, contents))

    def end_store(self, ok):
        """End the oldest store; its source must not have changed since its start."""
        sent = self.stores.popleft()
        for (blocks, host), contents in zip(sent.rows, sent.contents, strict=True):
            assert tuple(self.device[block] for block in blocks) == contents
            self.fill(host, sent, contents if ok else (garbage(),) * self._factor)
        name = "completed_store_events" if ok else "failed_store_events"
        self._report.setdefault(name, []).append(sent.name)

    def end_load(self, ok):
        """End the oldest load; its source must not have changed since its start."""
        sent = self.loads.popleft()
        for (blocks, host), contents in zip(sent.rows, sent.contents, strict=True):
            assert set(contents) <= set(self.host[host])
            for block, content in zip(blocks, contents, strict=True):
                self.device[block] = content if ok else garbage()
        name = "finished_recving" if ok else "failed_recving"
        self._report.setdefault(name, []).extend(sent.name)

    def drain(self):
        """End all transfers successfully."""
        while self.stores:
            self.end_store(ok=True)
        while self.loads:
            self.end_load(ok=True)

    def report(self):
        """Return what ended since the last call."""
        report, self._report = self._report, {}
        return ConnectorOutput(**{name: tuple(own) for name, own in report.items()})

    def _rows(self, device_blocks, host_blocks):
        factor = self._factor
        assert len(device_blocks) == factor * len(host_blocks)
        return [
            (device_blocks[row * factor : (row + 1) * factor], host)
            for row, host in enumerate(host_blocks)
        ]

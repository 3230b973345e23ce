"""The namespaces of a store, counted from one listing."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxkv._util import one_line, shown
from jaxkv.tools.console import OnProgress
from jaxkv.tools.usage import CommandError, UsageError
from jaxkv.transfer.storage import BlobStore, LocalStore, StoreError, open_store
from jaxkv.transfer.storage.objects import (
    BLOCK_NAME,
    BOUND_NAME,
    HEADER_BYTES,
    LABEL_NAME,
    ORDER_NAME,
    ROOT,
    object_bytes_of,
)
from jaxkv.transfer.storage.store import SizedStore, TimedStore, can_list, listed_names
from jaxkv.transfer.storage.store_url import StoreUrl

_NAME = re.compile(rf"{ROOT}/[0-9a-f]{{32}}/(.+)")
_MAX_SAMPLES = 8  # Blocks that are tried for the size of a block
_MAX_NAMESPACES = 10_000
_MAX_SHOWN = 300


@dataclass
class Namespace:
    """The objects of a namespace."""

    name: str
    num_objects: Counter[int] = field(default_factory=Counter)  # Blocks, by shard
    num_records: int = 0  # Limits and the order of blocks
    samples: list[str] = field(default_factory=list)  # Names of some blocks
    num_bytes: int | None = 0  # Of all shards of all blocks; None if unknown
    is_estimated: bool = False  # Whether that is from some blocks alone
    used_us: int | None = None  # When an object was last used; None if unknown
    limit: int | None = None  # The largest recorded number of blocks
    owner_limit: int | None = None  # The owner's, which overrides others
    label: str = ""  # What an engine says of the blocks

    @property
    def num_blocks(self) -> int:
        """Blocks of the shard that has the fewest."""
        return min(self.num_objects.values(), default=0)

    @property
    def folder(self) -> str:
        return f"{ROOT}/{self.name}"

    @property
    def age_s(self) -> float | None:
        """Seconds since an object was written or, if recorded, read."""
        if self.used_us is None:
            return None
        return max(0.0, time.time() - self.used_us / 1e6)

    def add(self, name: str, rest: str) -> None:
        if match := BLOCK_NAME.fullmatch(rest):
            self.num_objects[int(match[3])] += 1
            if len(self.samples) < _MAX_SAMPLES:
                self.samples.append(name)
            return
        self.num_records += 1
        if match := LABEL_NAME.fullmatch(rest):
            self.label = one_line(bytes.fromhex(match[1]).decode("utf-8", "replace"))
        if match := BOUND_NAME.fullmatch(rest):
            num_blocks = int(match[2])
            if match[1] == "owner":
                self.owner_limit = max(num_blocks, self.owner_limit or 0)
            else:
                self.limit = max(num_blocks, self.limit or 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "namespace": self.folder,
            "label": self.label,
            "blocks": self.num_blocks,
            "objects": self.num_objects.total(),
            "shards": len(self.num_objects),
            "bytes": self.num_bytes,
            "bytes_are_estimated": self.is_estimated,
            "last_used_s_ago": self.age_s,
            "limit_blocks": self.owner_limit or self.limit,
            "limit_is_owners": self.owner_limit is not None,
        }


@contextlib.contextmanager
def opened(text: str) -> Iterator[BlobStore]:
    """Open an existing store that can list; a failure is an error in one line."""
    try:
        url = StoreUrl.parse(text)
        if url.is_folder and not os.path.isdir(url.path):
            raise UsageError(f"URL: there is no folder {shown(url.shown)}")
        if url.scheme == "memory":
            raise UsageError(
                f"URL: {shown(url.shown)} is the memory of another process"
            )
        store = open_store(text)
    except (ValueError, ImportError, StoreError) as error:
        why = one_line(str(error)).removeprefix("storage=")
        kind = UsageError if isinstance(error, ValueError) else CommandError
        raise kind(f"URL: {why[:_MAX_SHOWN]}") from error
    with contextlib.closing(store):
        if not can_list(store):
            raise UsageError(f"URL: {shown(store.url)} cannot list its objects")
        try:
            yield store
        except StoreError as error:
            why = one_line(str(error))[:_MAX_SHOWN]
            raise CommandError(
                f"URL: {shown(store.url)} fails ({error.kind}): {why}"
            ) from error


def read_namespaces(
    store: BlobStore, on_progress: OnProgress, folder: str = ROOT
) -> list[Namespace]:
    """List a store, and return its namespaces, the last used first."""
    namespaces: dict[str, Namespace] = {}
    seen: set[int] = set()  # Hashes of names: a listing may repeat some.
    on_progress(f"listing {store.url}", 0, 0)
    for names in listed_names(store, folder):
        fresh: list[tuple[str, Namespace]] = []
        for name in names:
            if not _is_ours(name) or hash(name) in seen:
                continue
            seen.add(hash(name))
            _, folder_name, rest = name.split("/", 2)
            namespace = namespaces.setdefault(folder_name, Namespace(folder_name))
            namespace.add(name, rest)
            if len(namespaces) > _MAX_NAMESPACES:
                why = f"it has over {_MAX_NAMESPACES:,} namespaces"
                raise StoreError("other", why)
            fresh.append((name, namespace))
        _record_times(store, fresh)
        _record_sizes(store, fresh)
    if not isinstance(store, SizedStore):
        for namespace in namespaces.values():
            _estimate_size(store, namespace)
    by_name = sorted(namespaces.values(), key=lambda namespace: namespace.name)
    return sorted(by_name, key=lambda namespace: -(namespace.used_us or 0))


def removable_names(store: BlobStore, namespace: str) -> Iterator[list[str]]:
    """Yield the names of a namespace's objects; files of others stay."""
    for names in listed_names(store, f"{ROOT}/{namespace}"):
        yield [name for name in names if _is_ours(name)]


def _is_ours(name: str) -> bool:
    """Whether a block or a record has this name."""
    rest = match[1] if (match := _NAME.fullmatch(name)) else ""
    patterns = BLOCK_NAME, BOUND_NAME, LABEL_NAME
    return rest == ORDER_NAME or any(pattern.fullmatch(rest) for pattern in patterns)


def _record_times(store: BlobStore, fresh: list[tuple[str, Namespace]]) -> None:
    if not (isinstance(store, TimedStore) and fresh):
        return
    times = store.times([name for name, _ in fresh])
    for (_, namespace), used_us in zip(fresh, times or (), strict=False):
        namespace.used_us = max(used_us, namespace.used_us or 0) or None


def _record_sizes(store: BlobStore, fresh: list[tuple[str, Namespace]]) -> None:
    """Add the bytes of blocks as they are; objects may be cut or planted."""
    blocks = [(name, owner) for name, owner in fresh if name[-1].isdigit()]
    blocks = [row for row in blocks if BLOCK_NAME.fullmatch(row[0].split("/", 2)[2])]
    if not (isinstance(store, SizedStore) and blocks):
        return
    sizes = store.sizes([name for name, _ in blocks])
    for (_, namespace), num_bytes in zip(blocks, sizes, strict=True):
        namespace.num_bytes = (namespace.num_bytes or 0) + (num_bytes or 0)


def _estimate_size(store: BlobStore, namespace: Namespace) -> None:
    """Take the size of a namespace's blocks from the headers of some."""
    if not namespace.samples:
        return
    headers = store.get(namespace.samples, HEADER_BYTES)
    sizes = [
        object_bytes_of(header)
        for header in headers
        if header is not None and not isinstance(header, StoreError)
    ]
    num_bytes = max((size for size in sizes if size is not None), default=None)
    namespace.is_estimated = num_bytes is not None
    if num_bytes is not None:
        num_bytes *= namespace.num_objects.total()
    namespace.num_bytes = num_bytes


def unread_folders(store: BlobStore, folder: str = ROOT) -> list[str]:
    """List the folders at and below a folder that this user cannot read.

    The listing of a store skips them.
    """
    if not isinstance(store, LocalStore):
        return []
    unread: list[str] = []
    folders = [folder]
    while folders:
        name = folders.pop()
        try:
            with os.scandir(os.path.join(store.path, name)) as entries:
                # Blocks lie in the third folder: ROOT/NAMESPACE/XX.
                if name.count("/") < 2:
                    folders += [
                        f"{name}/{entry.name}"
                        for entry in entries
                        if entry.is_dir(follow_symlinks=False)
                    ]
        except FileNotFoundError:
            continue
        except OSError:
            unread.append(name)
    return sorted(unread)


def count_left(store: BlobStore, namespace: str) -> tuple[int | None, list[str]]:
    """Count a namespace's objects, None if unknown; list its unreadable folders."""
    unread = unread_folders(store, f"{ROOT}/{namespace}")
    try:
        return sum(map(len, removable_names(store, namespace))), unread
    except StoreError:
        return None, unread

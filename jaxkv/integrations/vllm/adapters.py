"""Marks that identify the weights of an adapter, for the keys of its blocks.

vLLM's hashes have an adapter's name and path. Both stay when it is trained again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from typing import Any, NamedTuple

from jaxkv.integrations import weights
from jaxkv.integrations.vllm.pool import MARK_BYTES, PRIVATE_END

_LOG = logging.getLogger("jaxkv")

# A file that changes twice within a tick of its file system's clock has the same times.
_TICK_NS = 2 * 10**9

# Name, size, times of change in ns, and inode of each file.
_Stamp = tuple[tuple[str, int, int, int, int], ...]


class _Folder(NamedTuple):
    stamp: _Stamp
    is_settled: bool
    mark: bytes | None


class Adapters:
    """Reads the weights of adapters' folders, again only if their files change.

    If blocks outlive the process (`has_storage`), a mark is private if the files have
    changed since the process began.
    """

    def __init__(self, has_storage: bool = False) -> None:
        self._has_storage = has_storage
        self._since_s = weights.process_started_s() or 0.0
        self._folders: dict[str, _Folder] = {}

    def mark(self, lora: Any) -> bytes | None:
        """Return bytes[MARK_BYTES] for the keys of the blocks of a `LoRARequest`.

        Other weights have another mark. None if the weights cannot be read here.
        """
        path = os.path.expanduser(str(getattr(lora, "lora_path", "")))
        if not os.path.isdir(path):
            hub_folder = weights.hub_folder_of(os.environ)
            snapshot = weights.snapshot_of(path, "main", hub_folder)
            if snapshot is None:
                return None
            path = str(snapshot)
        now_ns = time.time_ns()
        stamp = _stamp(path)
        folder = self._folders.get(path)
        if folder is None or folder.stamp != stamp or not folder.is_settled:
            changed_ns = max((ctime_ns for *_, ctime_ns, _ in stamp), default=now_ns)
            is_settled = changed_ns < now_ns - _TICK_NS
            folder = _Folder(stamp, is_settled, self._mark(path, stamp, folder))
            self._folders[path] = folder
        return folder.mark

    def _mark(self, path: str, stamp: _Stamp, last: _Folder | None) -> bytes | None:
        try:
            if self._has_storage:
                try:
                    about = weights.describe_weights(path, read_since_s=self._since_s)
                    return hashlib.sha256(json.dumps(about).encode()).digest()
                except (weights.UnknownWeightsError, OSError) as error:
                    if last is None or last.stamp != stamp:
                        _LOG.warning(
                            "blocks of an adapter are not stored until the next start: "
                            "%s",
                            error,
                        )
            about = weights.describe_weights(path)
        except (weights.UnknownWeightsError, OSError):
            return None
        text = json.dumps([about, stamp]).encode()
        digest = hashlib.sha256(text).digest()
        return digest[: MARK_BYTES - len(PRIVATE_END)] + PRIVATE_END


def _stamp(path: str) -> _Stamp:
    """Return the times and sizes of a folder's files; () if it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return tuple(
                sorted(
                    (entry.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
                    for entry in entries
                    for s in (entry.stat(),)
                )
            )
    except OSError:
        return ()

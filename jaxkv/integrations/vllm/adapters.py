"""Marks that tell the weights of an adapter apart, for the keys of its blocks.

vLLM's hashes have an adapter's name and path. Both stay when it is trained again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from typing import Any, NamedTuple

from jaxkv.integrations.vllm.pool import MARK_BYTES, PRIVATE_END
from jaxkv.integrations.weights import (
    UnknownWeightsError,
    describe_weights,
    hub_folders_of,
    process_started_s,
    snapshot_of,
)

_LOG = logging.getLogger("jaxkv")

# A file that changes twice within a tick of its file system's clock has the same times.
_TICK_NS = 2 * 10**9

# Name, size, times of change in ns, and inode of each file.
_Stamp = tuple[tuple[str, int, int, int, int], ...]


class _Look(NamedTuple):
    stamp: _Stamp
    is_settled: bool
    mark: bytes | None


class Adapters:
    """Reads which weights an adapter's folder has, anew only if its files change.

    Args:
        has_storage: Whether blocks outlive the process. A mark is then private if the
            files have changed since the process began.
    """

    def __init__(self, has_storage: bool = False) -> None:
        self._has_storage = has_storage
        self._since_s = process_started_s() or 0.0
        self._looks: dict[str, _Look] = {}

    def mark(self, lora: Any) -> bytes | None:
        """Return what follows in the keys of an adapter's blocks, `MARK_BYTES` bytes.

        Args:
            lora: vLLM's `LoRARequest`.

        Returns:
            A different one for other weights; None if they cannot be read here.
        """
        path = os.path.expanduser(str(getattr(lora, "lora_path", "")))
        if not os.path.isdir(path):
            snapshot = snapshot_of(path, "main", hub_folders_of(os.environ))
            if snapshot is None:
                return None
            path = str(snapshot)
        now_ns = time.time_ns()
        stamp = _stamp(path)
        look = self._looks.get(path)
        if look is None or look.stamp != stamp or not look.is_settled:
            changed_ns = max((ctime_ns for *_, ctime_ns, _ in stamp), default=now_ns)
            is_settled = changed_ns < now_ns - _TICK_NS
            look = _Look(stamp, is_settled, self._mark(path, stamp, look))
            self._looks[path] = look
        return look.mark

    def _mark(self, path: str, stamp: _Stamp, last: _Look | None) -> bytes | None:
        try:
            if self._has_storage:
                try:
                    about = describe_weights(path, read_since_s=self._since_s)
                    return hashlib.sha256(json.dumps(about).encode()).digest()
                except (UnknownWeightsError, OSError) as error:
                    if last is None or last.stamp != stamp:
                        _LOG.warning(
                            "blocks of an adapter stay out of the store until the next "
                            "start: %s",
                            error,
                        )
            about = describe_weights(path)
        except (UnknownWeightsError, OSError):
            return None
        text = json.dumps([about, stamp]).encode()
        digest = hashlib.sha256(text).digest()
        return digest[: MARK_BYTES - len(PRIVATE_END)] + PRIVATE_END


def _stamp(path: str) -> _Stamp:
    """Return what changes with a folder's files; () if it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return tuple(
                sorted(
                    (
                        entry.name,
                        stat.st_size,
                        stat.st_mtime_ns,
                        stat.st_ctime_ns,
                        stat.st_ino,
                    )
                    for entry in entries
                    for stat in (entry.stat(),)
                )
            )
    except OSError:
        return ()

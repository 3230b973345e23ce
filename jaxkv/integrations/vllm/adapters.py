"""Which weights an adapter has, for keys of blocks that outlive the process.

vLLM's hashes have an adapter's name and its path. Both stay when it is trained again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import Any

from jaxkv.integrations.vllm.pool import PRIVATE
from jaxkv.integrations.weights import (
    UnknownWeightsError,
    describe_weights,
    process_started_s,
)

_LOG = logging.getLogger("jaxkv")

_Stamp = tuple[tuple[str, int, int], ...]


class Adapters:
    """Tells what follows in the keys of an adapter's blocks.

    Blocks of an adapter whose files may not be what was loaded get a mark that keeps
    them in this process: its folder is not here, or has changed since it began.
    """

    def __init__(self) -> None:
        self._since_s = process_started_s() or 0.0
        self._known: dict[str, tuple[_Stamp, bytes]] = {}

    def suffix(self, lora: Any) -> bytes:
        """Return what follows in the keys of a request's blocks.

        Args:
            lora: vLLM's `LoRARequest`; None for a request without an adapter.
        """
        if lora is None:
            return b""
        path = str(getattr(lora, "lora_path", ""))
        stamp = _stamp(path)
        found = self._known.get(path)
        if found is None or found[0] != stamp:
            found = stamp, self._digest(path)
            self._known[path] = found
        return found[1]

    def _digest(self, path: str) -> bytes:
        try:
            if not os.path.isdir(path):
                raise UnknownWeightsError(f"{path!r} is no folder here")
            about = describe_weights(path, read_since_s=self._since_s)
        except (UnknownWeightsError, OSError) as error:
            _LOG.warning(
                "blocks of an adapter stay out of the store until the next start: %s",
                error,
            )
            return PRIVATE
        return hashlib.sha256(json.dumps(about).encode()).digest()


def _stamp(path: str) -> _Stamp:
    """Tell whether a folder has changed; () if there is none."""
    try:
        with os.scandir(path) as entries:
            return tuple(
                sorted(
                    (entry.name, stat.st_size, stat.st_ctime_ns)
                    for entry in entries
                    for stat in (entry.stat(),)
                )
            )
    except OSError:
        return ()

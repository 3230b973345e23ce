"""A file of the reuse that `hazard` has learned, for a restarted engine.

It has counts of how soon blocks of each class of requests were used again. It has
neither keys nor hashes of keys: what the policy knows about single blocks is not kept.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxkv._util import read_file, shown
from jaxkv._util.outage import OutageLog
from jaxkv.policies import reuse
from jaxkv.policies.hazard import NUM_CLASSES, HazardState
from jaxkv.policies.registry import AUTO
from jaxkv.policies.reuse import MAX_COUNT, NUM_BINS, UNIT, ReuseTable
from jaxkv.scheduling.checks import is_multi_process
from jaxkv.scheduling.listening import End, Listener
from jaxkv.scheduling.whatif.what_if import WhatIf
from jaxkv.tiers.index import BlockIndex

SAVE_EVERY_MS = 600_000

_FORMAT = "jaxkv policy state 1"
_MAX_BYTES = 1 << 22

_LOG = logging.getLogger("jaxkv")


class PolicyStateFile(Listener):
    """Reads the statistics of an earlier process, and writes what `learned` returns.

    `learned` must not refer to the scheduler, so that it can be freed.
    """

    def __init__(
        self,
        path: str,
        num_host_blocks: int,
        block_size: int,
        learned: Callable[[], ReuseTable],
    ) -> None:
        self._path = os.path.realpath(path)
        self._facts = {
            "format": _FORMAT,
            "policy": "hazard",
            "host_blocks": num_host_blocks,
            "block_size": block_size,
            "unit": UNIT,
        }
        self.learned = learned
        self._next_ms: int | None = None
        name = f"policy_state={shown(self._path)}"
        texts = f"{name} cannot be written", f"{name} is written"
        self._outage = OutageLog(_LOG, *texts)

    def read(self) -> ReuseTable | None:
        """Return the statistics in the file; None if there is no file yet."""
        try:
            content = read_file(self._path, _MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            why = f"policy_state={shown(self._path)} cannot be read ({error.strerror})"
            raise OSError(error.errno, f"{why}; name another file") from None
        if content is None:
            raise self._error("is not a plain file")
        try:
            fields = json.loads(content, object_pairs_hook=_distinct)
            facts = {name: fields.pop(name) for name in self._facts}
            touches = _counts(fields.pop("touches"), (NUM_CLASSES,))
            reuses = _counts(fields.pop("reuses"), (NUM_CLASSES, NUM_BINS))
            if fields:
                raise ValueError("unknown fields")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise self._error("is incomplete or not a policy state") from None
        wrong = {
            name: fact for name, fact in facts.items() if fact != self._facts[name]
        }
        if wrong:
            right = {name: self._facts[name] for name in wrong}
            raise self._error(f"has {shown(wrong)}, but must have {right}")
        return reuse.from_counts(touches, reuses)

    def finished(self, end: End) -> None:
        """Save the statistics if `SAVE_EVERY_MS` have passed."""
        now_ms = end.now_ms()
        if self._next_ms is None:
            self._next_ms = now_ms + SAVE_EVERY_MS
        if now_ms >= self._next_ms:
            self._next_ms = now_ms + SAVE_EVERY_MS
            self.save()

    def save(self) -> None:
        """Replace the file by one with the current statistics, atomically."""
        table = self.learned()
        columns = {"touches": table.touches, "reuses": table.reuses}
        counts = {name: np.asarray(column).tolist() for name, column in columns.items()}
        draft = f"{self._path}.{secrets.token_hex(8)}"
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(fd, "w", encoding="ascii") as file:
                    file.write(json.dumps(self._facts | counts))
                os.replace(draft, self._path)
            except BaseException:
                os.unlink(draft)
                raise
        except OSError as error:
            self._outage.begin(error)
        else:
            self._outage.end()

    def _error(self, why: str) -> ValueError:
        return ValueError(
            f"policy_state={shown(self._path)} {why}: remove it, or name another file."
        )


def open_policy_state(path: str, host: BlockIndex, what_if: WhatIf) -> PolicyStateFile:
    """Open the file of a host tier; restore the tier's statistics from it."""
    if not isinstance(host.executor.state.policy, HazardState):
        raise ValueError(
            f"policy_state={shown(path)} needs cache_policy='hazard' or {AUTO!r}, "
            "without retention: no other policy has statistics to keep."
        )
    if is_multi_process():
        raise ValueError(
            f"policy_state={shown(path)} is for one process: several would begin with "
            "different statistics, and evict different blocks."
        )
    file = PolicyStateFile(path, host.num_blocks, host.block_size, what_if.learned)
    learned = file.read()
    if learned is not None:
        what_if.resume(learned)
    return file


def _counts(listed: Any, shape: tuple[int, ...]) -> Any:
    """Return a list of counts as i32[shape]; raise ValueError if it is invalid."""
    counts = np.array(listed, object)
    if counts.shape != shape or any(type(count) is not int for count in counts.flat):
        raise ValueError("not an array of counts")
    # These are Python ints, whose sum cannot wrap around.
    if min(counts.flat) < 0 or sum(counts.flat) > 2 * MAX_COUNT:
        raise ValueError("counts out of range")
    return counts.astype(np.int32)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field occurs more than once")
    return fields

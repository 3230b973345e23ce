"""A file of the reuse that `hazard` has learned, for a restarted engine.

It has counts of how soon blocks of each class of requests were used again. It has
neither keys nor hashes of keys: what the policy knows about single blocks is not kept.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxkv._util import shown
from jaxkv._util.files import read_file, replace_file, resolved
from jaxkv._util.outage import OutageLog
from jaxkv.policies import reuse
from jaxkv.policies.hazard import HazardState
from jaxkv.policies.reuse import ReuseTable
from jaxkv.scheduling.checks import is_multi_process
from jaxkv.scheduling.listening import End, Listener
from jaxkv.tiers.index import BlockIndex
from jaxkv.transfer.storage.store import StoreError
from jaxkv.transfer.storage.workers import DaemonThread

SAVE_EVERY_MS = 600_000

_FORMAT = 5
_FACTS = "format", "host_blocks", "block_size"
_COLUMNS = "num_rows", "codes", "parents", "begins", "touches", "reuses"
_MAX_BYTES = 1 << 19
_CLOSE_TIMEOUT_S = 10.0

_LOG = logging.getLogger("jaxkv")

Columns = Mapping[str, Any]  # Arrays by name.


class PolicyStateFile(Listener):
    """Reads the statistics of an earlier process, and writes what `learned` returns.

    A thread writes, because a file system may be slow. `learned` must not refer to the
    scheduler, so that it can be freed.
    """

    def __init__(
        self,
        path: str,
        num_host_blocks: int,
        block_size: int,
        learned: Callable[[], ReuseTable],
    ) -> None:
        self._path = path
        facts = (_FORMAT, num_host_blocks, block_size)
        self._facts = dict(zip(_FACTS, np.array(facts, np.int64), strict=True))
        self.learned = learned
        self._next_ms: int | None = None
        self._thread = DaemonThread("jaxkv policy state")
        self.has_written = threading.Event()  # No write is queued or running.
        self.has_written.set()
        self._pid = os.getpid()
        name = f"policy_state={shown(self._path)}"
        texts = f"{name} cannot be written", f"{name} is written"
        self._outage = OutageLog(_LOG, *texts)

    def read(self) -> ReuseTable | None:
        """Return the statistics in the file; None if there is no file yet."""
        try:
            self._path = resolved(self._path)
            content = read_file(self._path, _MAX_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # A name may contain a null.
            number, why = getattr(error, "errno", 0), getattr(error, "strerror", error)
            text = f"policy_state={shown(self._path)} cannot be read ({why})"
            raise OSError(number, f"{text}; name another file") from None
        if content.startswith(b'{"format": "jaxkv policy state 1"'):
            raise self._error(f"has format=1, but must have {_FORMAT}")
        empty = reuse.init()
        columns = {name: getattr(empty, name) for name in _COLUMNS}
        unreadable = self._error("is incomplete or not a policy state")
        try:
            read = _read_columns(content, self._facts)
        except Exception:  # `zipfile` and the decoders that it calls raise any.
            raise unreadable from None
        for name, value in self._facts.items():
            if read[name] != value:
                raise self._error(f"has {name}={read[name]}, but must have {value}")
        try:
            read = _read_columns(content, columns)
            if not 1 <= read["num_rows"] <= reuse.NUM_ROWS:
                raise ValueError
            return reuse.restored(**read)
        except Exception:
            raise unreadable from None

    def finished(self, end: End) -> None:
        """Save the statistics if `SAVE_EVERY_MS` have passed."""
        now_ms = end.now_ms()
        if self._next_ms is None:
            self._next_ms = now_ms + SAVE_EVERY_MS
        if now_ms >= self._next_ms:
            self._next_ms = now_ms + SAVE_EVERY_MS
            self.save()

    def save(self) -> None:
        """Have the thread replace the file by one with the current statistics.

        If it is still writing, the statistics are saved the next time.
        """
        if self.has_written.is_set() and os.getpid() == self._pid:
            self._submit()

    def close(self) -> None:
        """Save the statistics; wait for the file system for 10 s at most."""
        if os.getpid() != self._pid:
            return  # The file belongs to the parent process.
        if self.has_written.wait(_CLOSE_TIMEOUT_S / 2):
            self._submit(is_last=True)
        self._thread.close()
        if not self.has_written.wait(_CLOSE_TIMEOUT_S / 2):
            self._outage.begin("the file system is too slow")

    def _submit(self, is_last: bool = False) -> None:
        table = self.learned()
        # Copies, which later steps do not change.
        columns = {name: np.array(getattr(table, name)) for name in _COLUMNS}
        write = partial(self._write, self._facts | columns)
        self.has_written.clear()
        try:
            self._thread.submit(write)
        except StoreError as error:
            if is_last:  # The interpreter is ending, and starts no threads.
                write()
            else:
                self.has_written.set()
                self._outage.begin(error)

    def _write(self, columns: Columns) -> None:
        try:
            file = io.BytesIO()
            np.savez(file, **columns)
            replace_file(self._path, file.getvalue())
        except Exception as error:  # The thread must go on.
            self._outage.begin(error)
        else:
            self._outage.end()
        finally:
            self.has_written.set()

    def _error(self, why: str) -> ValueError:
        return ValueError(
            f"policy_state={shown(self._path)} {why}: remove it, or name another file."
        )


def open_policy_state(path: str, host: BlockIndex) -> PolicyStateFile:
    """Open the file of a host tier; restore the tier's statistics from it."""
    if not isinstance(host.executor.state.policy, HazardState):
        raise ValueError(
            f"policy_state={shown(path)} needs cache_policy='hazard', "
            "without retention: no other policy has statistics to keep."
        )
    if is_multi_process():
        raise ValueError(
            f"policy_state={shown(path)} is for one process: several would begin with "
            "different statistics, and evict different blocks."
        )

    def learned() -> ReuseTable:
        state = host.executor.state.policy
        assert isinstance(state, HazardState)
        return state.reuse

    file = PolicyStateFile(path, host.num_blocks, host.block_size, learned)
    earlier = file.read()
    if earlier is not None:
        host.resume(earlier)
    return file


def _read_columns(content: bytes, like: Columns) -> Columns:
    """Read the arrays of an ``.npz`` that have the same dtypes and shapes as `like`.

    No number in the file decides how much memory is allocated.
    """
    read = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name, array in like.items():
            file = io.BytesIO()
            np.save(file, array)
            num_bytes = len(file.getvalue())
            head = file.getvalue()[: num_bytes - array.nbytes]
            data = archive.open(f"{name}.npy").read(num_bytes + 1)
            if len(data) != num_bytes or not data.startswith(head):
                raise ValueError(name)
            flat = np.frombuffer(data, array.dtype, offset=len(head))
            read[name] = flat.reshape(array.shape)
    return read

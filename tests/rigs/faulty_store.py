"""A store that goes wrong in every way that its protocol lets it."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Iterator

from jaxkv.transfer.storage import BlobStore, StoreError
from jaxkv.transfer.storage.store import Lanes, can_list


@dataclasses.dataclass
class Faults:
    """The probability of each fault, from 0 to 1; may be changed at any time."""

    error: float = 0.0  # A call fails.
    raising: float = 0.0  # A whole call raises.
    hang: float = 0.0  # A call is never answered, until `FaultyStore.let_go`.
    late: float = 0.0  # A call is answered only after `late_s`.
    late_s: float = 0.02
    cut: float = 0.0  # What is read is cut somewhere.
    flip: float = 0.0  # What is read has a flipped bit.
    longer: float = 0.0  # What is read has more at its end.
    swap: float = 0.0  # What is read is the object of another name.
    junk: float = 0.0  # What is read is nothing of ours.
    lose: float = 0.0  # What was there is gone when it is read.
    tear: float = 0.0  # What is written is cut, and the write succeeds.


class FaultyStore:
    """Forwards calls to another store, with faults by seed and call order."""

    lanes = Lanes(16, 16)

    def __init__(self, inner: BlobStore, seed: int, faults: Faults | None = None):
        self.inner = inner
        self.faults = faults or Faults()
        self.num_faults = dict.fromkeys(vars(Faults()), 0)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._held: list[threading.Event] = []
        self._names: dict[str, None] = {}

    @property
    def url(self) -> str:
        return f"faulty+{self.inner.url}"

    @property
    def can_list(self) -> bool:
        return can_list(self.inner)

    def get(self, names, max_bytes):
        self._begin(names)
        for name in names:
            if self._happens("lose"):
                self.inner.delete([name])
        with self._lock:
            self._names.update(dict.fromkeys(names))
        answers = self.inner.get(list(map(self._swapped, names)), max_bytes)
        return [self._answer(self._damaged(data)) for data in answers]

    def put(self, items):
        self._begin(items)
        with self._lock:
            self._names.update((name, None) for name, _ in items)
        blobs = [(name, self._torn(blob)) for name, blob in items]
        return list(map(self._answer, self.inner.put(blobs)))

    def exists(self, names):
        self._begin(names)
        return list(map(self._answer, self.inner.exists(names)))

    def delete(self, names):
        self._begin(names)
        return list(map(self._answer, self.inner.delete(names)))

    def list(self, folder) -> Iterator[list[str]]:
        for page in self.inner.list(folder):
            if self._happens("error"):
                raise StoreError("other", "injected into a list")
            yield page

    def times(self, names):
        return self.inner.times(names)

    def close(self) -> None:
        self.inner.close()

    @property
    def num_hanging(self) -> int:
        with self._lock:
            return len(self._held)

    def let_go(self) -> int:
        """Answer the hanging calls; return their number."""
        with self._lock:
            held, self._held = self._held, []
        for hanging in held:
            hanging.set()
        return len(held)

    def _happens(self, what: str) -> bool:
        with self._lock:
            happens = self._random.random() < getattr(self.faults, what)
            self.num_faults[what] += happens
            return happens

    def _below(self, number: int) -> int:
        with self._lock:
            return self._random.randrange(number)

    def _begin(self, items) -> None:
        """Raise, hang or take long."""
        if self._happens("raising"):
            raise StoreError("other", "injected into a call")
        hanging = [threading.Event() for _ in items if self._happens("hang")]
        with self._lock:
            self._held += hanging
        for event in hanging:
            event.wait()
        if self._happens("late"):
            time.sleep(self.faults.late_s)

    def _answer(self, answer):
        return StoreError("other", "injected") if self._happens("error") else answer

    def _swapped(self, name: str) -> str:
        with self._lock:
            candidates = [n for n in self._names if n != name]
        if candidates and self._happens("swap"):
            return candidates[self._below(len(candidates))]
        return name

    def _damaged(self, data):
        if data is None:
            return None
        damaged = bytearray(data)
        if self._happens("cut"):
            del damaged[self._below(len(damaged) + 1) :]
        if damaged and self._happens("flip"):
            place = self._below(8 * len(damaged))
            damaged[place // 8] ^= 1 << place % 8
        if self._happens("longer"):
            damaged += b"more"
        if self._happens("junk"):
            damaged = bytearray(b"something else")
        return memoryview(bytes(damaged))

    def _torn(self, blob):
        if not self._happens("tear"):
            return blob
        whole = b"".join(blob)
        return [whole[: self._below(len(whole) + 1)]]

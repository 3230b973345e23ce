"""A store that goes wrong in every way that its protocol lets it."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from jaxkv.transfer.storage import BlobStore, StoreError
from jaxkv.transfer.storage.store import can_list


@dataclasses.dataclass
class Faults:
    """How often each thing happens, from 0 to 1; may be changed at any time."""

    error: float = 0.0  # A call fails.
    raising: float = 0.0  # A whole call raises, rather than its futures.
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
    """Hands calls on to another store, with faults by a seed and the order of calls."""

    def __init__(self, inner: BlobStore, seed: int, faults: Faults | None = None):
        self.inner = inner
        self.faults = faults or Faults()
        self.num_faults = dict.fromkeys(vars(Faults()), 0)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._held: list[Callable[[], None]] = []
        self._names: dict[str, None] = {}

    @property
    def url(self) -> str:
        return f"faulty+{self.inner.url}"

    @property
    def can_list(self) -> bool:
        return can_list(self.inner)

    def get(self, names, max_bytes):
        self._raise()
        for name in names:
            if self._happens("lose"):
                self.inner.delete([name])[0].result()
        with self._lock:
            self._names.update(dict.fromkeys(names))
        asked = [self._swapped(name) for name in names]
        futures = self.inner.get(asked, max_bytes)
        return [self._through(future, self._damaged) for future in futures]

    def put(self, items):
        self._raise()
        with self._lock:
            self._names.update((name, None) for name, _ in items)
        blobs = [(name, self._torn(blob)) for name, blob in items]
        return [self._through(future) for future in self.inner.put(blobs)]

    def exists(self, names):
        self._raise()
        return [self._through(future) for future in self.inner.exists(names)]

    def delete(self, names):
        self._raise()
        return [self._through(future) for future in self.inner.delete(names)]

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
        """Calls that `let_go` would answer."""
        with self._lock:
            return len(self._held)

    def let_go(self) -> int:
        """Answer what hangs; return how many calls that were."""
        with self._lock:
            held, self._held = self._held, []
        for answer in held:
            answer()
        return len(held)

    def _happens(self, what: str) -> bool:
        with self._lock:
            happens = self._random.random() < getattr(self.faults, what)
            self.num_faults[what] += happens
            return happens

    def _below(self, number: int) -> int:
        with self._lock:
            return self._random.randrange(number)

    def _raise(self) -> None:
        if self._happens("raising"):
            raise StoreError("other", "injected into a call")

    def _through(self, theirs: Future, change=lambda result: result) -> Future:
        ours: Future = Future()
        fails = self._happens("error")

        def answer() -> None:
            error = StoreError("other", "injected") if fails else theirs.exception()
            if error is not None:
                ours.set_exception(error)
            else:
                ours.set_result(change(theirs.result()))

        def later(_: Future) -> None:
            if self._happens("hang"):
                with self._lock:
                    self._held.append(answer)
            elif self._happens("late"):
                timer = threading.Timer(self.faults.late_s, answer)
                timer.daemon = True
                timer.start()
            else:
                answer()

        theirs.add_done_callback(later)
        return ours

    def _swapped(self, name: str) -> str:
        with self._lock:
            others = [other for other in self._names if other != name]
        if others and self._happens("swap"):
            return others[self._below(len(others))]
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


class FaultyDirectStore(FaultyStore):
    """The same for a store that works in threads of the caller's, as a folder does."""

    num_threads = 4

    def read(self, name, max_bytes):
        return self.get([name], max_bytes)[0].result()

    def write(self, name, blob):
        self.put([(name, blob)])[0].result()

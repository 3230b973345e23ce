"""Calls of a store that are to succeed, or to fail."""

from jaxkv.transfer.storage import StoreError
from jaxkv.transfer.storage.store import answers_of


def put(store, blobs):
    for answer in store.put([(name, [blob]) for name, blob in blobs.items()]):
        assert answer is None


def get(store, *names, max_bytes=1 << 30):
    blobs = answers_of(store.get(names, max_bytes))
    return [None if data is None else bytes(data) for data in blobs]


def exists(store, *names):
    return answers_of(store.exists(names))


def delete(store, *names):
    assert list(store.delete(names)) == [None] * len(names)


def listed(store, folder):
    return sorted({name for page in store.list(folder) for name in page})


def errors_of(call):
    """Return the kinds of error of a call, raised or answered; None for success."""
    return {getattr(error, "kind", None) for error in outcomes(call)}


def outcomes(call):
    """Return what a call answers, or what it raises."""
    try:
        return list(call())
    except StoreError as error:
        return [error]


def write_error(store, name="a", blob=b"x"):
    [kind] = errors_of(lambda: store.put([(name, [blob])]))
    return kind


def read_error(store, *names):
    """Return how all of some reads failed."""
    [kind] = errors_of(lambda: store.get(names or ["a"], 1 << 30))
    return kind

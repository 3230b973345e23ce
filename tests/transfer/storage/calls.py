"""Calls of a store, waited for."""

WAIT_S = 60


def put(store, blobs):
    for future in store.put([(name, [blob]) for name, blob in blobs.items()]):
        future.result(WAIT_S)


def get(store, *names, max_bytes=1 << 30):
    found = [future.result(WAIT_S) for future in store.get(names, max_bytes)]
    return [None if data is None else bytes(data) for data in found]


def exists(store, *names):
    return [future.result(WAIT_S) for future in store.exists(names)]


def delete(store, *names):
    for future in store.delete(names):
        assert future.result(WAIT_S) is None


def listed(store, folder):
    return sorted({name for page in store.list(folder) for name in page})


def errors_of(futures):
    return {future.exception(WAIT_S).kind for future in futures}


def write_error(store, name="a", blob=b"x"):
    """Return how a write failed."""
    [kind] = errors_of(store.put([(name, [blob])]))
    return kind


def read_error(store, *names):
    """Return how all of some reads failed."""
    [kind] = errors_of(store.get(names or ["a"], 1 << 30))
    return kind

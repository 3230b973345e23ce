"""S3 and Google Cloud Storage, by tensorstore."""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxkv._util import one_line, shown
from jaxkv._util.extras import pip_install
from jaxkv.transfer.storage.store import (
    Blob,
    ErrorKind,
    Lanes,
    Piece,
    StoreError,
    answers_of,
    attempt,
    check_name,
)
from jaxkv.transfer.storage.store_url import StoreUrl

# Computing is faster than more retries; the default of tensorstore is 32.
_RETRIES = {"max_retries": 3, "initial_delay": "100ms", "max_delay": "1s"}
_MAX_SHOWN = 200
_SIZE = re.compile("size ([0-9]+)")
# HTTP's "insufficient storage", and the quota of a bucket.
_FULL = re.compile("http_response_code='507'|QuotaExceeded: ")
_MAX_LISTS = 16  # At once
_KINDS: Mapping[str, ErrorKind] = {
    "RESOURCE_EXHAUSTED": "full",
    "PERMISSION_DENIED": "denied",
    "UNAUTHENTICATED": "denied",
    "UNAVAILABLE": "unreachable",
    "ABORTED": "unreachable",
    "DEADLINE_EXCEEDED": "unreachable",
}


class TensorStoreStore:
    """A store in a key-value store of tensorstore.

    `spec` is its JSON, whose path ends in ``/``; `url` is for messages. ImportError:
    tensorstore is missing. ValueError: tensorstore refuses the specification.
    """

    lanes = Lanes(readers=8, writers=8, call_bytes=4 << 20)

    def __init__(self, spec: Mapping[str, Any], url: str) -> None:
        self._ts = _import()
        self._url = url
        fault = ""
        try:
            self._store = self._ts.KvStore.open(dict(spec)).result()
        except (ValueError, NotImplementedError) as error:
            fault = error_text(error)
        if fault:  # Without the error, which may contain a password.
            raise ValueError(f"storage={shown(url)}: {fault}")

    @property
    def url(self) -> str:
        return self._url

    def get(
        self, names: Sequence[str], max_bytes: int
    ) -> list[Piece | StoreError | None]:
        """Read objects; an object shorter than `max_bytes` takes a second request."""
        # tensorstore refuses a range beyond the object's end. Without a range, it would
        # read a planted object of any size.
        whole = slice(0, max_bytes)
        reads = [self._store.read(check_name(n), byte_range=whole) for n in names]
        return [
            attempt(self._value, name, read, max_bytes, convert=_error_of)
            for name, read in zip(names, reads, strict=True)
        ]

    def put(self, items: Sequence[tuple[str, Blob]]) -> list[StoreError | None]:
        # tensorstore accepts only bytes.
        writes = [self._store.write(check_name(n), b"".join(blob)) for n, blob in items]
        return [attempt(_wait_for, write, convert=_error_of) for write in writes]

    def exists(self, names: Sequence[str]) -> list[bool | StoreError]:
        """Return whether each object exists, by reading a byte of it."""
        return [
            data if isinstance(data, StoreError) else data is not None
            for data in self.get(names, 1)
        ]

    def delete(self, names: Sequence[str]) -> list[StoreError | None]:
        deletes = [self._store.write(check_name(name), None) for name in names]
        return [attempt(_wait_for, delete, convert=_error_of) for delete in deletes]

    def list(self, folder: str) -> Iterator[list[str]]:
        # A request to S3 lists 1,000 objects and needs the last name of the one before,
        # so several ranges of names are listed at once.
        start = f"{check_name(folder)}/"
        bounds = [start, *(f"{start}{n:02x}" for n in range(1, 256)), f"{folder}0"]
        ranges = collections.deque(itertools.pairwise(bounds))
        open_lists: collections.deque[Any] = collections.deque()
        failures: list[StoreError] = []
        while ranges or open_lists:
            while ranges and len(open_lists) < _MAX_LISTS:
                part = self._ts.KvStore.KeyRange(*ranges.popleft())
                open_lists.append(self._store.list(part))
            answer = attempt(open_lists.popleft().result, convert=_error_of)
            if isinstance(answer, StoreError):
                failures.append(answer)  # Raised once the other ranges are listed.
                if len(failures) == _MAX_LISTS:
                    break
            elif answer:
                yield [name.decode("ascii", "replace") for name in answer]
        answers_of(failures)

    def _value(self, name: str, read: Any, max_bytes: int) -> Piece | None:
        """Wait for a read; read an object shorter than `max_bytes` again."""
        try:
            result = read.result()
        except Exception as error:
            if not str(error).startswith("OUT_OF_RANGE"):
                raise
            if max_bytes == 1:
                return b""
            size = _SIZE.search(str(error))
            # The message has no size if the object is empty.
            num_bytes = int(size[1]) if size else 1
            if num_bytes >= max_bytes:
                raise
            again = self._store.read(name, byte_range=slice(0, num_bytes))
            return self._value(name, again, num_bytes)
        return None if result.state == "missing" else bytes(result.value)

    def close(self) -> None:
        """Close nothing: tensorstore releases unused resources."""


def open_s3(url: StoreUrl) -> TensorStoreStore:
    """Open ``s3://BUCKET/PREFIX``.

    Without options in the URL, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION and
    AWS_DEFAULT_REGION apply, as for the AWS tools.
    """
    bucket, path = _bucket_and_path(url)
    environ = os.environ
    endpoint = (
        url.options.get("endpoint")
        or environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
    )
    region = (
        url.options.get("region")
        or environ.get("AWS_REGION")
        or environ.get("AWS_DEFAULT_REGION")
    )
    spec: dict[str, Any] = {
        "driver": "s3",
        "bucket": bucket,
        "path": path,
        "context": {"s3_request_retries": _RETRIES},
    }
    if endpoint:
        spec["endpoint"] = endpoint.rstrip("/")
        region = region or "us-east-1"
    if region:
        spec["aws_region"] = region
    if environ.get("AWS_ACCESS_KEY_ID"):
        # Otherwise tensorstore writes to stderr that there are no AWS files.
        spec["aws_credentials"] = {"type": "environment"}
    return TensorStoreStore(spec, url.shown)


def open_gs(url: StoreUrl) -> TensorStoreStore:
    """Open ``gs://BUCKET/PREFIX``."""
    bucket, path = _bucket_and_path(url)
    spec = {
        "driver": "gcs",
        "bucket": bucket,
        "path": path,
        "context": {"gcs_request_retries": _RETRIES},
    }
    return TensorStoreStore(spec, url.shown)


def error_text(error: BaseException) -> str:
    """Shorten a message of tensorstore to the server's answer."""
    text = re.sub(r"\s*\[[a-z_-]+='.*", "", str(error), flags=re.DOTALL)
    text = re.sub(r"//[^\s/@]*@", "//", text)  # An endpoint may have a password.
    return one_line(text)[:_MAX_SHOWN]


def _import() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise ImportError(
            f"Storage in S3 or Google Cloud needs tensorstore: {pip_install('storage')}"
        ) from error
    return tensorstore


def _bucket_and_path(url: StoreUrl) -> tuple[str, str]:
    [(bucket, _)], path = url.nodes, url.path.strip("/")
    return bucket, f"{path}/" if path else ""


def _wait_for(write: Any) -> None:
    write.result()


def _error_of(error: BaseException) -> StoreError:
    text = error_text(error)
    kind = _KINDS.get(text.partition(":")[0], "other")
    return StoreError("full" if _FULL.search(str(error)) else kind, text)

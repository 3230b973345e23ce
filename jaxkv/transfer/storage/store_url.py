"""URLs of stores: checked before anything is opened, shown without secrets.

A typo may move a password to any place. A URL is therefore shown up to the first
character that no host, path or known option has, and "..." stands for the rest.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from jaxkv._util import did_you_mean, shown

_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
_HOST = r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])"
_NODE = rf"{_HOST}(?::[0-9]{{1,5}})?"
_LOCAL = "(?:localhost)?"
_NODES = f"{_NODE}(?:,{_NODE})*"


class _Scheme(NamedTuple):
    """The form of the URLs of a scheme."""

    form: str  # For a message
    host: str  # A pattern of the hosts, or of the bucket
    # A pattern of the path, or of the beginning of it that is shown.
    path: str = r"[\w./~$+,() -]*"
    is_free: bool = True  # Whether a path may go on with other characters
    options: tuple[str, ...] | None = ()  # None: the store checks them.
    extra: str | None = None  # The extra of jaxkv that the store needs


_SERVER = _Scheme(
    "{}://HOST:PORT/DB, the port and the DB numbers",
    *(_NODE, "(?:/[0-9]*/?)?", False, None, "redis"),
)
_CLUSTER = _SERVER._replace(
    form="{}://HOST:PORT, or several nodes: HOST:PORT,HOST:PORT", host=_NODES, path="/?"
)
_SCHEMES: Mapping[str, _Scheme] = {
    "file": _Scheme(
        "file:///PATH, with ?mode=660 or the like if others than its owner may use "
        "it, and %23 for # in a name",
        _LOCAL,
        options=("mode",),
    ),
    "s3": _Scheme(
        "s3://BUCKET/PREFIX with ?endpoint= and ?region=, the bucket of at least 3 "
        "letters",
        r"[\w.-]+",
        options=("endpoint", "region"),
        extra="storage",
    ),
    "gs": _Scheme("gs://BUCKET/PREFIX", r"[\w.-]+", extra="storage"),
    "redis": _SERVER,
    "rediss": _SERVER,
    "redis+cluster": _CLUSTER,
    "rediss+cluster": _CLUSTER,
    "unix": _Scheme("unix:///PATH of a socket", _LOCAL, options=None, extra="redis"),
    "memory": _Scheme("memory://NAME", r"[\w.-]*"),
}
SCHEMES = tuple(_SCHEMES)
# Of a store of another package, which checks its own options.
_REGISTERED = _Scheme("{}://HOST:PORT/PATH", _NODES, options=None)
_UNKNOWN = _Scheme("", _NODES, "(?:/[0-9]*/?)?")
_HINTS: Mapping[str, str] = {  # For names that other programs give the same stores.
    **dict.fromkeys(("s3a", "s3n"), "did you mean s3?"),
    **dict.fromkeys(("valkeys", "redis+ssl", "redis+tls"), "did you mean rediss?"),
    "gcs": "did you mean gs?",
    "valkey": "did you mean redis?",
    "redis+unix": "did you mean unix?",
    "http": "a service like S3 is s3://BUCKET/PREFIX?endpoint=http://HOST:PORT.",
    "https": "a service like S3 is s3://BUCKET/PREFIX?endpoint=https://HOST.",
}

_MAX_LETTERS = 2000
_QUOTES = "\"'`"
_KNOWN = "|".join(map(re.escape, sorted(SCHEMES, key=len, reverse=True)))
# Quotes, and an assignment as in a file of environment variables.
_WRAPPING = re.compile(
    rf"([{_QUOTES}]*(?:-*[A-Za-z_][\w.-]*=(?=[{_QUOTES}]*(?:[./~$]|{_SCHEME}:)))?"
    rf"[{_QUOTES}]*)(.*?)[{_QUOTES}]*",
    re.DOTALL,
)
_URL = re.compile(
    rf"((?:({_SCHEME})://|({_KNOWN})(?::/*|//+))?)([^?#]*)(.?)(.*)",
    re.DOTALL | re.IGNORECASE,
)
_HOST_PORT = re.compile(rf"({_HOST})(?::([0-9]{{1,5}}))?")
_CODED = re.compile("(?:%[0-9A-Fa-f]{2})+|.", re.DOTALL)
# Options, or a user with a password, in the path of a folder.
_NO_FOLDER = re.compile(r"[?&;]\s*\w+\s*=|:.*@")
_VALUE = re.compile(rf"(?:https?://)?{_NODE}/?")
_ENDPOINT = re.compile(rf"https?://(?:[^\s/?#@]*@)?{_NODE}(?:/[^?#]*)?")


def registered_store(scheme: str) -> EntryPoint | None:
    """Return the entry point that opens URLs of a scheme of another package, if any.

    It loads what returns a `BlobStore` for a `StoreUrl`, or raises a ValueError.
    """
    return next(iter(entry_points(group="jaxkv.stores", name=scheme)), None)


@dataclass(frozen=True)
class StoreUrl:
    """The checked URL of a store."""

    scheme: str  # A plain path has ``"file"``.
    shown: str  # The URL without secrets, for messages
    text: str = field(repr=False)  # The URL, its scheme in lower case
    # Hosts and ports, or the bucket
    nodes: tuple[tuple[str, int | None], ...] = field(default=(), repr=False)
    path: str = field(default="", repr=False)  # Decoded
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """Check the URL of a store, or the path of a folder.

        A ValueError names the value and its likely right form.
        """
        is_text = isinstance(text, str)  # Bytes may also contain a secret.
        url = _parse(text) if is_text else " must be a URL or the path of a folder"
        if isinstance(url, str):
            value = shown(shown_url(text)) if is_text else f"<{type(text).__name__}>"
            raise ValueError(f"storage={value}{url}{'' if url[-1] in '.?' else '.'}")
        return url

    @property
    def is_folder(self) -> bool:
        """Whether the store is a folder."""
        return self.scheme == "file"

    @property
    def is_bucket(self) -> bool:
        """Whether the store is a bucket, where each request costs money."""
        return self.scheme in ("s3", "gs")

    @property
    def is_cluster(self) -> bool:
        """Whether the store is a cluster of Redis servers."""
        return self.scheme.endswith("+cluster")

    @property
    def mode(self) -> int:
        """Permissions of the files of a folder."""
        return int(self.options.get("mode", "600"), 8)

    @property
    def probe_s(self) -> float:
        """Seconds that a request may wait for the store by default; 0 for a bucket."""
        return 0.0 if self.is_bucket else 0.005

    @property
    def extra(self) -> str | None:
        """The extra that the store needs."""
        return _SCHEMES.get(self.scheme, _REGISTERED).extra

    def hide(self, message: str) -> str:
        """Replace the secrets of this URL in a library's message."""
        for secret in self.secrets:
            edges = ("", "") if len(secret) > 5 else (r"(?<!\w)", r"(?!\w)")
            message = re.sub(re.escape(secret).join(edges), "...", message)
        return message


def shown_url(text: str) -> str:
    """Return any text without what would be a secret in a URL."""
    if not text or len(text) > _MAX_LETTERS:
        return text and "..."
    if not _folder_fault(text):
        return text
    wrapping, text = _split(_WRAPPING, text)
    start, url_scheme, nearly_scheme, place, mark, query = _split(_URL, text)
    start, scheme = wrapping + start, (url_scheme or nearly_scheme or "").lower()
    is_path = not scheme and re.match("[.~$]|/(?!/)", place) is not None
    form = _form_of("file" if is_path else scheme) or _UNKNOWN
    netloc, slash, path = ("", "", place) if is_path else place.partition("/")
    pairs = [pair.partition("=") for pair in query.split("&")] if mark == "?" else []
    names = form.options or ()
    has_options = bool(pairs) and pairs[0][0] in names
    host, path = netloc.rpartition("@")[2], slash + path
    # If @ follows any of / ? #, these may stand in a password.
    is_torn = "@" in _decoded(path + ("" if has_options else query))
    if is_torn or not re.fullmatch(form.host, host):
        return f"{start}..."
    safe = _safe_start(path, form.path)
    if safe != path:
        return f"{start}{host}{safe}..."
    if form.options is None or not mark:
        return f"{start}{host}{path}"
    known = [
        f"{name}={value if _VALUE.fullmatch(value) else '...'}"
        for name, _, value in pairs
        if name in names
    ]
    rest = ["..."] * (len(known) < len(pairs) or not pairs)
    return f"{start}{host}{path}{mark}{'&'.join(known + rest)}"


def _form_of(scheme: str) -> _Scheme | None:
    if scheme not in _SCHEMES and scheme and registered_store(scheme) is not None:
        return _REGISTERED
    return _SCHEMES.get(scheme)


def _safe_start(path: str, pattern: str) -> str:
    """Return the beginning of a path up to a character that may precede a secret."""
    coded = _CODED.findall(path)
    letters = [unicodedata.normalize("NFKC", unquote(code)) for code in coded]
    match = re.match(pattern, "".join(letters))
    end = match.end() if match else 0
    ends = itertools.accumulate(map(len, letters))
    return "".join(code for code, num in zip(coded, ends, strict=True) if num <= end)


def _decoded(text: str) -> str:
    """Decode a text however often it was encoded."""
    while (decoded := unquote(text)) != text:
        text = decoded
    return unicodedata.normalize("NFKC", text)


def _split(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    match = pattern.fullmatch(text)
    assert match is not None  # The patterns match any text.
    return match.groups()


def _folder_fault(text: str) -> str:
    """Return why a text must not be taken for the path of a folder."""
    if _NO_FOLDER.search(_decoded(text)):
        return " must be a URL to have options, such as file:///PATH?mode=660"
    if re.match(r"\.{0,2}/(?!/)", text) and "://" not in text:
        return ""
    if text[0] in "~$":
        return (
            " must be the path itself: ~ and variables are not replaced here; a folder "
            "of this name is one with ./ before it"
        )
    scheme = (_split(_URL, text)[2] or "").lower()
    if not scheme and not re.search(r"@|//|\\|^[^/]*[:=?&;#%]", text):
        return ""
    likely = text if re.fullmatch(rf"{_NODE}(?:/[0-9]*)?", text) else "HOST:PORT"
    likely = f"the scheme of a URL, such as redis://{likely}"
    if scheme:
        likely = f"{scheme}://{'/' * (scheme in ('file', 'unix'))} to be a URL"
    return f" must begin with {likely}, or with ./ to be a folder"


def _parse(text: str) -> StoreUrl | str:
    """Parse a text; return what is wrong with it, if anything is."""
    if not 0 < len(text) <= _MAX_LETTERS:
        return " must be a URL or the path of a folder"
    if not text.isprintable() or text != text.strip():
        return " must not have what cannot be printed, nor spaces around it"
    _, bare = _split(_WRAPPING, text)
    if bare != text and text[0] not in "./":
        return (
            " must be the URL or path alone, without quotes or a variable's name: did "
            f"you mean {shown(shown_url(bare))}?"
        )
    start, scheme, *_ = _split(_URL, text)
    if not scheme:
        return _folder_fault(text) or StoreUrl("file", text, text, path=text)
    scheme = scheme.lower()
    form = _form_of(scheme)
    if form is None:
        hint = _HINTS.get(scheme) or did_you_mean(scheme, SCHEMES)
        return f": unknown {shown(scheme)}: {hint}"
    text = f"{scheme}://{text[len(start) :]}"
    try:
        split = urlsplit(text)
    except ValueError:  # The error would show the URL.
        return " cannot be read"
    user, _, netloc = split.netloc.rpartition("@")
    nodes = tuple(
        (match[1].strip("[]"), int(match[2]) if match[2] else None)
        for match in _HOST_PORT.finditer(netloc)
    )
    pairs = [pair.partition("=") for pair in split.query.split("&") if pair]
    is_open, known = form.options is None, form.options or ()
    is_redis = form.extra == "redis"
    is_right = (
        (is_redis or not user)
        and "#" not in text
        and "@" not in split.path
        and ";" not in split.query
        and not re.search("[?&;]|://", _decoded(split.path))
        and re.fullmatch(form.host, netloc)
        and (form.host != _LOCAL or split.path)
        and (scheme != "s3" or len(netloc) > 2)
        and (form.is_free or re.fullmatch(form.path, split.path))
        and all(port is None or 0 < port < 1 << 16 for _, port in nodes)
        and all(mark if is_open else name in known for name, mark, _ in pairs)
        and (is_open or all(value for *_, value in pairs))
        and len({name for name, *_ in pairs}) == len(pairs)
    )
    if not is_right:
        hint = "; write / ? # @ & ; in a password as %2F %3F %23 %40 %26 %3B"
        is_hinted = "@" in text and not user
        return f" must be {form.form.format(scheme)}{hint if is_hinted else ''}"
    try:
        path = unquote(split.path, errors="strict")
    except UnicodeDecodeError:
        path = "\0"
    if not path.isprintable():
        return " must have a path that can be printed, in UTF-8"
    options = dict(parse_qsl(split.query, keep_blank_values=True))
    if form.options and (fault := _option_fault(options)):
        return f": {fault}"
    path = netloc + path if scheme == "memory" else path
    # A library may decode a value once more.
    values = [user.partition(":")[2]] * is_open
    values += [
        value
        for name, value in options.items()
        if is_open and (name == "password" or not value.isdigit())
    ]
    values += [*map(unquote, values), *map(_decoded, values)]
    secrets = tuple(filter(None, values))
    return StoreUrl(scheme, shown_url(text), text, nodes, path, options, secrets)


def _option_fault(options: Mapping[str, str]) -> str:
    """Return what is wrong with the value of an option."""
    if not re.fullmatch("0?6[0-6][0-6]", options.get("mode", "600")):
        return "mode= must be permissions of files such as 600 or 660"
    if not _ENDPOINT.fullmatch(options.get("endpoint", "http://host")):
        return "endpoint= must be http://HOST:PORT or https://HOST"
    return ""

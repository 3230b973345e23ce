"""URLs of stores: checked before anything is opened, shown without secrets.

The password of a malformed URL may stand anywhere in it. A message therefore shows only
what looks like a host, a port, a path or a known option, and "..." for the rest.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxkv._util import did_you_mean, shown
from jaxkv.transfer.storage.registered import registered_store

_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
_HOST = r"(?:[\w.-]+|\[[0-9A-Fa-f:.%]+\])"
_NODE = rf"{_HOST}(?::[0-9]{{1,5}})?"


class _Form(NamedTuple):
    """The form of the URLs of a scheme."""

    text: str  # The form, for a message
    place: str  # A pattern of hosts, or a bucket, and the path
    options: Sequence[str] | None = None  # None: the store checks its own options
    extra: str | None = None  # The extra of jaxkv that the store needs


_REDIS_TEXT = "{}://HOST:PORT/DB, the port and the DB numbers"
_CLUSTER_TEXT = "{}://HOST:PORT, or several nodes: HOST:PORT,HOST:PORT"
_SERVER, _CLUSTER = rf"{_NODE}(/[0-9]*/?)?", rf"{_NODE}(,{_NODE})*/?"
_PATH = "(localhost)?/.*"
_FORMS: Mapping[str, _Form] = {
    "file": _Form(
        "file:///PATH, with ?mode=660 or the like if others than its owner may use "
        "it, and %23 for # in a name",
        _PATH,
        ("mode",),
    ),
    "s3": _Form(
        "s3://BUCKET/PREFIX with ?endpoint= and ?region=, the bucket of at least 3 "
        "letters",
        r"[\w.-]{3,}(/.*)?",
        ("endpoint", "region"),
        "storage",
    ),
    "gs": _Form("gs://BUCKET/PREFIX", r"[\w.-]+(/.*)?", (), "storage"),
    "redis": _Form(_REDIS_TEXT, _SERVER, None, "redis"),
    "rediss": _Form(_REDIS_TEXT, _SERVER, None, "redis"),
    "redis+cluster": _Form(_CLUSTER_TEXT, _CLUSTER, None, "redis"),
    "rediss+cluster": _Form(_CLUSTER_TEXT, _CLUSTER, None, "redis"),
    "unix": _Form("unix:///PATH of a socket", _PATH, None, "redis"),
    "memory": _Form("memory://NAME", ".*"),
}
SCHEMES = tuple(_FORMS)
# Of a store of another package, which checks its own options.
_REGISTERED = _Form("{}://HOST:PORT/PATH", rf"{_NODE}(,{_NODE})*(/.*)?")
_BUCKET_SCHEMES = ("s3", "gs")
_REDIS_SCHEMES = tuple(name for name, form in _FORMS.items() if form.extra == "redis")
# Names that other programs give the same stores.
_ALIASES: Mapping[str, str] = {
    "s3a": "s3",
    "s3n": "s3",
    "gcs": "gs",
    "valkey": "redis",
    "valkeys": "rediss",
    "redis+ssl": "rediss",
    "redis+tls": "rediss",
    "redis+unix": "unix",
}

_MAX_LETTERS = 2000
_MAX_PORT = (1 << 16) - 1
_URL = re.compile(rf"({_SCHEME})://(.*)", re.DOTALL)
_HOST_PORT = re.compile(rf"({_HOST})(?::([0-9]{{1,5}}))?")
_NODES = re.compile(rf"{_NODE}(?:,{_NODE})*")
_BUCKET = re.compile(r"[\w.-]+")
_ENDPOINT = re.compile(rf"https?://(?:[^\s/?#@]*@)?{_NODE}(?:/[^?#]*)?")
_HOST_AND_PORT = re.compile(r"[\w.-]+:[0-9]{1,5}(?:/[0-9]*)?")
_KNOWN = "|".join(map(re.escape, sorted(SCHEMES, key=len, reverse=True)))
_NEARLY_URL = re.compile(rf"({_KNOWN})(?::/*|//+)(.*)", re.DOTALL | re.IGNORECASE)
_QUOTES = "\"'`"
# An assignment, as in a file of environment variables.
_ASSIGNMENT = re.compile(rf"^-*[A-Za-z_][\w.-]*=(?=[{_QUOTES}]*(?:[./~$]|{_SCHEME}:))")
_OPTION = re.compile(r"\?\w+=")
_PATH_AND_OPTION = re.compile(r"[&;]\w+=")
_HARMLESS = re.compile(r"[^:@?=&;#%]*", re.DOTALL)
_HARMLESS_PATH = re.compile(r"[\w./%+~-]*")
_USER_IN_PATH = re.compile(":.*@", re.DOTALL)
_HARMLESS_VALUE = re.compile(rf"(?:https?://)?{_NODE}/?")
# The part before the one that may contain a secret.
_START = re.compile(
    rf"([\s{_QUOTES}]*(?:{_ASSIGNMENT.pattern[1:]}[{_QUOTES}]*)?"
    rf"(?:(?:{_SCHEME})://|(?:{_KNOWN})(?::/*|//+))?)(.*)",
    re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True)
class StoreUrl:
    """The checked URL of a store."""

    scheme: str  # ``"file"`` for a plain path, too
    shown: str  # The URL without secrets, for messages
    text: str = field(repr=False)  # The URL, its scheme in lower case
    nodes: tuple[tuple[str, int | None], ...] = ()  # Hosts and ports, or the bucket
    path: str = ""  # Decoded
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)  # Not for messages

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """Check the URL of a store, or the path of a folder.

        A ValueError names the value and its likely right form.

        >>> StoreUrl.parse("file:///var/cache/kv?mode=660").path
        '/var/cache/kv'
        >>> StoreUrl.parse("localhost:6379")
        Traceback (most recent call last):
        ValueError: storage='localhost:6379' must begin with the scheme of a URL, such \
as redis://localhost:6379, or with ./ to be a folder.
        """
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_LETTERS:
            raise _refusal(text, " must be a URL or the path of a folder.")
        if not text.isprintable() or text != text.strip():
            raise _refusal(
                text, " must not have what cannot be printed, nor spaces around it."
            )
        match = _URL.fullmatch(text)
        fault = _wrapping_fault(text)
        if match is None:
            fault = fault or _folder_fault(text)
        if fault:
            raise _refusal(text, fault)
        if match is None:
            return cls("file", text, text, path=text)
        scheme = match[1].lower()
        if scheme not in _FORMS and registered_store(scheme) is None:
            raise _refusal(text, _scheme_fault(scheme))
        return _parse(scheme, f"{scheme}://{match[2]}")

    @property
    def is_folder(self) -> bool:
        """Whether the store is a folder."""
        return self.scheme == "file"

    @property
    def is_bucket(self) -> bool:
        """Whether the store is a bucket, where each request costs money."""
        return self.scheme in _BUCKET_SCHEMES

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
        """Seconds that a request may wait for the store by default; 0 for a bucket.

        >>> [StoreUrl.parse(text).probe_s for text in ("/var/cache/kv", "s3://bucket")]
        [0.005, 0.0]
        """
        return 0.0 if self.is_bucket else 0.005

    @property
    def extra(self) -> str | None:
        """The extra that the store needs.

        >>> StoreUrl.parse("redis://localhost").extra, StoreUrl.parse("kv").extra
        ('redis', None)
        """
        return _FORMS.get(self.scheme, _REGISTERED).extra

    def hide(self, message: str) -> str:
        """Replace the secrets of this URL in a library's message."""
        for secret in self.secrets:
            message = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "...", message)
        return message


def shown_url(text: str) -> str:
    """Return any text without what would be a secret in a URL.

    >>> shown_url("redis://me:secret@localhost:6379/0?password=secret")
    'redis://localhost:6379/0'
    >>> shown_url("s3://bucket/kv?region=eu"), shown_url("/var/cache/kv")
    ('s3://bucket/kv?region=eu', '/var/cache/kv')
    >>> shown_url("redis//:secret@localhost"), shown_url("redis://:secret")
    ('redis//localhost', 'redis://...')
    """
    if _HARMLESS.fullmatch(text) or (_is_explicit(text) and not _OPTION.search(text)):
        return text
    match = _START.fullmatch(text)
    assert match is not None
    start, rest = match.groups()
    scheme = start.strip(f"\t\n :/{_QUOTES}").rpartition("=")[2].strip(_QUOTES)
    return start + _shown_rest(scheme.lower(), rest.rstrip(_QUOTES))


def _shown_rest(scheme: str, rest: str) -> str:
    place, mark, options = rest.partition("?")
    pairs = [pair.partition("=") for pair in options.split("&") if pair]
    form = _FORMS.get(scheme)
    known_options = (form and form.options) or ()
    first_option = pairs[0][0] if pairs else ""
    if re.search("@|%40", options) and first_option not in known_options:
        return "..."  # The question mark stands in a password.
    host, slash, path = place.partition("/")
    host, dots = host.rpartition("@")[2], ""
    is_path = scheme in ("file", "unix", "") and not host and "://" not in path
    if _has_user(path, is_path and scheme != "unix"):
        host, slash, path = path.rpartition("@")[2].partition("/")
        dots, is_path = "...@", False
    is_bucket = scheme in _BUCKET_SCHEMES
    if host and not (_BUCKET if is_bucket else _NODES).fullmatch(host):
        return "..."
    if not (is_path or _HARMLESS_PATH.fullmatch(path)):
        path = "..."
    path, mark_of_fragment, _ = path.partition("#")
    path += mark_of_fragment and "#..."
    if scheme in _REDIS_SCHEMES:
        mark = options = ""
    else:
        options = "&".join(
            f"{name}={value if _HARMLESS_VALUE.fullmatch(value) else '...'}"
            if name in known_options
            else "..."
            for name, _, value in pairs
        )
    return f"{dots}{host}{slash}{path}{mark}{options}"


def _has_user(path: str, is_folder: bool) -> bool:
    """Whether a path seems to contain a user and a password."""
    return "@" in path and (not is_folder or _USER_IN_PATH.search(path) is not None)


def _refusal(text: object, why: str) -> ValueError:
    # A value of another type, such as bytes, may contain a secret, too.
    if not isinstance(text, str):
        return ValueError(f"storage=<{type(text).__name__}>{why}")
    return ValueError(f"storage={shown(shown_url(text))}{why}")


def _is_explicit(text: str) -> bool:
    """Whether the beginning of a text shows that it is a path."""
    is_path = text.startswith(("/", "./", "../")) and not text.startswith("//")
    return is_path and "://" not in text


def _wrapping_fault(text: str) -> str:
    """Refuse quotes or a variable's name around a URL or a path."""
    if _is_explicit(text) or _bare(text) == text:
        return ""
    return (
        " must be the URL or path alone, without quotes or a variable's name: did you "
        f"mean {shown(_bare(shown_url(text)))}?"
    )


def _bare(text: str) -> str:
    """Remove quotes, and the name of a variable before them."""
    return _ASSIGNMENT.sub("", text.strip(_QUOTES), count=1).strip(_QUOTES)


def _folder_fault(text: str) -> str:
    """Return why a text must not be taken for the path of a folder."""
    first = text.partition("/")[0]
    if _OPTION.search(text):
        return (
            " must be a URL to have options, such as file:///PATH?mode=660; %3F is a "
            "question mark in its path."
        )
    if _is_explicit(text):
        return ""
    if match := _NEARLY_URL.fullmatch(text):
        scheme = match[1].lower()
        start = "file:///" if scheme == "file" else f"{scheme}://"
        return (
            f" must begin with {start} to be a URL; a folder of this name is one with "
            "./ before it."
        )
    if text[0] in "~$":
        return (
            " must be the path itself: ~ and variables are not replaced here; a folder "
            "of this name is one with ./ before it."
        )
    if ":" in first or "@" in text or "//" in text or "\\" in text or "=" in first:
        likely = text if _HOST_AND_PORT.fullmatch(text) else "HOST:PORT"
        return (
            f" must begin with the scheme of a URL, such as redis://{likely}, or with "
            "./ to be a folder."
        )
    return ""


def _scheme_fault(scheme: str) -> str:
    if scheme in ("http", "https"):
        return (
            f": unknown {shown(scheme)}: a service like S3 is "
            f"s3://BUCKET/PREFIX?endpoint={scheme}://HOST:PORT."
        )
    alias = _ALIASES.get(scheme)
    hint = f"did you mean {alias}?" if alias else did_you_mean(scheme, SCHEMES)
    return f": unknown {shown(scheme)}: {hint}"


def _parse(scheme: str, text: str) -> StoreUrl:
    """Parse a URL of a known scheme."""
    if scheme == "memory":
        return StoreUrl(scheme, shown_url(text), text, path=text.partition("://")[2])
    try:
        split = urllib.parse.urlsplit(text)
    except ValueError:
        split = None
    if split is None:  # Not inside `except`: the error would show the URL.
        raise _refusal(text, " cannot be read.")
    user, _, netloc = split.netloc.rpartition("@")
    form, is_redis = _FORMS.get(scheme, _REGISTERED), scheme in _REDIS_SCHEMES
    nodes = tuple((host.strip("[]"), port) for host, port in _nodes(netloc))
    is_right = (
        (is_redis or not user)
        and "#" not in text
        and "://" not in netloc + split.path
        and not _has_user(split.path, scheme == "file")
        and not _PATH_AND_OPTION.search(split.path)
        and _are_options(form, split.query)
        and re.fullmatch(form.place, netloc + split.path, re.DOTALL)
        and all(port is None or 0 < port <= _MAX_PORT for _, port in nodes)
    )
    if not is_right:
        fault = f" must be {form.text.format(scheme)}"
        if "@" in text and not user:
            fault += "; write / ? # @ in a password or path as %2F %3F %23 %40"
        raise _refusal(text, f"{fault}.")
    try:
        path = urllib.parse.unquote(split.path, errors="strict")
    except UnicodeDecodeError:
        path = "\0"
    if not path.isprintable():
        raise _refusal(text, " must have a path that can be printed, in UTF-8.")
    options = dict(urllib.parse.parse_qsl(split.query, keep_blank_values=True))
    if fault := _option_fault(scheme, options):
        raise _refusal(text, f": {fault}.")
    secrets = _secrets(user, options) if form.options is None else ()
    return StoreUrl(scheme, shown_url(text), text, nodes, path, options, secrets)


def _are_options(form: _Form, query: str) -> bool:
    """Whether a URL may have these options, each once and with a value."""
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    if form.options is None:
        return all(mark for _, mark, _ in pairs)
    names = [name for name, _, value in pairs if name in form.options and value]
    return len(pairs) == len(set(names))


def _option_fault(scheme: str, options: Mapping[str, str]) -> str:
    """Return what is wrong with the value of an option."""
    mode = options.get("mode", "600")
    if scheme == "file" and not re.fullmatch("0?6[0-6][0-6]", mode):
        return f"mode={shown(mode)} must be permissions of files such as 600 or 660"
    endpoint = options.get("endpoint")
    if scheme == "s3" and endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        return "endpoint= must be http://HOST:PORT or https://HOST"
    return ""


def _nodes(netloc: str) -> Iterator[tuple[str, int | None]]:
    """Yield hosts and ports."""
    for node in netloc.split(","):
        if match := _HOST_PORT.fullmatch(node):
            yield match[1], int(match[2]) if match[2] else None


def _secrets(user: str, options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the password, and values of options that may be one."""
    password = user.partition(":")[2]
    values = [password, urllib.parse.unquote(password)]
    values += [
        value
        for name, value in options.items()
        if name == "password" or not value.isdigit()
    ]
    return tuple(filter(None, values))

"""URLs of stores: checked before anything is opened, shown without secrets.

A URL that is malformed may have its password anywhere. So a message shows only the
parts that look like a host, a port, a path or a known option, and "..." for the rest.
"""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Mapping, Sequence

from jaxkv._util import did_you_mean, shown

REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix")
BUCKET_SCHEMES = ("s3", "gs")
SCHEMES = ("file", *BUCKET_SCHEMES, *REDIS_SCHEMES, "mooncake", "memory")

_MAX_LETTERS = 2000
_MIN_BUCKET_LETTERS = 3  # Of Amazon, and so of its clients.
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
# Options whose values a message may show, if they look harmless, by their scheme.
_OPTIONS: Mapping[str, Sequence[str]] = {
    "file": ("mode",),
    "s3": ("endpoint", "region"),
    "gs": (),
    "mooncake": ("segment", "protocol", "device", "metadata", "host"),
}

_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
_HOST = r"(?:[\w.-]+|\[[0-9A-Fa-f:.%]+\])"
_URL = re.compile(rf"({_SCHEME})://(.*)", re.DOTALL)
_PLACES = re.compile(rf"{_HOST}(?::[0-9]{{1,5}})?(?:,{_HOST}(?::[0-9]{{1,5}})?)*")
_PLACE = re.compile(rf"({_HOST})(?::([0-9]{{1,5}}))?")
_BUCKET = re.compile(r"[\w.-]+")
_ENDPOINT = re.compile(
    rf"https?://(?:[^\s/?#@]*@)?{_HOST}(?::[0-9]{{1,5}})?(?:/[^?#]*)?"
)
_HOST_AND_PORT = re.compile(r"[\w.-]+:[0-9]{1,5}(?:/[0-9]*)?")
_KNOWN = "|".join(map(re.escape, sorted(SCHEMES, key=len, reverse=True)))
_NEARLY_URL = re.compile(rf"({_KNOWN})(?::/*|//+)(.*)", re.DOTALL | re.IGNORECASE)
_QUOTES = "\"'`"
# An assignment, as a file of variables has it.
_ASSIGNMENT = re.compile(rf"^-*[A-Za-z_][\w.-]*=(?=[{_QUOTES}]*(?:[./~$]|{_SCHEME}:))")
_OPTION = re.compile(r"\?\w+=")
_PATH_AND_OPTION = re.compile(r"[&;]\w+=")
_HARMLESS = re.compile(r"[^:@?=&;#%]*", re.DOTALL)
_HARMLESS_PATH = re.compile(r"[\w./%+~-]*")
_USER_IN_PATH = re.compile(":.*@", re.DOTALL)
_HARMLESS_VALUE = re.compile(rf"(?:https?://)?{_HOST}(?::[0-9]{{1,5}})?/?")
# What is before the part that may have a secret.
_START = re.compile(
    rf"([\s{_QUOTES}]*(?:{_ASSIGNMENT.pattern[1:]}[{_QUOTES}]*)?"
    rf"(?:(?:{_SCHEME})://|(?:{_KNOWN})(?::/*|//+))?)(.*)",
    re.DOTALL | re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class StoreUrl:
    """The checked URL of a store.

    Attributes:
        scheme: Which kind of store; ``"file"`` for a plain path, too.
        shown: The URL without secrets, for messages.
        text: The URL, its scheme in lower case.
        places: Hosts and ports; the port is None if the URL has none.
        path: The decoded path; of a folder, the folder.
        options: What follows ``?``.
        secrets: Parts that no message may have.
        mode: Permissions of the files of a folder.
    """

    scheme: str
    shown: str
    text: str = dataclasses.field(repr=False)
    places: tuple[tuple[str, int | None], ...] = ()
    path: str = ""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    mode: int = 0o600

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """Check the URL of a store, or the path of a folder.

        Raises:
            ValueError: It is malformed; the message has the likely right form.

        Example:
            >>> StoreUrl.parse("file:///var/cache/kv?mode=660").path
            '/var/cache/kv'
            >>> StoreUrl.parse("localhost:6379")
            Traceback (most recent call last):
            ValueError: storage='localhost:6379' must begin with the scheme of a URL, \
such as redis://localhost:6379, or with ./ to be a folder.
        """
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_LETTERS:
            raise _refusal(text, " must be a URL or the path of a folder.")
        if not text.isprintable() or text != text.strip():
            raise _refusal(
                text, " must not have what cannot be printed, nor spaces around it."
            )
        fault = _wrapping_fault(text)
        match = _URL.fullmatch(text)
        if not fault and match is None:
            fault = _folder_fault(text)
        if fault:
            raise _refusal(text, fault)
        if match is None:
            return cls("file", text, text, path=text)
        scheme = match[1].lower()
        if scheme not in SCHEMES:
            raise _refusal(text, _scheme_fault(scheme))
        text = f"{scheme}://{match[2]}"
        if scheme == "memory":
            return cls(scheme, shown_url(text), text)
        return _parse(scheme, text)

    @property
    def is_folder(self) -> bool:
        """Whether the store is a folder."""
        return self.scheme == "file"

    @property
    def extra(self) -> str | None:
        """The extra that the store needs.

        >>> StoreUrl.parse("redis://localhost").extra, StoreUrl.parse("kv").extra
        ('redis', None)
        """
        if self.scheme in REDIS_SCHEMES:
            return "redis"
        if self.scheme in BUCKET_SCHEMES:
            return "storage"
        return "mooncake" if self.scheme == "mooncake" else None

    def hide(self, message: str) -> str:
        """Replace the secrets of this URL in a message of somebody else."""
        for secret in self.secrets:
            message = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "...", message)
        return message


def shown_url(text: str) -> str:
    """Return a URL without what may be secret; any text may be asked for.

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
    known = _OPTIONS.get(scheme, ())
    has_user = re.search("@|%40", options) and (not pairs or pairs[0][0] not in known)
    if has_user:
        return "..."  # The question mark stands in a password.
    host, slash, path = place.partition("/")
    host, dots = host.rpartition("@")[2], ""
    is_path = scheme in ("file", "unix", "") and not host and "://" not in path
    if _has_user(path, is_path and scheme != "unix"):
        host, slash, path = path.rpartition("@")[2].partition("/")
        dots, is_path = "...@", False
    is_bucket = scheme in BUCKET_SCHEMES
    if host and not (_BUCKET if is_bucket else _PLACES).fullmatch(host):
        return "..."
    if not (is_path or _HARMLESS_PATH.fullmatch(path)):
        path = "..."
    path, mark_of_fragment, _ = path.partition("#")
    path += mark_of_fragment and "#..."
    if scheme in REDIS_SCHEMES:
        mark = options = ""
    else:
        options = "&".join(
            f"{name}={value if _HARMLESS_VALUE.fullmatch(value) else '...'}"
            if name in known
            else "..."
            for name, _, value in pairs
        )
    return f"{dots}{host}{slash}{path}{mark}{options}"


def _has_user(path: str, is_folder: bool) -> bool:
    """Whether a path seems to have a user and a password in it."""
    return "@" in path and (not is_folder or _USER_IN_PATH.search(path) is not None)


def _refusal(text: object, why: str) -> ValueError:
    # Of another type, such as bytes, it may have a secret, too.
    if not isinstance(text, str):
        return ValueError(f"storage=<{type(text).__name__}>{why}")
    return ValueError(f"storage={shown(shown_url(text))}{why}")


def _is_explicit(text: str) -> bool:
    """Whether a text is a path by how it begins."""
    is_path = text.startswith(("/", "./", "../")) and not text.startswith("//")
    return is_path and "://" not in text


def _wrapping_fault(text: str) -> str:
    """Return what is wrong with what stands around a URL or a path."""
    if _is_explicit(text):
        return ""
    if _bare(text) == text:
        return ""
    likely = _bare(shown_url(text))
    return (
        " must be the URL or path alone, without quotes or a variable's name: did you "
        f"mean {shown(likely)}?"
    )


def _bare(text: str) -> str:
    """Return a text without quotes and the name of a variable before it."""
    return _ASSIGNMENT.sub("", text.strip(_QUOTES), count=1).strip(_QUOTES)


def _folder_fault(text: str) -> str:
    """Return why a text must not be taken for the path of a folder."""
    first = text.partition("/")[0]
    fault = ""
    if _OPTION.search(text):
        fault = (
            " must be a URL to have options, such as file:///PATH?mode=660; %3F is a "
            "question mark in its path."
        )
    elif _is_explicit(text):
        fault = ""
    elif match := _NEARLY_URL.fullmatch(text):
        scheme = match[1].lower()
        start = "file:///" if scheme == "file" else f"{scheme}://"
        fault = (
            f" must begin with {start} to be a URL; a folder of this name is one with "
            "./ before it."
        )
    elif text[0] in "~$":
        fault = (
            " must be the path itself: ~ and variables are not replaced here; a folder "
            "of this name is one with ./ before it."
        )
    elif ":" in first or "@" in text or "//" in text or "\\" in text or "=" in first:
        likely = text if _HOST_AND_PORT.fullmatch(text) else "HOST:PORT"
        fault = (
            f" must begin with the scheme of a URL, such as redis://{likely}, or with "
            "./ to be a folder."
        )
    return fault


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
    parts = _split(text)
    if parts is None:
        raise _refusal(text, " cannot be read.")
    user, _, netloc = parts.netloc.rpartition("@")
    is_redis = scheme in REDIS_SCHEMES
    is_right = (
        (is_redis or not user)
        and "#" not in text
        and "://" not in netloc + parts.path
        and not _has_user(parts.path, scheme == "file")
        and not _PATH_AND_OPTION.search(parts.path)
        and _are_options(scheme, parts.query)
        and _is_place(scheme, netloc, parts.path)
    )
    if not is_right:
        raise _refusal(text, _form_fault(scheme, "@" in text and not user))
    try:
        path = urllib.parse.unquote(parts.path, errors="strict")
    except UnicodeDecodeError:
        path = ""
    if scheme == "file" and not (path and path.isprintable()):
        raise _refusal(text, " must have a path that can be printed, in UTF-8.")
    options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    mode = options.get("mode", "600") if scheme == "file" else "600"
    if not re.fullmatch("0?6[0-6][0-6]", mode):
        fault = f": mode={shown(mode)} must be permissions of files such as 600 or 660."
        raise _refusal(text, fault)
    endpoint = options.get("endpoint") if scheme == "s3" else None
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise _refusal(text, ": endpoint= must be http://HOST:PORT or https://HOST.")
    return StoreUrl(
        scheme,
        shown_url(text),
        text,
        _places(netloc),
        path,
        options,
        _secrets(user, options) if is_redis else (),
        int(mode, 8),
    )


def _are_options(scheme: str, query: str) -> bool:
    """Whether a URL of a scheme may have these options; redis-py checks its own."""
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    known = _OPTIONS.get(scheme)
    if known is None:
        return all(mark for _, mark, _ in pairs)
    names = [name for name, _, value in pairs if name in known and value]
    return len(pairs) == len(set(names))


def _is_place(scheme: str, netloc: str, path: str) -> bool:
    """Whether a URL of a scheme may have these hosts, this bucket or this path."""
    if scheme in ("file", "unix"):
        return netloc in ("", "localhost") and path != ""
    if scheme in BUCKET_SCHEMES:
        is_too_short = scheme == "s3" and len(netloc) < _MIN_BUCKET_LETTERS
        return _BUCKET.fullmatch(netloc) is not None and not is_too_short
    num_places = len(_places(netloc))
    if scheme in ("redis", "rediss"):
        return num_places == 1 and re.fullmatch("/?[0-9]*/?", path) is not None
    has_places = num_places == 1 or (num_places > 1 and "+cluster" in scheme)
    return has_places and path in ("", "/")


def _split(text: str) -> urllib.parse.SplitResult | None:
    """Split a URL; None if it cannot be read, as an error would quote it."""
    try:
        return urllib.parse.urlsplit(text)
    except ValueError:
        return None


def _places(netloc: str) -> tuple[tuple[str, int | None], ...]:
    """Return hosts and ports; none if one is malformed."""
    places: list[tuple[str, int | None]] = []
    for place in netloc.split(","):
        match = _PLACE.fullmatch(place)
        port = int(match[2]) if match and match[2] else None
        if match is None or not (port is None or 0 < port < 1 << 16):
            return ()
        places.append((match[1].strip("[]"), port))
    return tuple(places)


def _form_fault(scheme: str, has_odd_user: bool) -> str:
    """Return what a URL of a scheme must look like."""
    if scheme == "file":
        return (
            " must be file:///PATH, with ?mode=660 or the like if others than its "
            "owner may use it, and %23 for # in a name."
        )
    if scheme == "unix":
        form = "unix:///PATH of a socket"
    elif scheme in ("redis", "rediss"):
        form = f"{scheme}://HOST:PORT/DB, the port and the DB numbers"
    elif scheme in REDIS_SCHEMES:
        form = (
            f"{scheme}://HOST:PORT, of as many nodes as you like: HOST:PORT,HOST:PORT"
        )
    elif scheme == "mooncake":
        names = ", ".join(f"{name}=" for name in _OPTIONS[scheme])
        form = f"mooncake://HOST:PORT of the master, with {names} after ? if needed"
    else:
        names = " and ".join(f"?{name}=" for name in _OPTIONS[scheme])
        form = f"{scheme}://BUCKET/PREFIX{names and f' with {names}'}"
        if scheme == "s3":
            form += f", the bucket of at least {_MIN_BUCKET_LETTERS} letters"
    hint = "; write / ? # @ in a password or path as %2F %3F %23 %40"
    hint = hint if has_odd_user else ""
    return f" must be {form}{hint}."


def _secrets(user: str, options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the password, and values of options that may be one."""
    raw = user.partition(":")[2]
    values = [raw, urllib.parse.unquote(raw)]
    values += [
        value
        for name, value in options.items()
        if name == "password" or not value.isdigit()
    ]
    return tuple(value for value in values if value)

"""``jaxkv store``: list the namespaces of a store, add up its bytes, or remove one."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxkv._util import one_line, rounded_size
from jaxkv.tools.console import print_plain
from jaxkv.tools.files import OUTPUT_OPTIONS, check_files, write_files
from jaxkv.tools.progress import show_progress
from jaxkv.tools.usage import (
    EXIT_FAILED,
    EXIT_OK,
    Args,
    Command,
    CommandError,
    Usage,
    UsageError,
)

if TYPE_CHECKING:
    from jaxkv.tools.store.namespaces import Namespace
    from jaxkv.transfer.storage import BlobStore

_ROOT = "jaxkv1"
_IN_USE_S = 300.0  # Engines list their store every minute by default.
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_VARIABLE = "JAXKV_STORAGE"
_STORE = f"""
store:
  [URL]  a folder, s3://BUCKET/PREFIX, gs://, redis://HOST:PORT or unix:///SOCKET
      (default: {_VARIABLE}, which keeps a password out of the process list)
"""
_OUTPUT = f"""
output:
{OUTPUT_OPTIONS}

examples:
"""


def _parse_name(text: str) -> str:
    match = re.fullmatch(rf"(?:{_ROOT}/)?([0-9a-f]{{32}})", text)
    if match is None:
        raise ValueError(
            f"{text[:60]!r} must be a name as `jaxkv store ls` prints it: {_ROOT}/ and "
            "32 hexadecimal digits"
        )
    return match[1]


_LS = Usage(
    "jaxkv store ls",
    "List the namespaces of a store. An engine's start line has the name of its own. "
    "Buckets do not record when blocks were used.",
    f"{_STORE}{_OUTPUT}  jaxkv store ls /mnt/kv",
)
_SIZE = Usage(
    "jaxkv store size",
    "Add up the blocks and bytes of all namespaces of a store.",
    f"{_STORE}{_OUTPUT}  jaxkv store size s3://bucket/kv",
)
_RM = Usage(
    "jaxkv store rm",
    "Remove a namespace after a confirmation. A namespace used in the last 5 minutes "
    "may be in use and is refused. Redis records every use, folders record writes and "
    "some reads, buckets nothing: stop the engines that use the namespace first. The "
    "exit status is 1 if anything is left.",
    f"""{_STORE}
what to remove:
  --namespace NAME  a name that `jaxkv store ls` prints (required)
  --yes  do not ask for confirmation
  --force  remove it even if it was used in the last 5 minutes
{_OUTPUT}  jaxkv store rm /mnt/kv --namespace {_ROOT}/{"0123456789abcdef" * 2}""",
    {"--namespace": _parse_name},
)


def _ls(args: Args) -> int:
    url, namespaces, unread, _ = _read(args)
    rows = [("NAMESPACE", "BLOCKS", "SIZE", "LAST USED", "LIMIT")]
    rows += [
        (
            namespace.folder,
            f"{namespace.num_blocks:,}",
            size_text(namespace),
            age_text(namespace.age_s),
            _limit_text(namespace),
        )
        for namespace in namespaces
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    labels = "", *(namespace.label for namespace in namespaces)
    for row, label in zip(rows, labels, strict=True):
        cells = map(str.rjust, row[1:], widths[1:])
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
        lines += [f"  {label}"] * bool(label)
    print_plain(lines if namespaces else [f"No namespaces in {url}."])
    figures = {
        "url": url,
        "namespaces": [namespace.to_json() for namespace in namespaces],
        "unread_folders": unread,
    }
    write_files(args, lambda: figures)
    return _exit_code(unread)


def _size(args: Args) -> int:
    url, namespaces, unread, free_bytes = _read(args)
    sizes = [namespace.num_bytes for namespace in namespaces]
    num_blocks = sum(namespace.num_blocks for namespace in namespaces)
    num_bytes = sum(size for size in sizes if size is not None)
    figures = {
        "url": url,
        "namespaces": len(namespaces),
        "blocks": num_blocks,
        "bytes": num_bytes,
        "namespaces_of_unknown_size": sizes.count(None),
        "free_bytes": free_bytes,
        "unread_folders": unread,
    }
    text = (
        f"{rounded_size(num_bytes)} in {num_blocks:,} blocks of "
        f"{len(namespaces)} namespace{'s' * (len(namespaces) != 1)}"
    )
    if sizes.count(None):
        text += f", without {sizes.count(None)} of unknown size"
    if free_bytes is not None:
        text += f"; {rounded_size(free_bytes)} free"
    print_plain([f"{url}: {text}."])
    write_files(args, lambda: figures)
    return _exit_code(unread)


def _read(args: Args) -> tuple[str, list[Namespace], list[str], int | None]:
    from jaxkv.tools.store import namespaces as reading
    from jaxkv.transfer.storage import LocalStore

    check_files(args)
    with (
        reading.opened(_url_of(args)) as store,
        show_progress(is_quiet=args.quiet) as on_progress,
    ):
        namespaces = reading.read_namespaces(store, on_progress)
        unread = reading.unread_folders(store)
        free_bytes = store.free_bytes if isinstance(store, LocalStore) else None
        return store.url, namespaces, unread, free_bytes


def _url_of(args: Args) -> str:
    url: str = args.url or os.environ.get(_VARIABLE, "").strip()
    if not url:
        raise UsageError(f"missing URL of the store: name it, or set {_VARIABLE}")
    return url


def _exit_code(unread: Sequence[str]) -> int:
    if not unread:
        return EXIT_OK
    folders = f"{len(unread)} folder{'s' * (len(unread) > 1)}"
    print(
        f"jaxkv store: error: {folders} cannot be read, such as {one_line(unread[0])}: "
        "their blocks are left out; run it as their owner",
        file=sys.stderr,
    )
    return EXIT_FAILED


def _rm(args: Args) -> int:
    from jaxkv.tools.store import namespaces as reading

    check_files(args)
    if args.namespace is None:
        raise UsageError("missing --namespace: `jaxkv store ls` prints the names")
    if not (args.yes or (sys.stdin is not None and sys.stdin.isatty())):
        raise UsageError("missing --yes: nobody can be asked for confirmation here")
    folder = f"{_ROOT}/{args.namespace}"
    with reading.opened(_url_of(args)) as store:
        with show_progress(is_quiet=args.quiet) as on_progress:
            namespaces = reading.read_namespaces(store, on_progress, folder)
        if not namespaces and not reading.unread_folders(store, folder):
            raise UsageError(f"--namespace: there is no {folder} in {store.url}")
        namespace = (*namespaces, reading.Namespace(args.namespace))[0]
        _check_unused(namespace, args.force)
        if not args.yes:
            _confirm(namespace, store.url)
        with show_progress(is_quiet=args.quiet) as on_progress:
            num_removed, why = _remove(store, namespace, on_progress)
        num_left, unread = reading.count_left(store, namespace.name)
    figures = {
        "removed_objects": num_removed,
        "left_objects": num_left,
        "unread_folders": unread,
        **namespace.to_json(),
    }
    if num_left == 0 and not unread:
        size = size_text(namespace)
        print(f"Removed {folder}: {num_removed:,} objects, {size}.")
    else:
        left = "an unknown number of" if num_left is None else f"{num_left:,}"
        lines = [
            f"Removed {num_removed:,} objects of {folder}. LEFT: {left} objects that "
            f"can be listed{why and f' ({why})'}",
            *(f"LEFT: {name}, which cannot be read" for name in unread),
            "Stop the engines that write there, give this user permission, and repeat.",
        ]
        print_plain(lines)
    write_files(args, lambda: figures)
    return EXIT_OK if num_left == 0 and not unread else EXIT_FAILED


def _check_unused(namespace: Namespace, is_forced: bool) -> None:
    age_s = namespace.age_s
    if age_s is not None and age_s < _IN_USE_S and not is_forced:
        raise CommandError(
            f"--namespace: {namespace.folder} was used {age_text(age_s)} and may be in "
            "use: stop its engines and wait 5 minutes, or pass --force"
        )


def _confirm(namespace: Namespace, url: str) -> None:
    print(
        f"{namespace.folder} in {one_line(url)}: {namespace.num_blocks:,} blocks, "
        f"{size_text(namespace)}, last used {age_text(namespace.age_s)}.\n"
        f"{namespace.label or 'No label'}. Remove it? [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("not confirmed: nothing was removed")


def _remove(
    store: BlobStore, namespace: Namespace, on_progress: Any
) -> tuple[int, str]:
    from jaxkv.tools.store.namespaces import removable_names
    from jaxkv.transfer.storage import LocalStore, StoreError
    from jaxkv.transfer.storage.local import TEMPORARY

    total = namespace.num_objects.total() + namespace.num_records
    num_removed, why = 0, ""
    try:
        for names in removable_names(store, namespace.name):
            answers = store.delete(names)
            errors = [answer for answer in answers if isinstance(answer, StoreError)]
            why = why or "".join(one_line(str(error)) for error in errors[:1])
            num_removed += len(names) - len(errors)
            on_progress("removing", min(num_removed, total), total)
    except StoreError as error:
        why = why or one_line(str(error))
    if isinstance(store, LocalStore):
        top = os.path.join(store.path, namespace.folder)
        for path, _, files in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # Files of others may be left.
                for file in filter(TEMPORARY.fullmatch, files):
                    os.unlink(os.path.join(path, file))
                os.rmdir(path)
    return num_removed, why


def size_text(namespace: Namespace) -> str:
    if namespace.num_bytes is None:
        return "unknown"
    return "about " * namespace.is_estimated + rounded_size(namespace.num_bytes)


def age_text(seconds: float | None) -> str:
    """Format the time since the last use, which may be unknown.

    >>> age_text(0.2), age_text(7500.0), age_text(None)
    ('0 s ago', '2 h ago', 'unknown')
    """
    if seconds is None:
        return "unknown"
    length, unit = next(row for row in _UNITS if seconds >= row[0] or row[0] == 1)
    return f"{seconds // length:.0f} {unit} ago"


def _limit_text(namespace: Namespace) -> str:
    limit = namespace.owner_limit or namespace.limit
    if limit is None:
        return "none"
    owner = " (owner)" if namespace.owner_limit else ""
    return f"{limit:,}{owner}"


COMMANDS = {
    "ls": Command(_LS, _ls),
    "size": Command(_SIZE, _size),
    "rm": Command(_RM, _rm),
}

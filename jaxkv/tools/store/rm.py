"""``jaxkv store rm``: remove a namespace from a store."""

from __future__ import annotations

import contextlib
import os
import re
import sys

from jaxkv.tools.console import OnProgress, plain
from jaxkv.tools.files import JSON_OPTION, check_files, write_files
from jaxkv.tools.progress import show_progress
from jaxkv.tools.store.ls import STORE_OPTIONS, age_text, size_text
from jaxkv.tools.store.namespaces import (
    Namespace,
    opened,
    read_namespaces,
    removable_names,
)
from jaxkv.tools.usage import EXIT_OK, Args, CommandError, Usage, UsageError
from jaxkv.transfer.storage import BlobStore, LocalStore
from jaxkv.transfer.storage.objects import ROOT
from jaxkv.transfer.storage.store import answers_of

_IN_USE_S = 300.0  # Engines list their store every minute by default.

SUMMARY = "remove a namespace: all its blocks and limits"


def _parse_name(text: str) -> str:
    match = re.fullmatch(rf"(?:{ROOT}/)?([0-9a-f]{{32}})", text)
    if match is None:
        raise ValueError(
            f"{text[:60]!r} must be a name as `jaxkv store ls` prints it: {ROOT}/ and "
            "32 hexadecimal digits"
        )
    return match[1]


USAGE = Usage(
    "jaxkv store rm",
    "Remove a namespace after a confirmation. A namespace used in the last 5 minutes "
    "may be in use and is refused. Redis records every use, folders record writes and "
    "some reads, buckets nothing: stop the engines that use the namespace first.",
    f"""{STORE_OPTIONS}
what to remove:
  --namespace NAME  a name that `jaxkv store ls` prints (required)
  --yes  do not ask for confirmation
  --force  remove it even if it was used in the last 5 minutes

output:
{JSON_OPTION}
""",
    {"--namespace": _parse_name},
)


def run(args: Args) -> int:
    check_files(args)
    if args.namespace is None:
        raise UsageError("--namespace: it is required: `jaxkv store ls` has names")
    if not (args.yes or (sys.stdin is not None and sys.stdin.isatty())):
        raise UsageError("--yes: it is required where nobody can be asked")
    folder = f"{ROOT}/{args.namespace}"
    with opened(args.url) as store:
        with show_progress() as on_progress:
            namespaces = read_namespaces(store, on_progress, folder)
        if not namespaces:
            raise UsageError(f"--namespace: there is no {folder} in {store.url}")
        namespace = namespaces[0]
        _check_unused(namespace, args.force)
        if not args.yes:
            _confirm(namespace, store.url)
        with show_progress() as on_progress:
            num_removed = _remove(store, namespace, on_progress)
    size = size_text(namespace.num_bytes)
    print(f"Removed {folder}: {num_removed:,} objects, {size}.")
    write_files(args, lambda: {"removed_objects": num_removed, **namespace.to_json()})
    return EXIT_OK


def _check_unused(namespace: Namespace, is_forced: bool) -> None:
    age_s = namespace.age_s
    if age_s is not None and age_s < _IN_USE_S and not is_forced:
        raise UsageError(
            f"--namespace: {ROOT}/{namespace.name} was used {age_text(age_s)} and may "
            "be in use: stop its engines and wait 5 minutes, or pass --force"
        )


def _confirm(namespace: Namespace, url: str) -> None:
    print(
        f"{ROOT}/{namespace.name} in {plain(url)}: {namespace.num_blocks:,} blocks, "
        f"{size_text(namespace.num_bytes)}, last used {age_text(namespace.age_s)}.\n"
        "Remove it? [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("not confirmed: nothing was removed")


def _remove(store: BlobStore, namespace: Namespace, on_progress: OnProgress) -> int:
    total = namespace.num_objects.total() + namespace.num_records
    num_removed = 0
    for names in removable_names(store, namespace.name):
        answers_of(store.delete(names))
        num_removed += len(names)
        on_progress("removing", min(num_removed, total), total)
    if isinstance(store, LocalStore):
        top = os.path.join(store.path, ROOT, namespace.name)
        for path, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # Files of others may be left.
                os.rmdir(path)
    return num_removed

"""``jaxkv store ls``: the namespaces of a store."""

from __future__ import annotations

from jaxkv._util import rounded_size
from jaxkv.tools.console import print_plain
from jaxkv.tools.files import JSON_OPTION, check_files, write_files
from jaxkv.tools.progress import show_progress
from jaxkv.tools.store.namespaces import Namespace, opened, read_namespaces
from jaxkv.tools.usage import EXIT_OK, Args, Usage
from jaxkv.transfer.storage.objects import ROOT

SUMMARY = "list the namespaces with their blocks, size, last use and limit"
STORE_OPTIONS = """
store:
  URL  a folder, s3://BUCKET/PREFIX, gs://, redis://HOST:PORT or unix:///SOCKET
"""
USAGE = Usage(
    "jaxkv store ls",
    "List the namespaces of a store. An engine's start line has the name of its own. "
    "Buckets do not record when blocks were used.",
    f"""{STORE_OPTIONS}
output:
{JSON_OPTION}
""",
)
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def run(args: Args) -> int:
    check_files(args)
    with opened(args.url) as store, show_progress() as on_progress:
        namespaces = read_namespaces(store, on_progress)
    print_plain(_lines(namespaces, store.url))
    write_files(
        args,
        lambda: {
            "url": store.url,
            "namespaces": [namespace.to_json() for namespace in namespaces],
        },
    )
    return EXIT_OK


def _lines(namespaces: list[Namespace], url: str) -> list[str]:
    if not namespaces:
        return [f"No namespaces in {url}."]
    rows = [("NAMESPACE", "BLOCKS", "SIZE", "LAST USED", "LIMIT")]
    rows += [
        (
            f"{ROOT}/{namespace.name}",
            f"{namespace.num_blocks:,}",
            size_text(namespace.num_bytes),
            age_text(namespace.age_s),
            _limit_text(namespace),
        )
        for namespace in namespaces
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{row[0]:{widths[0]}}  "
        + "  ".join(
            f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)
        )
        for row in rows
    ]


def size_text(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else rounded_size(num_bytes)


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
    return f"{limit:,} blocks{owner}"

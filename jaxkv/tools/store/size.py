"""``jaxkv store size``: what all namespaces of a store take."""

from __future__ import annotations

from jaxkv._util import rounded_size
from jaxkv.tools.console import print_plain
from jaxkv.tools.files import JSON_OPTION, check_files, write_files
from jaxkv.tools.progress import show_progress
from jaxkv.tools.store.ls import STORE_OPTIONS
from jaxkv.tools.store.namespaces import opened, read_namespaces
from jaxkv.tools.usage import EXIT_OK, Args, Usage
from jaxkv.transfer.storage import LocalStore

SUMMARY = "add up the blocks and bytes of all namespaces"
USAGE = Usage(
    "jaxkv store size",
    "Add up the blocks and bytes of all namespaces of a store.",
    f"""{STORE_OPTIONS}
output:
{JSON_OPTION}
""",
)


def run(args: Args) -> int:
    check_files(args)
    with opened(args.url) as store, show_progress() as on_progress:
        namespaces = read_namespaces(store, on_progress)
        free_bytes = store.free_bytes if isinstance(store, LocalStore) else None
    sizes = [namespace.num_bytes for namespace in namespaces]
    num_blocks = sum(namespace.num_blocks for namespace in namespaces)
    num_bytes = sum(size for size in sizes if size is not None)
    figures = {
        "url": store.url,
        "namespaces": len(namespaces),
        "blocks": num_blocks,
        "bytes": num_bytes,
        "namespaces_of_unknown_size": sizes.count(None),
        "free_bytes": free_bytes,
    }
    text = (
        f"{rounded_size(num_bytes)} in {num_blocks:,} blocks of "
        f"{len(namespaces)} namespace{'s' * (len(namespaces) != 1)}"
    )
    if sizes.count(None):
        text += f", without {sizes.count(None)} of unknown size"
    if free_bytes is not None:
        text += f"; {rounded_size(free_bytes)} free"
    print_plain([f"{store.url}: {text}."])
    write_files(args, lambda: figures)
    return EXIT_OK

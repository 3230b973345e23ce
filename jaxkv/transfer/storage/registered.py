"""Stores of other packages: entry points of the group `jaxkv.stores`.

The name is the scheme of their URLs, in lower case. What it loads gets the checked
`StoreUrl` and returns a `BlobStore`; it raises ValueError for an option that is wrong.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points


def registered_store(scheme: str) -> EntryPoint | None:
    """Return the entry point that opens URLs of a scheme; None if there is none."""
    return next(iter(entry_points(group="jaxkv.stores", name=scheme)), None)

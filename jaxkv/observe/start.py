"""The line that is logged when offloading begins, the same for all engines."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jaxkv._util import rounded_size
from jaxkv.scheduling.worker.storage_worker import StorageWorker
from jaxkv.transfer import AnyEngine

_log = logging.getLogger(__name__)


def log_start(
    engine: AnyEngine,
    *,
    policy: str,
    executor: str = "native",
    storage: StorageWorker | None = None,
    num_storage_blocks: int = 0,
    storage_write: str = "",
    about: str = "",
    ports: Sequence[str] = (),
) -> None:
    """Log, at INFO, what offloading has been set up with.

    `about` names what must be equal for engines to share a store's blocks; `ports` says
    what is served where.
    """
    store = "no storage"
    if storage is not None:
        storage_io = storage.storage_io
        store = (
            f"storage {storage_io.url} for {num_storage_blocks:,} blocks of "
            f"{rounded_size(storage.object_bytes)}, written {storage_write}, in "
            f"{storage_io.objects.folder}"
        )
        if about:
            store += (
                f" (engines share what they write if all of this is equal: {about})"
            )
    _log.info(
        "offloading to %s host blocks of %s, %s of pinned memory in all, mode %s; "
        "policy %s, executor %s; %s; %s",
        f"{engine.num_host_blocks:,}",
        rounded_size(engine.block_bytes),
        rounded_size(engine.host_bytes),
        engine.mode,
        policy,
        executor,
        store,
        ", ".join(ports) or "no metrics or events port is open",
    )

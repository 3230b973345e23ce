"""KV-cache offloading for JAX: a second home in host memory for paged KV blocks.

A public object is imported when it is first used, so that a command line can be ready
for signals before jax is loaded.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv.config import ConfigError as ConfigError
    from jaxkv.config import OffloadConfig as OffloadConfig
    from jaxkv.keys import Extras as Extras
    from jaxkv.keys import KeyChain as KeyChain
    from jaxkv.keys import MultimodalItem as MultimodalItem
    from jaxkv.keys import Namespace as Namespace
    from jaxkv.policies import Policy as Policy
    from jaxkv.policies import get_policy_maker as get_policy_maker
    from jaxkv.policies import make_arc as make_arc
    from jaxkv.policies import make_hazard as make_hazard
    from jaxkv.policies import make_lru as make_lru
    from jaxkv.policies import make_retained as make_retained
    from jaxkv.policies import policy_names as policy_names
    from jaxkv.policies import register_policy as register_policy
    from jaxkv.scheduling import ConnectorOutput as ConnectorOutput
    from jaxkv.scheduling import OffloadMetadata as OffloadMetadata
    from jaxkv.scheduling import OffloadRules as OffloadRules
    from jaxkv.scheduling import OffloadScheduler as OffloadScheduler
    from jaxkv.scheduling import OffloadWorker as OffloadWorker
    from jaxkv.scheduling import SchedulerOutput as SchedulerOutput
    from jaxkv.scheduling import TraceRecorder as TraceRecorder
    from jaxkv.search import ChunkedLocal as ChunkedLocal
    from jaxkv.search import FullAttention as FullAttention
    from jaxkv.search import Mamba as Mamba
    from jaxkv.search import SlidingWindow as SlidingWindow
    from jaxkv.search import find_cached_prefix as find_cached_prefix
    from jaxkv.search import num_host_blocks as num_host_blocks
    from jaxkv.tiers import BorrowedPool as BorrowedPool
    from jaxkv.tiers import DeviceBlockPool as DeviceBlockPool
    from jaxkv.tiers import DevicePool as DevicePool
    from jaxkv.tiers import LoadStoreSpec as LoadStoreSpec
    from jaxkv.tiers import OffloadingEvent as OffloadingEvent
    from jaxkv.tiers import OffloadingManager as OffloadingManager
    from jaxkv.tiers import PrepareStoreOutput as PrepareStoreOutput
    from jaxkv.tiers import RequestStepOutput as RequestStepOutput
    from jaxkv.tiers import Retention as Retention
    from jaxkv.tiers import Snapshot as Snapshot
    from jaxkv.transfer import TransferEngine as TransferEngine

__version__ = "0.1.0"

_PUBLIC = {
    "jaxkv.config": "ConfigError OffloadConfig",
    "jaxkv.keys": "Extras KeyChain MultimodalItem Namespace",
    "jaxkv.policies": "Policy get_policy_maker make_arc make_hazard "
    "make_lru make_retained policy_names register_policy",
    "jaxkv.scheduling": "ConnectorOutput OffloadMetadata OffloadRules OffloadScheduler "
    "OffloadWorker SchedulerOutput TraceRecorder",
    "jaxkv.search": "ChunkedLocal FullAttention Mamba SlidingWindow find_cached_prefix "
    "num_host_blocks",
    "jaxkv.tiers": "BorrowedPool DeviceBlockPool DevicePool LoadStoreSpec "
    "OffloadingEvent OffloadingManager PrepareStoreOutput RequestStepOutput Retention "
    "Snapshot",
    "jaxkv.transfer": "TransferEngine",
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Import a public object, or a package, when it is first used."""
    import importlib
    import importlib.util

    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
    if name == "__all__":  # For `from jaxkv import *`, which imports all of it.
        return sorted(_MODULES)
    if not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


if "JAXKV_STRICT" in os.environ:
    from jaxkv import _util

    if _util.is_strict():
        from jaxkv import strict as strict

"""KV-cache offloading for JAX: a second home in host memory for paged KV blocks."""

from jaxkv.blocks import DeviceBlockPool as DeviceBlockPool
from jaxkv.compat import make_scheduler as make_scheduler
from jaxkv.config import OffloadConfig as OffloadConfig
from jaxkv.config_keys import ConfigError as ConfigError
from jaxkv.connector import ConnectorOutput as ConnectorOutput
from jaxkv.connector import OffloadMetadata as OffloadMetadata
from jaxkv.connector import SchedulerOutput as SchedulerOutput
from jaxkv.groups import ChunkedLocal as ChunkedLocal
from jaxkv.groups import FullAttention as FullAttention
from jaxkv.groups import Mamba as Mamba
from jaxkv.groups import SlidingWindow as SlidingWindow
from jaxkv.groups import num_host_blocks as num_host_blocks
from jaxkv.hashing import Extras as Extras
from jaxkv.hashing import KeyChain as KeyChain
from jaxkv.hashing import MultimodalItem as MultimodalItem
from jaxkv.hashing import Namespace as Namespace
from jaxkv.host_tier import HostTier as HostTier
from jaxkv.offloading_manager import OffloadingManager as OffloadingManager
from jaxkv.policies import get_policy_maker as get_policy_maker
from jaxkv.policies import make_arc as make_arc
from jaxkv.policies import make_arc_fixed as make_arc_fixed
from jaxkv.policies import make_lru as make_lru
from jaxkv.policies import policy_names as policy_names
from jaxkv.policies import register_policy as register_policy
from jaxkv.scheduler import OffloadScheduler as OffloadScheduler
from jaxkv.scheduling.rules import OffloadRules as OffloadRules
from jaxkv.search import find_cached_prefix as find_cached_prefix
from jaxkv.snapshot import Snapshot as Snapshot
from jaxkv.transfer import TransferEngine as TransferEngine
from jaxkv.types import LoadStoreSpec as LoadStoreSpec
from jaxkv.types import OffloadingEvent as OffloadingEvent
from jaxkv.types import Policy as Policy
from jaxkv.types import PrepareStoreOutput as PrepareStoreOutput
from jaxkv.types import RequestStepOutput as RequestStepOutput
from jaxkv.worker import OffloadWorker as OffloadWorker

__version__ = "0.1.0"

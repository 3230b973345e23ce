"""Indexes of the blocks on the device, on the host and in a store."""

from jaxkv.tiers.base import LoadStoreSpec as LoadStoreSpec
from jaxkv.tiers.base import OffloadingEvent as OffloadingEvent
from jaxkv.tiers.base import PrepareStoreOutput as PrepareStoreOutput
from jaxkv.tiers.base import RequestStepOutput as RequestStepOutput
from jaxkv.tiers.device import DeviceBlockPool as DeviceBlockPool
from jaxkv.tiers.host import OffloadingManager as OffloadingManager
from jaxkv.tiers.pools import BorrowedPool as BorrowedPool
from jaxkv.tiers.pools import DevicePool as DevicePool
from jaxkv.tiers.retention import Retention as Retention
from jaxkv.tiers.snapshot import Snapshot as Snapshot

"""Moving blocks between a device pool and host memory."""

from jaxkv.transfer.codecs import Compression as Compression
from jaxkv.transfer.engine import TransferEngine as TransferEngine
from jaxkv.transfer.layout import PoolLayout as PoolLayout
from jaxkv.transfer.limits import available_host_bytes as available_host_bytes
from jaxkv.transfer.memory import memory_kinds as memory_kinds
from jaxkv.transfer.multi_pool import AnyEngine as AnyEngine
from jaxkv.transfer.multi_pool import MultiPoolEngine as MultiPoolEngine
from jaxkv.transfer.tickets import Completion as Completion
from jaxkv.transfer.tickets import Ticket as Ticket
from jaxkv.transfer.tiling import CostlyLayoutWarning as CostlyLayoutWarning

"""Moving blocks between a device pool and host memory."""

from jaxkv.transfer.engine import Completion as Completion
from jaxkv.transfer.engine import Ticket as Ticket
from jaxkv.transfer.engine import TransferEngine as TransferEngine
from jaxkv.transfer.memory import PoolLayout as PoolLayout
from jaxkv.transfer.memory import memory_kinds as memory_kinds

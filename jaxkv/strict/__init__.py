"""Strict mode: parts for an engine's tests that detect and name the engine's mistakes.

`JAXKV_STRICT=1` or `OffloadConfig(strict=True)` uses them instead of the usual parts.
"""

from jaxkv._util import substitutes
from jaxkv.scheduling import OffloadScheduler, OffloadWorker
from jaxkv.strict.blocks import StrictError as StrictError
from jaxkv.strict.engine import StrictTransferEngine as StrictTransferEngine
from jaxkv.strict.scheduler import StrictOffloadScheduler as StrictOffloadScheduler
from jaxkv.strict.worker import StrictOffloadWorker as StrictOffloadWorker
from jaxkv.transfer import TransferEngine

substitutes[TransferEngine] = StrictTransferEngine
substitutes[OffloadScheduler] = StrictOffloadScheduler
substitutes[OffloadWorker] = StrictOffloadWorker

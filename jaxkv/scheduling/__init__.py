"""Scheduling: which blocks move in a step, and the worker that moves them."""

from jaxkv.scheduling.protocol import ConnectorOutput as ConnectorOutput
from jaxkv.scheduling.protocol import OffloadMetadata as OffloadMetadata
from jaxkv.scheduling.protocol import SchedulerOutput as SchedulerOutput
from jaxkv.scheduling.record.record import TraceRecorder as TraceRecorder
from jaxkv.scheduling.rules import OffloadRules as OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler as OffloadScheduler
from jaxkv.scheduling.worker.worker import OffloadWorker as OffloadWorker

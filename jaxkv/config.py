"""One configuration for all parts, from code, a dict, JSON or the environment."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxkv.blocks import DeviceBlockPool
from jaxkv.config_keys import (
    KEYS,
    ConfigError,
    parse_json,
    read_environment,
    unknown,
    with_variables,
)
from jaxkv.groups import FullAttention, GroupSpec, as_groups
from jaxkv.scheduler import OffloadScheduler
from jaxkv.scheduling.rules import OffloadRules, check_rules
from jaxkv.transfer import TransferEngine
from jaxkv.transfer.codecs import Compression, Quantised
from jaxkv.transfer.engine import DEFAULT_STAGING_BYTES
from jaxkv.transfer.kernels import Mode
from jaxkv.types import PyTree
from jaxkv.worker import OffloadWorker

if TYPE_CHECKING:
    # They need extras, which not everybody has.
    from jaxkv.observe.catalog import BlockCatalog
    from jaxkv.observe.metrics import OffloadMetrics
    from jaxkv.observe.publisher import EventPublisher

_SIZES = ("host_bytes", "num_host_blocks")


class Offload(NamedTuple):
    """The parts of offloading, made for one pool.

    Attributes:
        engine: Moves the bytes.
        scheduler: Decides what moves; wants `bind_device_block_pool`.
        worker: Tells the former what the latter did.
    """

    engine: TransferEngine
    scheduler: OffloadScheduler
    worker: OffloadWorker


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """All that can be chosen about offloading, apart from what the model is.

    docs/configuration.md has a table of the keys. They are those of `TransferEngine`,
    `OffloadRules`, `OffloadScheduler` and `OffloadWorker`, which say more; `mode` is
    that of the rules, the engine's is `transfer_mode`.

    Values are checked when it is made. Sizes may be given as text, and are kept in
    bytes.

    Raises:
        ConfigError: Values are wrong, or do not go together.

    Example:
        >>> config = OffloadConfig.from_dict({"host_bytes": "8GiB", "mode": "lazy"})
        >>> config.host_bytes, config.cache_policy
        (8589934592, 'lru')
        >>> environ = {"JAXKV_MODE": "eager", "JAXKV_HOST_BYTES": "1GiB"}
        >>> config = OffloadConfig.from_env({"mode": "lazy"}, environ)
        >>> config.host_bytes, config.mode
        (1073741824, 'lazy')
    """

    host_bytes: int | str | None = None
    num_host_blocks: int | None = None
    blocks_per_host_block: int = 1
    cache_policy: str = "lru"
    mode: Literal["eager", "lazy"] = "eager"
    max_num_batched_tokens: int = 8192
    store_threshold: int = 0
    prompt_only: bool = False
    max_offload_tokens: int | None = None
    delay_shared_loads: bool = False
    max_blocks_in_flight: int | None = None
    gate: bool = False
    copy_on_device: bool = True
    flush_on_preemption: bool = False
    remember_losses: int = 0
    world_size: int = 1
    enable_events: bool = False
    transfer_mode: Mode | None = None
    staging_bytes: int | str = DEFAULT_STAGING_BYTES
    extent_bytes: int | str | None = None
    layer_groups: int = 1
    compression: Quantised | None = None
    deadline_s: float | None = 30.0
    report_after_steps: int | None = None
    check_plans: bool = False
    agreement_timeout_s: float = 60.0
    events_endpoint: str | None = None
    events_replay_endpoint: str | None = None
    events_topic: str = ""
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        faults = []
        for key_name, key in KEYS.items():
            try:
                value = key.kept(getattr(self, key_name))
            except ValueError as error:
                faults.append(f"{key_name}={error}")
            else:
                object.__setattr__(self, key_name, value)
        if not faults:
            faults = self._contradictions()
        if faults:
            raise ConfigError(faults)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OffloadConfig:
        """Make a configuration from keys and values.

        Args:
            values: What differs from the defaults.

        Raises:
            ConfigError: Keys are unknown, values wrong, or they do not go together.
        """
        faults = unknown(values, "key")
        if faults:
            raise ConfigError(faults)
        return cls(**values)

    @classmethod
    def from_json(cls, text: str | bytes) -> OffloadConfig:
        """Make a configuration from a JSON object; bytes are taken for UTF-8.

        Raises:
            ConfigError: It is no JSON object, or `from_dict` refuses it.
        """
        return cls.from_dict(parse_json(text))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> OffloadConfig:
        """Make a configuration from a file that holds a JSON object.

        Raises:
            ConfigError: As `from_json`; it names the file.
            OSError: The file cannot be read.
        """
        text = pathlib.Path(path).read_bytes()
        try:
            return cls.from_json(text)
        except ConfigError as error:
            faults = [f"{os.fspath(path)}: {fault}" for fault in error.faults]
            raise ConfigError(faults) from None

    @classmethod
    def from_env(
        cls,
        explicit: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> OffloadConfig:
        """Make a configuration from the environment's variables.

        A key's variable is its name in capitals after ``JAXKV_``. An empty one counts
        as not set. ``1``, ``true``, ``yes`` and ``on`` are true, ``0``, ``false``,
        ``no`` and ``off`` false, ``none`` is None, in any case.

        Args:
            explicit: Keys and values that count more than the environment's, as
                `from_dict` takes them.
            environ: The environment; that of the process if None.

        Raises:
            ConfigError: A variable has an unknown name or a wrong value, which are
                told with the variable; or as `from_dict`.
        """
        explicit = dict(explicit or {})
        values, faults = read_environment(os.environ if environ is None else environ)
        faults = unknown(explicit, "key") + faults
        if faults:
            raise ConfigError(faults)
        if any(explicit.get(key_name) is not None for key_name in _SIZES):
            # One size takes the place of the other.
            for key_name in _SIZES:
                values.pop(key_name, None)
        try:
            return cls(**(values | explicit))
        except ConfigError as error:
            used = values.keys() - explicit.keys()
            faults = [with_variables(fault, used) for fault in error.faults]
            raise ConfigError(faults) from None

    def to_dict(self) -> dict[str, Any]:
        """Give all keys and values, as `from_dict` and JSON take them."""
        return dataclasses.asdict(self)

    def make_engine(
        self, pool: PyTree, *, block_axis: PyTree = 0, head_axis: PyTree = -2
    ) -> TransferEngine:
        """Make the transfer engine of a pool, which sets the host memory aside.

        Args:
            pool: A pool of the layout that all later ones will have.
            block_axis: Which axis counts the blocks; see `TransferEngine`.
            head_axis: Which axis counts the heads, for `compression`; see
                `Compression`.

        Raises:
            ValueError: No size is set, or as `TransferEngine`.
            MemoryError: There is not that much host memory.
        """
        if self.host_bytes is None and self.num_host_blocks is None:
            raise ValueError(_NO_SIZE)
        compression = None
        if self.compression is not None:
            compression = Compression(self.compression, head_axis)
        return TransferEngine(
            pool,
            self.num_host_blocks,
            host_bytes=self.host_bytes,
            mode=self.transfer_mode,
            block_axis=block_axis,
            blocks_per_host_block=self.blocks_per_host_block,
            layer_groups=self.layer_groups,
            staging_bytes=self.staging_bytes,
            extent_bytes=self.extent_bytes,
            compression=compression,
        )

    def make_rules(self, block_bytes: int = 0) -> OffloadRules:
        """Make the rules of a scheduler.

        Args:
            block_bytes: Bytes of a device block, which `gate` needs.

        Raises:
            ValueError: `gate` is set and `block_bytes` is 0.
        """
        names = {field.name for field in dataclasses.fields(OffloadRules)}
        chosen = {key: value for key, value in self.to_dict().items() if key in names}
        return OffloadRules(**chosen, block_bytes=block_bytes)

    def make_scheduler(
        self,
        groups: int | GroupSpec | Sequence[GroupSpec],
        num_host_blocks: int | None = None,
        *,
        block_bytes: int = 0,
    ) -> OffloadScheduler:
        """Make the scheduler.

        Args:
            groups: The groups of the model's layers; see `OffloadScheduler`.
            num_host_blocks: Those of the engine; None for the key of that name.
            block_bytes: Bytes of a device block, which `gate` needs.

        Raises:
            ValueError: There is no number of host blocks, or as `OffloadScheduler`.
        """
        if num_host_blocks is None:
            num_host_blocks = self.num_host_blocks
        if num_host_blocks is None:
            raise ValueError(
                "num_host_blocks=None must be given where the configuration has none: "
                "pass that of the engine, which knows it."
            )
        return OffloadScheduler(
            groups,
            num_host_blocks,
            self.cache_policy,
            self.enable_events or self.events_endpoint is not None,
            rules=self.make_rules(block_bytes),
        )

    def make_worker(
        self,
        engine: TransferEngine,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> OffloadWorker:
        """Make the worker.

        Raises:
            ValueError: As `OffloadWorker`.
        """
        return OffloadWorker(
            engine,
            deadline_s=self.deadline_s,
            report_after_steps=self.report_after_steps,
            check_plans=self.check_plans,
            agreement_timeout_s=self.agreement_timeout_s,
            clock=clock,
        )

    def make_publisher(
        self,
        groups: int | GroupSpec | Sequence[GroupSpec] | None = None,
        *,
        catalog: BlockCatalog | None = None,
        data_parallel_rank: int = 0,
    ) -> EventPublisher | None:
        """Make an `EventPublisher`, with its arguments; None without `events_endpoint`.

        Raises:
            ImportError: The extra ``events`` is missing.
            ValueError: An address is none.
            OSError: It cannot be had.
        """
        if self.events_endpoint is None:
            return None
        from jaxkv.observe.publisher import EventPublisher

        return EventPublisher(
            self.events_endpoint,
            self.events_replay_endpoint,
            self.events_topic,
            data_parallel_rank=data_parallel_rank,
            catalog=catalog,
            groups=groups,
        )

    def serve_metrics(
        self,
        scheduler: OffloadScheduler | None = None,
        worker: OffloadWorker | None = None,
        pool: DeviceBlockPool | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> OffloadMetrics | None:
        """Serve `OffloadMetrics`, with its arguments; None without `metrics_port`.

        Raises:
            ImportError: The extra ``metrics`` is missing.
            OSError: It cannot listen there.
        """
        if self.metrics_port is None:
            return None
        from jaxkv.observe.metrics import OffloadMetrics

        metrics = OffloadMetrics(scheduler, worker, pool, labels=labels)
        try:
            metrics.serve(self.metrics_port, self.metrics_address)
        except OSError:
            metrics.close()
            raise
        return metrics

    def connect(
        self,
        pool: PyTree,
        groups: int | GroupSpec | Sequence[GroupSpec],
        *,
        block_axis: PyTree = 0,
        head_axis: PyTree = -2,
    ) -> Offload:
        """Make all parts for one pool.

        The arguments and errors are those of the methods for each part.
        """
        groups = as_groups(groups)
        # Before gigabytes are set aside in vain.
        check_rules(self.make_rules(block_bytes=1), groups)
        engine = self.make_engine(pool, block_axis=block_axis, head_axis=head_axis)
        block_bytes = engine.block_bytes // engine.blocks_per_host_block
        scheduler = self.make_scheduler(
            groups, engine.num_host_blocks, block_bytes=block_bytes
        )
        return Offload(engine, scheduler, self.make_worker(engine))

    def _contradictions(self) -> list[str]:
        """Say which values do not go together, whatever the model is."""
        if self.host_bytes is not None and self.num_host_blocks is not None:
            return [
                f"host_bytes={self.host_bytes} and num_host_blocks="
                f"{self.num_host_blocks} exclude one another: both are the size of "
                "the host tier."
            ]
        if self.events_replay_endpoint is not None and self.events_endpoint is None:
            return [
                f"events_replay_endpoint={self.events_replay_endpoint!r} needs an "
                "events_endpoint, whose events it replays."
            ]
        try:
            check_rules(self.make_rules(block_bytes=1), (FullAttention(1),))
        except ValueError as error:
            return [str(error)]
        return []


_NO_SIZE = (
    "host_bytes and num_host_blocks are both None; set the size of the host tier, such "
    "as host_bytes='8GiB' or JAXKV_HOST_BYTES=8GiB. `jaxkv doctor` recommends one."
)

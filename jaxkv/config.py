"""One configuration for all parts, from code, a dict, JSON or the environment.

Each key is declared once, as a field: the keys of `OffloadRules` in
`jaxkv/scheduling/rules.py`, the others here. Errors name the value, the valid values
and the closest name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

import jax

from jaxkv._util import check_type, did_you_mean, settings, shown, shown_name
from jaxkv._util.files import read_input
from jaxkv._util.settings import ConfigError as ConfigError
from jaxkv._util.settings import Fault, Key, Settings, exclusion, keys_of, table_of
from jaxkv.observe.start import log_start
from jaxkv.policies import policy_names
from jaxkv.scheduling.boundary import TierBelow
from jaxkv.scheduling.protocol import Mover
from jaxkv.scheduling.record.record import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_FILES,
    MIN_MAX_BYTES,
    TraceRecorder,
)
from jaxkv.scheduling.rules import (
    OffloadRules,
    RuleSettings,
    check_groups,
    check_lists_victims,
)
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.worker.storage_worker import StorageWorker, open_storage
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.search.groups import GroupSpec, as_groups
from jaxkv.strict import (
    StrictOffloadScheduler,
    StrictOffloadWorker,
    StrictTransferEngine,
)
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.executors import ExecutorName
from jaxkv.transfer import AnyEngine, TransferEngine
from jaxkv.transfer.codecs import Compression, Quantised
from jaxkv.transfer.engine import DEFAULT_STAGING_BYTES
from jaxkv.transfer.kernels import KERNELS, MODES, Kernel, Mode
from jaxkv.transfer.storage.census import Bound
from jaxkv.transfer.storage.objects import MIN_SECRET_BYTES
from jaxkv.transfer.storage.store_url import StoreUrl, shown_url
from jaxkv.types import PyTree

if TYPE_CHECKING:
    # These need extras, which may be missing.
    from jaxkv.observe.catalog import BlockCatalog
    from jaxkv.observe.metrics import OffloadMetrics
    from jaxkv.observe.publisher import EventPublisher

PREFIX = "JAXKV_"
"""The prefix of environment variables."""

_TEST_PREFIX = "JAXKV_TEST_"  # Variables of this project's tests.
_FILE = settings.Text(
    "a file name without quotes; ~ and variables are not expanded, so a name that "
    "begins with ~ or $ needs ./ before it",
    # No URL, which would become a folder of that name.
    r"(?![\s~$\"'`])(?![A-Za-z][A-Za-z0-9+.-]*:/)[^\0-\x1f]{0,4095}[^\0-\x1f\s]",
)
_ENDPOINT = settings.Text(
    "an address such as tcp://127.0.0.1:5557 or ipc:///run/kv, with a port below 65536",
    r"tcp://\S+:(?:\*|(?P<port>[0-9]{1,5}))|ipc://\S+",
)
_STORE = settings.Text(
    "a folder or a URL such as file:///var/cache/kv or s3://bucket/prefix",
    r"\S(?:.{0,1022}\S)?",
)
_ADDRESS = settings.Text(
    "a host or an address such as 127.0.0.1, without a port",
    r"[\w.-]+|[0-9A-Fa-f]*(?::[0-9A-Fa-f.]*){2,7}(?:%\w+)?",
)
_MIN_HOST_BYTES = 1 << 10  # A smaller number probably lacks its unit.
_SIZES = ("host_bytes", "num_host_blocks")


@contextlib.contextmanager
def _closed_on_error(
    part: TraceRecorder | StorageWorker | OffloadMetrics | None,
) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if part is not None and hasattr(part, "close"):
            part.close()
        raise


def _check_secret(value: Any) -> str:
    secret = value.strip() if isinstance(value, str) else ""  # Files end in a newline.
    if len(secret.encode()) < MIN_SECRET_BYTES:
        raise ValueError
    return secret


class Offload(NamedTuple):
    """The parts of offloading, made for one pool."""

    engine: TransferEngine  # Moves the bytes.
    scheduler: OffloadScheduler  # Plans transfers; call `bind_device_block_pool`.
    worker: OffloadWorker  # Starts planned transfers on the engine, and reports them.


@dataclasses.dataclass(frozen=True)
class _HostSettings(Settings):
    """The host tier: its size and cache policy."""

    host_bytes: int | str | None = settings.size(
        None,
        "engine",
        "Host memory for blocks in this process; about an eighth of it stays spare. "
        "Set either this or `num_host_blocks`.",
        minimum=_MIN_HOST_BYTES,
    )
    num_host_blocks: int | None = settings.number(
        None,
        "engine, scheduler",
        "Number of host blocks, instead of `host_bytes`; spare memory comes on top.",
        unit="host blocks",
    )
    cache_policy: str = settings.name(
        "lru",
        "scheduler",
        "Policy that evicts from a full host tier: `lru`, `arc`, `hazard`, or "
        "your own ([policies.md](policies.md)).",
        names=policy_names,
    )
    executor: ExecutorName = settings.name(
        "native",
        "scheduler",
        "Run the policy as compiled functions (`native`) or as XLA programs (`xla`).",
        names=lambda: get_args(ExecutorName),
    )


@settings.documented
@dataclasses.dataclass(frozen=True)
class OffloadConfig(RuleSettings, _HostSettings):
    """Every offloading setting except the model's own.

    docs/configuration.md has a table of the keys. `TransferEngine`, `OffloadRules`,
    `OffloadScheduler` and `OffloadWorker` describe them in detail. `mode` is a rule;
    the engine's mode and kernel are `transfer_mode` and `transfer_kernel`.

    Construction checks the values. Sizes may be text, and are stored in bytes.

    Raises:
        ConfigError: Values are wrong or contradict each other.

    Example:
        >>> config = OffloadConfig.from_dict({"host_bytes": "8GiB", "mode": "lazy"})
        >>> config.host_bytes, config.cache_policy
        (8589934592, 'lru')
        >>> environ = {"JAXKV_MODE": "eager", "JAXKV_HOST_BYTES": "1GiB"}
        >>> config = OffloadConfig.from_env({"mode": "lazy"}, environ)
        >>> config.host_bytes, config.mode
        (1073741824, 'lazy')
    """

    policy_state: str | None = settings.text(
        None,
        "scheduler",
        "File that preserves, across restarts, what `hazard` has learned "
        "([policies.md](policies.md#what-hazard-needs)). Each engine needs its own.",
        _FILE,
    )
    enable_events: bool = settings.flag(
        False,
        "scheduler",
        "Keep the host tier's events for `OffloadScheduler.take_events`.",
    )
    transfer_mode: Mode | None = settings.name(
        None,
        "engine",
        "Copy blocks between device and host in one program (`fused`, only on CPU), "
        "or through a staging buffer on the device (`staged`). `null`: `fused` on "
        "CPU, otherwise `staged`.",
        names=lambda: MODES,
    )
    transfer_kernel: Kernel | None = settings.name(
        None,
        "engine",
        "How `staged` programs copy blocks: `dma` or `xla`. `null`: `dma` on TPU if "
        "its compiler accepts the layout, else `xla`.",
        names=lambda: KERNELS,
    )
    staging_bytes: int | str = settings.size(
        DEFAULT_STAGING_BYTES, "engine", "Maximum bytes of transfers in flight."
    )
    extent_bytes: int | str | None = settings.size(
        None,
        "engine",
        "Bytes per copy between device and host. `null`: 8 MiB per device, less for "
        "small blocks or a small host tier.",
    )
    compression: Quantised | None = settings.name(
        None,
        "engine",
        "Lossy compression of host blocks to `int8`; `null` keeps every bit.",
        names=lambda: get_args(Quantised),
    )
    deadline_s: float | None = settings.seconds(
        30.0,
        "worker",
        "Abandon transfers that take longer. `null`: wait without limit, as a single "
        "process with `report_after_steps` always does.",
        or_none=True,
    )
    report_after_steps: int | None = settings.number(
        None,
        "worker",
        "Report each transfer exactly this many steps after its start, as several "
        "processes require. `null`: on completion.",
        unit="steps",
    )
    check_plans: bool = settings.flag(
        False,
        "worker",
        "For debugging, compare the plans and agreements of all processes in each "
        "step.",
    )
    agreement_timeout_s: float = settings.seconds(
        60.0,
        "worker",
        "How long processes wait for one another, and for transfers that are due, "
        "before `AgreementError` ends the run.",
    )
    storage: str | None = settings.text(
        None,
        "storage",
        "A [store](storage.md) that outlives the process and that engines can share: "
        "a folder, or a URL such as `s3://BUCKET/PREFIX`.",
        _STORE,
        show=shown_url,
    )
    storage_bytes: int | str = settings.size(
        16 << 30,
        "storage",
        "Maximum bytes of this model's blocks in the store. If engines share the "
        "store, the largest of their values applies.",
    )
    storage_owner: bool = settings.flag(
        False,
        "storage",
        "Apply this engine's `storage_bytes` to all engines that share the store. Set "
        "this in only one engine.",
    )
    storage_deadline_s: float = settings.seconds(
        5.0,
        "storage",
        "Abandon store reads and writes that take longer; blocks not read by then are "
        "recomputed.",
    )
    storage_await_s: float = settings.seconds(
        1.0,
        "storage",
        "How long a request whose prompt [another engine is "
        "computing](storage.md#prefill-here-decode-there) waits for each further block "
        "in the store.",
    )
    storage_list_s: float | None = settings.seconds(
        60.0,
        "storage",
        "List the store at this interval, to find other engines' blocks. `null`: list "
        "it once. 0: never list it.",
        or_none=True,
        or_zero=True,
    )
    storage_label: str | None = settings.text(
        None,
        "storage",
        "Label of this model's blocks, which `jaxkv store ls` shows. `null`: vLLM's "
        "connector names model, dtype, block size and version. An empty text: none.",
    )
    storage_secret: str | None = settings.declare(
        None,
        Key(
            "storage",
            "Secret of at least 16 bytes that [signs blocks](storage.md#security); "
            "other blocks are not read. `null`: blocks have only a checksum.",
            "",
            "a text of at least 16 bytes",
            _check_secret,
            is_secret=True,
        ),
    )
    events_endpoint: str | None = settings.text(
        None,
        "events",
        "Address where `make_publisher` publishes events, `tcp://HOST:PORT` or "
        "`ipc://PATH`. Turns on `enable_events`.",
        _ENDPOINT,
    )
    events_replay_endpoint: str | None = settings.text(
        None, "events", "Address that answers replay requests.", _ENDPOINT
    )
    events_topic: str = settings.text("", "events", "Topic that subscribers filter by.")
    metrics_port: int | None = settings.number(
        None,
        "metrics",
        "HTTP port of `serve_metrics`; 0 for any free port, `null` for none.",
        minimum=0,
        maximum=65535,
    )
    metrics_address: str = settings.text(
        "127.0.0.1",
        "metrics",
        "Address of the metrics port; by default only this machine can reach it.",
        _ADDRESS,
    )
    record: str | None = settings.text(
        None,
        "record",
        "File to record requests in ([sizing.md](sizing.md#record-requests)), "
        "compressed if its name ends in `.gz`.",
        _FILE,
    )
    record_max_bytes: int | str = settings.size(
        DEFAULT_MAX_BYTES,
        "record",
        "Maximum bytes per file. A full file becomes `FILE.1`, and a new one begins.",
        minimum=MIN_MAX_BYTES,
    )
    record_max_files: int = settings.number(
        DEFAULT_MAX_FILES,
        "record",
        "Recordings to keep, including the current file.",
        unit="files",
    )
    record_key_file: str | None = settings.text(
        None,
        "record",
        "File with the secret of [recorded ids](sizing.md#privacy-of-recordings), "
        "created if missing; engines whose recordings are replayed together must "
        "share it. `null`: a random secret that is not kept.",
        _FILE,
    )

    strict: bool = settings.flag(
        False,
        "strict",
        "[Strict mode](integrate.md#test-your-engine), which finds mistakes in an "
        "engine's tests.",
    )
    strict_seed: int = settings.number(
        0, "strict", "Seed of the delays in strict mode.", minimum=0
    )
    strict_fail_loads: int = settings.number(
        0,
        "strict",
        "Fail one in this many loads, to test recomputing; 0 for none.",
        unit="loads",
        minimum=0,
    )

    def __repr__(self) -> str:
        """Write all settings, without secrets."""
        values = {
            name: KEYS[name].show(value) if isinstance(value, str) else value
            for name, value in self.to_dict().items()
            if not KEYS[name].is_secret
        }
        settings = (f"{name}={value!r}" for name, value in values.items())
        return f"{type(self).__name__}({', '.join(settings)})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OffloadConfig:
        """Make a configuration from keys and values.

        Args:
            values: The settings that differ from the defaults.

        Raises:
            ConfigError: Keys are unknown, or values are wrong or contradictory.
        """
        check_type(Mapping, "a mapping from keys to values", values=values)
        if faults := unknown(values, "key"):
            raise ConfigError(faults)
        return cls(**values)

    @classmethod
    def from_json(cls, text: str | bytes) -> OffloadConfig:
        """Make a configuration from a JSON object, as text or UTF-8 bytes.

        Raises:
            ConfigError: It is not a JSON object, or `from_dict` refuses it.
        """
        return cls.from_dict(parse_json(text))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> OffloadConfig:
        """Make a configuration from a file that holds a JSON object.

        Raises:
            ConfigError: See `from_json`; the message names the file.
            OSError: The file cannot be read.
        """
        try:
            return cls.from_json(read_input(path, 1 << 20))
        except ConfigError as error:
            faults = [f"{os.fspath(path)}: {fault}" for fault in error.faults]
            raise ConfigError(faults) from None

    @classmethod
    def from_env(
        cls,
        explicit: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> OffloadConfig:
        """Make a configuration from environment variables.

        A key's variable is its name in capitals after ``JAXKV_``. An empty variable
        counts as unset; with a store, an empty secret is refused. ``1``, ``true``,
        ``yes`` and ``on`` are true, ``0``, ``false``, ``no`` and ``off`` false,
        ``none`` is None, in upper or lower case.

        Args:
            explicit: Keys and values that override the environment.
            environ: The environment; the process's if None.

        Raises:
            ConfigError: A variable has an unknown name or a wrong value, or see
                `from_dict`.
        """
        check_type(Mapping | None, "a mapping", explicit=explicit, environ=environ)
        explicit = dict(explicit or {})
        environ = os.environ if environ is None else environ
        values, faults = read_environment(environ)
        faults = unknown(explicit, "key") + faults
        is_sealed = "storage_secret" in explicit
        if (values | explicit).get("storage") is not None and not is_sealed:
            faults += blank_secret_faults(environ)
        if faults:
            raise ConfigError(faults)
        if any(explicit.get(name) is not None for name in _SIZES):
            for name in _SIZES:  # An explicit size overrides both.
                values.pop(name, None)
        try:
            return cls(**(values | explicit))
        except ConfigError as error:
            used = values.keys() - explicit.keys()
            faults = [with_variables(fault, used) for fault in error.faults]
            raise ConfigError(faults) from None

    def to_dict(self) -> dict[str, Any]:
        """Return all keys and values, for `from_dict` and JSON."""
        return dataclasses.asdict(self)

    def make_engine(
        self, pool: PyTree, *, block_axis: PyTree = 0, head_axis: PyTree = -2
    ) -> TransferEngine:
        """Make the transfer engine of a pool, and allocate its host memory.

        Args:
            pool: A pool with the layout of all later pools.
            block_axis: The axis of the blocks; see `TransferEngine`.
            head_axis: The axis of the heads; see `Compression`.

        Raises:
            ValueError: No size is set, or `TransferEngine` refuses an argument.
            MemoryError: There is too little host memory.
        """
        if self.host_bytes is None and self.num_host_blocks is None:
            raise ValueError(
                "host_bytes and num_host_blocks are both None; set the size of the "
                "host tier, such as host_bytes='8GiB' or JAXKV_HOST_BYTES=8GiB. "
                "`jaxkv doctor` recommends one."
            )
        compression = None
        if self.compression is not None:
            compression = Compression(self.compression, head_axis)
        make: Callable[..., TransferEngine] = TransferEngine
        if self.strict:
            make = partial(
                StrictTransferEngine,
                strict_seed=self.strict_seed,
                strict_fail_loads=self.strict_fail_loads,
            )
        return make(
            pool,
            self.num_host_blocks,
            host_bytes=self.host_bytes,
            mode=self.transfer_mode,
            kernel=self.transfer_kernel,
            block_axis=block_axis,
            blocks_per_host_block=self.blocks_per_host_block,
            staging_bytes=self.staging_bytes,
            extent_bytes=self.extent_bytes,
            compression=compression,
        )

    def make_rules(self, block_bytes: int = 0) -> OffloadRules:
        """Make the rules of a scheduler.

        Args:
            block_bytes: Bytes of a device block, which `skip_slow_loads` needs.

        Raises:
            ValueError: `skip_slow_loads` is set and `block_bytes` is 0.
        """
        chosen = {name: getattr(self, name) for name in keys_of(RuleSettings)}
        if self.storage is not None and self.storage_probe_s is None:
            chosen["storage_probe_s"] = StoreUrl.parse(self.storage).probe_s
        return OffloadRules(**chosen, block_bytes=block_bytes)

    def make_scheduler(
        self,
        groups: int | GroupSpec | Sequence[GroupSpec],
        num_host_blocks: int | None = None,
        *,
        block_bytes: int = 0,
        num_storage_blocks: int = 0,
        policy_clock: Callable[[], float] | None = None,
        tiers_below: Sequence[TierBelow] = (),
        num_device_blocks: int | None = None,
    ) -> OffloadScheduler:
        """Make the scheduler and, with `record`, its recorder.

        Close its `recorder` when the engine stops, or let the interpreter close it.

        Args:
            groups: The groups of the model's layers.
            num_host_blocks: Host blocks of the engine; None for `self.num_host_blocks`.
            block_bytes: Bytes of a device block, which `skip_slow_loads` needs.
            num_storage_blocks: Host blocks that the store may hold,
                `worker.storage.num_blocks(config.storage_bytes)`; 0 for no store.
            policy_clock: See `OffloadScheduler`. Required for several processes if
                the cache policy depends on time, and with `retention`.
            tiers_below: See `OffloadScheduler`.
            num_device_blocks: `engine.num_device_blocks`; None if unknown.

        Raises:
            ValueError: The number of host blocks is unknown, or `OffloadScheduler`
                refuses an argument.
            OSError: See `make_recorder`.
        """
        if num_host_blocks is None:
            num_host_blocks = self.num_host_blocks
        if num_host_blocks is None:
            raise ValueError(
                "num_host_blocks=None must be a number, as the configuration has none: "
                "pass engine.num_host_blocks."
            )
        rules = self.make_rules(block_bytes)
        recorder = self.make_recorder()
        with _closed_on_error(recorder):
            make = StrictOffloadScheduler if self.strict else OffloadScheduler
            return make(
                groups,
                num_host_blocks,
                self.cache_policy,
                self.enable_events or self.events_endpoint is not None,
                rules=rules,
                executor=self.executor,
                num_storage_blocks=num_storage_blocks,
                policy_clock=policy_clock,
                recorder=recorder,
                tiers_below=tiers_below,
                policy_state=self.policy_state,
                num_device_blocks=num_device_blocks,
            )

    def make_worker(
        self,
        engine: AnyEngine,
        *,
        storage_namespace: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        movers: Sequence[Mover] = (),
        storage: StorageWorker | None = None,
    ) -> OffloadWorker:
        """Make the worker, and open the store if one is configured.

        Args:
            engine: The engine whose blocks it moves.
            storage_namespace: See `namespace` of `open_storage`.
            clock: Returns seconds; must never go back.
            movers: See `OffloadWorker`.
            storage: An open store; None to open the configured one.

        Raises:
            ValueError: `OffloadWorker` refuses an argument.
            Exception: See `open_storage`.
        """
        if storage is None:
            storage = self.open_storage(
                engine, namespace=storage_namespace, clock=clock
            )
        with _closed_on_error(storage):
            make = StrictOffloadWorker if self.strict else OffloadWorker
            return make(
                engine,
                deadline_s=self.deadline_s,
                report_after_steps=self.report_after_steps,
                check_plans=self.check_plans,
                agreement_timeout_s=self.agreement_timeout_s,
                clock=clock,
                storage=storage,
                movers=movers,
            )

    def open_storage(
        self,
        engine: AnyEngine,
        *,
        namespace: bytes = b"",
        num_blocks: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> StorageWorker | None:
        """Open the store; None without `storage`.

        Args:
            engine: The engine with the host blocks.
            namespace: Identifies everything that blocks depend on, like `Namespace`:
                blocks of other namespaces are neither listed nor read.
            num_blocks: Maximum host blocks in the store; None: by `storage_bytes`.
            clock: Returns seconds; must never go back.

        Raises:
            ValueError: No block fits, or the URL is wrong.
            ImportError: The store needs an extra that is missing.
            StoreError: The store cannot be used.
        """
        if self.storage is None:
            return None
        storage = open_storage(
            engine,
            self.storage,
            namespace=namespace,
            secret=self.storage_secret,
            shard=jax.process_index(),
            num_shards=jax.process_count(),
            deadline_s=self.storage_deadline_s,
            await_s=self.storage_await_s,
            list_every_s=self.storage_list_s,
            max_blocks=self.max_storage_blocks,
            clock=clock,
        )
        with _closed_on_error(storage):
            if num_blocks is None:  # Refuses too few bytes.
                num_blocks = storage.num_blocks(cast(int, self.storage_bytes))
            storage.bound = Bound(num_blocks, self.storage_owner)
            storage.storage_io.label = self.storage_label or ""
        return storage

    def make_recorder(self) -> TraceRecorder | None:
        """Make a `TraceRecorder`; None without `record`.

        Of several processes of one model, only the first one records.

        Raises:
            ValueError: The secret is too short.
            OSError: The file cannot be written, or another process records to it.
        """
        if self.record is None:
            return None
        if jax.distributed.is_initialized() and jax.process_index() > 0:
            return None
        return TraceRecorder(
            self.record,
            max_bytes=self.record_max_bytes,
            max_files=self.record_max_files,
            key_file=self.record_key_file,
        )

    def make_publisher(
        self,
        groups: int | GroupSpec | Sequence[GroupSpec] | None = None,
        *,
        catalog: BlockCatalog | None = None,
        data_parallel_rank: int = 0,
    ) -> EventPublisher | None:
        """Make an `EventPublisher` with these arguments; None without an endpoint.

        Raises:
            ImportError: The extra ``events`` is missing.
            ValueError: An address is wrong.
            OSError: An address is not available.
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
        """Serve `OffloadMetrics` with these arguments; None without `metrics_port`.

        Raises:
            ImportError: The extra ``metrics`` is missing.
            OSError: The address is not available.
        """
        if self.metrics_port is None:
            return None
        from jaxkv.observe.metrics import OffloadMetrics, registry_to_serve

        metrics = OffloadMetrics(scheduler, worker, pool, registry_to_serve(), labels)
        with _closed_on_error(metrics):
            metrics.serve(self.metrics_port, self.metrics_address)
        return metrics

    def connect(
        self,
        pool: PyTree,
        groups: int | GroupSpec | Sequence[GroupSpec],
        *,
        block_axis: PyTree = 0,
        head_axis: PyTree = -2,
        storage_namespace: bytes = b"",
        policy_clock: Callable[[], float] | None = None,
    ) -> Offload:
        """Make all parts for one pool, and log a line that describes them.

        The method for each part describes its arguments and errors.
        """
        groups = as_groups(groups)
        # Check before allocating gigabytes.
        check_groups(self, groups)
        engine = self.make_engine(pool, block_axis=block_axis, head_axis=head_axis)
        block_bytes = engine.block_bytes // engine.blocks_per_host_block
        worker = self.make_worker(engine, storage_namespace=storage_namespace)
        storage, num_storage_blocks = worker.storage, 0
        if storage is not None:
            num_storage_blocks = storage.num_blocks(cast(int, self.storage_bytes))
        with _closed_on_error(storage):
            scheduler = self.make_scheduler(
                groups,
                engine.num_host_blocks,
                block_bytes=block_bytes,
                num_storage_blocks=num_storage_blocks,
                policy_clock=policy_clock,
                num_device_blocks=engine.num_device_blocks,
            )
        log_start(
            engine,
            policy=self.cache_policy,
            executor=self.executor,
            storage=storage,
            num_storage_blocks=num_storage_blocks,
            storage_write=self.storage_write,
            ports=self._ports(),
        )
        return Offload(engine, scheduler, worker)

    def _ports(self) -> list[str]:
        """Describe the ports of `serve_metrics` and `make_publisher`."""
        address = f"{self.metrics_address}:{self.metrics_port or 'any free port'}"
        ports = {
            "metrics": None if self.metrics_port is None else address,
            "events": self.events_endpoint,
            "replays of events": self.events_replay_endpoint,
        }
        return [f"{name} at {where}" for name, where in ports.items() if where]

    def _contradictions(self) -> Iterator[Fault]:
        yield from super()._contradictions()
        if self.host_bytes is not None and self.num_host_blocks is not None:
            yield exclusion(
                *("host_bytes", shown(self.host_bytes)),
                *("num_host_blocks", shown(self.num_host_blocks)),
                "both set the size of the host tier.",
            )
        if self.record is not None and self.record == self.record_key_file:
            yield Fault(
                "{record}={} and {record_key_file} must be two files: the record must "
                "not contain the secret that protects it.",
                shown(self.record),
            )
        if self.events_replay_endpoint is not None and self.events_endpoint is None:
            yield Fault(
                "{events_replay_endpoint}={} needs an {events_endpoint}, whose events "
                "it replays.",
                shown(self.events_replay_endpoint),
            )
        if self.storage is None:
            if self.storage_secret is not None:
                yield Fault("{storage_secret} needs {storage}: it signs its objects.")
            return
        try:
            StoreUrl.parse(self.storage)
            plain = self.cache_policy == "lru" and self.executor == "native"
            check_lists_victims(self.storage_write, plain and not self.retention)
        except ConfigError as error:
            yield from error.faults
        except ValueError as error:
            yield storage_fault(error)
        if self.world_size > 1:
            yield exclusion(
                *("storage", KEYS["storage"].shown(self.storage)),
                *("world_size", self.world_size),
                "a worker does not know which shard of a block it stores.",
            )


KEYS: Mapping[str, Key] = MappingProxyType(keys_of(OffloadConfig))
"""All keys, in the order of the fields."""


def table_of_keys() -> str:
    """Return the table of docs/configuration.md."""
    defaults = OffloadConfig().to_dict()
    return table_of({name: (key, defaults[name], "") for name, key in KEYS.items()})


def variable_of(key: str) -> str:
    """Return the environment variable of a key."""
    return PREFIX + key.upper()


def unknown(
    keys: Iterable[object], kind: str, spell: Callable[[str], str] = str
) -> list[str]:
    """Return a fault for each unknown key (a `kind`), with the closest key."""
    valid = {spell(key) for key in KEYS}
    faults = []
    for name in keys:
        if name not in valid:
            text = shown_name(name)
            plain = (name if isinstance(name, str) else text).lower()
            plain = re.sub("^jax[_-]?kv[_-]?", "", plain)
            suggestion = did_you_mean(plain, list(KEYS), spell)
            faults.append(f"unknown {kind} {text}: {suggestion}")
    return faults


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are settings or misspelt settings, sorted."""

    def letters(variable: str) -> str:
        return re.sub("[^A-Z]", "", variable.upper())

    expected = {letters(variable_of(name)) for name in KEYS}
    return {
        variable: environ[variable]
        for variable in sorted(environ)
        if (variable.startswith(PREFIX) or letters(variable) in expected)
        and not variable.startswith(_TEST_PREFIX)
    }


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Read settings from variables; return the values and the variables' faults."""
    variables = variables_of(environ)
    faults = unknown(variables, "variable", variable_of)
    values = {}
    for name, key in KEYS.items():
        text = variables.get(variable_of(name), "").strip()
        try:
            if text:
                values[name] = key.read(text, is_text=True)
        except ValueError as error:
            faults.append(f"{variable_of(name)}={error}")
    return values, faults


def blank_secret_faults(environ: Mapping[str, str]) -> list[str]:
    """Return a fault if the variable of a store's secret is set but empty."""
    variable = variable_of("storage_secret")
    if environ.get(variable, variable).strip().lower() not in ("", "none"):
        return []
    return [
        f"{variable} is set but empty, so blocks would not be signed: set it to at "
        f"least {MIN_SECRET_BYTES} bytes, or unset it"
    ]


def storage_fault(error: ValueError) -> Fault:
    """Return the fault of a store's URL, whose message begins with ``storage=``."""
    return Fault("{storage}{}", str(error).removeprefix("storage"))


def with_variables(fault: Fault, used: Set[str]) -> str:
    """Append to a fault the environment variables of its settings."""
    named = [variable_of(name) for name in KEYS if name in used and name in fault.names]
    return f"{fault} ({', '.join(named)} in the environment)" if named else fault


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Read a JSON object without repeated keys, as text or UTF-8 bytes."""
    if not isinstance(text, str | bytes | bytearray):
        raise ConfigError([f"{shown(text)} must be JSON, as a str or as bytes"])
    try:
        # `json` itself would guess an encoding, such as UTF-16.
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        values = json.loads(text, object_pairs_hook=_distinct)
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        fault = f"this is not JSON: it is not UTF-8 text ({error.reason})"
    except RecursionError:
        fault = "this is nested too deeply to be a JSON object of keys and values"
    except ValueError as error:  # Wrong syntax.
        fault = f"this is not JSON: {error}"
    else:
        if isinstance(values, dict):
            return values
        fault = f"{shown(values)} must be a JSON object of keys and values"
    raise ConfigError([fault])


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(name for name, _ in pairs)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        faults = [f"key {shown_name(name)} occurs more than once" for name in repeated]
        raise ConfigError(faults)
    return dict(pairs)

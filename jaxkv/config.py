"""One configuration for all parts, from code, a dict, JSON or the environment.

Each key is declared once, as a field of `OffloadConfig`. Its metadata says what its
values are, in Python and as text, which parts it reaches and what it is for; checks,
messages and the table of docs/configuration.md come from there. What is refused is told
with the value, with what would be right, and with the nearest name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import pathlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
)

import jax

from jaxkv._util import nearest, parse_bytes, shown, shown_name, size_text
from jaxkv.policies import policy_names
from jaxkv.scheduling.record import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_FILES,
    LEAST_MAX_BYTES,
    TraceRecorder,
)
from jaxkv.scheduling.rules import OffloadRules, StorageWrite, check_rules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.storage_worker import open_storage
from jaxkv.scheduling.worker import OffloadWorker
from jaxkv.search.groups import FullAttention, GroupSpec, as_groups
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.executors import ExecutorName
from jaxkv.transfer import TransferEngine
from jaxkv.transfer.codecs import Compression, Quantised
from jaxkv.transfer.engine import DEFAULT_STAGING_BYTES
from jaxkv.transfer.kernels import KERNELS, MODES, Kernel, Mode
from jaxkv.transfer.storage.objects import LEAST_SECRET_BYTES
from jaxkv.transfer.storage.store import shown_url
from jaxkv.types import PyTree

if TYPE_CHECKING:
    # They need extras, which not everybody has.
    from jaxkv.observe.catalog import BlockCatalog
    from jaxkv.observe.metrics import OffloadMetrics
    from jaxkv.observe.publisher import EventPublisher

Scope: TypeAlias = Literal[
    "engine",
    "scheduler",
    "engine, scheduler",
    "worker",
    "storage",
    "events",
    "metrics",
    "record",
]
"""Which parts a key reaches: `TransferEngine`, `OffloadScheduler`, `OffloadWorker`, the
store behind the host (`open_storage`), `EventPublisher` and `OffloadMetrics` of
`jaxkv.observe`, and `TraceRecorder`."""

PREFIX = "JAXKV_"
"""What the names of the environment's variables begin with."""

# Of the tests of this project, and no part of a configuration.
_TEST_PREFIX = "JAXKV_TEST_"

_SIZES = ("host_bytes", "num_host_blocks")

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class ConfigError(ValueError):
    """A configuration that cannot be right.

    Attributes:
        faults: What is wrong with it, each in a sentence.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


@dataclasses.dataclass(frozen=True)
class Key:
    """What a key of a configuration takes.

    Attributes:
        scope: Which parts it reaches.
        about: What it is for, in Markdown.
        unit: Of its values; empty for names and flags.
        expected: What its values are, for messages; empty if they are names.
        check: Gives a Python value as it is kept; raises ValueError or TypeError.
        parse: Reads a text, which `check` is to see next; raises ValueError.
        may_be_none: Whether None is one of them, as text ``none``.
        names: What there is, if its values are names.
        is_secret: Whether values are to be shown to nobody.
        show: Gives a value as anybody may see it.
    """

    scope: Scope
    about: str
    unit: str
    expected: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any] = str
    may_be_none: bool = False
    names: Callable[[], Sequence[str]] = tuple
    is_secret: bool = False
    show: Callable[[str], str] = str

    def read(self, given: Any, *, is_text: bool = False) -> Any:
        """Give a value as it is kept.

        Args:
            given: From Python or JSON; or a text that stands for it.
            is_text: Whether it is the latter, as in the environment.

        Raises:
            ValueError: It is no such value, with what would be right.
        """
        if is_text:
            given = given.strip()
        is_none = given.lower() == "none" if is_text else given is None
        if is_none and self.may_be_none:
            return None
        try:
            return self.check(self.parse(given) if is_text else given)
        except (TypeError, ValueError, OverflowError, RecursionError):
            raise ValueError(self._refusal(given)) from None

    def shown(self, value: object) -> str:
        """Write a value for a message, but for what nobody is to see in it."""
        return shown(self.show(value) if isinstance(value, str) else value)

    def _refusal(self, value: object) -> str:
        names = list(self.names())
        expected = f"one of {', '.join(names)}" if names else self.expected
        near = nearest(value.lower(), names) if isinstance(value, str) else None
        hides = self.is_secret and isinstance(value, str)
        text = "..." if hides else self.shown(value)
        return (
            f"{text} must be {expected}"
            + (", or None" if self.may_be_none else "")
            + (f": did you mean {near}?" if near else "")
        )


_T = TypeVar("_T")


def _declare(default: _T, key: Key) -> _T:
    """Declare a field, which may be None if that is its default.

    As `dataclasses.field`, it says that it gives the default, for type checkers.
    """
    if default is None:
        key = dataclasses.replace(key, may_be_none=True)
    return dataclasses.field(default=default, metadata={"key": key})


def _size(default: _T, scope: Scope, about: str, *, least: int = 1) -> _T:
    """Declare a size in bytes, such as ``"8GiB"``, from `least` on."""

    def check(value: Any) -> int:
        num_bytes = parse_bytes(value)
        if num_bytes < least:
            raise ValueError
        return num_bytes

    expected = "a size such as 64MiB, 1GiB or a number of bytes"
    if least > 1:
        expected += f", at least {least}"
    key = Key(scope, about, "bytes", expected, check)
    return _declare(default, key)


def _number(
    default: _T,
    scope: Scope,
    about: str,
    *,
    unit: str,
    least: int,
    most: int | None = None,
) -> _T:
    """Declare a whole number from `least` on, perhaps up to `most`."""

    def check(value: Any) -> int:
        whole = operator.index(value)
        too_large = most is not None and whole > most
        if isinstance(value, bool) or whole < least or too_large:
            raise ValueError
        return whole

    expected = f"a whole number from {least}" + (f" to {most}" if most else "")
    key = Key(scope, about, unit, expected, check, _parse_int)
    return _declare(default, key)


def _seconds(default: _T, scope: Scope, about: str, *, or_none: bool = False) -> _T:
    """Declare a time."""

    def check(value: Any) -> float:
        if isinstance(value, bool | str) or not 0 < value < math.inf:
            raise ValueError
        return float(value)

    expected = "a number of seconds above 0"
    key = Key(scope, about, "s", expected, check, float, or_none)
    return _declare(default, key)


def _flag(default: _T, scope: Scope, about: str) -> _T:
    """Declare what is true or false."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    key = Key(scope, about, "", "true or false", check, _parse_flag)
    return _declare(default, key)


def _name(
    default: _T,
    scope: Scope,
    about: str,
    *,
    names: Callable[[], Sequence[str]],
) -> _T:
    """Declare one of several names."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in names():
            raise ValueError
        return value

    key = Key(scope, about, "", "", check, names=names)
    return _declare(default, key)


def _text(
    default: _T,
    scope: Scope,
    about: str,
    *,
    expected: str = "a text of valid Unicode",
    pattern: str = "(?s:.*)",
    show: Callable[[str], str] = str,
) -> _T:
    """Declare a text of a pattern, whose group `port`, if any, is below 65536."""

    def check(value: Any) -> str:
        match = re.fullmatch(pattern, value)
        if not match or int(match.groupdict().get("port") or 0) > 65535:
            raise ValueError
        value.encode()  # Refuses a lone surrogate, which nobody could send.
        return cast(str, value)

    key = Key(scope, about, "", expected, check, show=show)
    return _declare(default, key)


def _file(default: _T, scope: Scope, about: str) -> _T:
    """Declare the name of a file."""
    expected = "the name of a file"
    return _text(default, scope, about, expected=expected, pattern=r"[^\0]{1,4096}")


def _endpoint(default: _T, scope: Scope, about: str) -> _T:
    """Declare an address of ZeroMQ."""
    expected = (
        "an address such as tcp://127.0.0.1:5557 or ipc:///run/kv, with a port below "
        "65536"
    )
    pattern = r"tcp://\S+:(?:\*|(?P<port>[0-9]{1,5}))|ipc://\S+"
    return _text(default, scope, about, expected=expected, pattern=pattern)


def _check_secret(value: Any) -> str:
    if not isinstance(value, str) or len(value.encode()) < LEAST_SECRET_BYTES:
        raise ValueError
    return value


def _parse_int(text: str) -> int:
    if not re.fullmatch("[+-]?[0-9]{1,18}", text):
        raise ValueError
    return int(text)


def _parse_flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError
    return _FLAGS[text.lower()]


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
    that of the rules, the engine's is `transfer_mode`, as its `kernel` is
    `transfer_kernel`.

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

    host_bytes: int | str | None = _size(
        None,
        "engine",
        "Host memory for blocks in this process, spare room included. This or the "
        "next key is needed to make an engine.",
    )
    num_host_blocks: int | None = _number(
        None,
        "engine, scheduler",
        "The same as a number of blocks; spare memory comes on top.",
        unit="host blocks",
        least=1,
    )
    blocks_per_host_block: int = _number(
        1,
        "engine, scheduler",
        "How many device blocks a host block holds. With more than one, transfers "
        "are larger, but blocks are stored and evicted only together; for models "
        "with one group, of full attention, and eager stores.",
        unit="device blocks",
        least=1,
    )
    cache_policy: str = _name(
        "lru",
        "scheduler",
        "Which blocks a full host tier evicts: `lru`, `arc`, `arc_fixed`, `slru`, "
        "`hazard`, or a policy of your own.",
        names=policy_names,
    )
    executor: ExecutorName = _name(  # noqa: RUF009 - it is a field
        "native",
        "scheduler",
        "What runs the policy: compiled functions on the host (`native`), or its "
        "pure functions as XLA programs (`xla`).",
        names=lambda: get_args(ExecutorName),
    )
    mode: Literal["eager", "lazy"] = _name(
        "eager",
        "scheduler",
        "Store blocks when they are computed (`eager`), or when the device is about "
        "to evict them (`lazy`).",
        names=lambda: ("eager", "lazy"),
    )
    max_num_batched_tokens: int = _number(
        8192,
        "scheduler",
        "The most tokens that a step computes; lazy stores keep ahead of twice as "
        "many.",
        unit="tokens",
        least=1,
    )
    store_threshold: int = _number(
        0,
        "scheduler",
        "Store only blocks that at least this many requests have asked for; 0 or 1 "
        "stores all.",
        unit="requests",
        least=0,
    )
    max_unseen_blocks: int | None = _number(
        None,
        "scheduler",
        "Of a prompt's blocks that no request has asked for before, store only this "
        "many, from the first on, and the others once they are asked for again; "
        "`null` stores all. Generated tokens do not count.",
        unit="host blocks",
        least=0,
    )
    prompt_only: bool = _flag(
        False, "scheduler", "Do not store generated tokens. Not with lazy stores."
    )
    max_offload_tokens: int | None = _number(
        None,
        "scheduler",
        "Store at most this many tokens of a request, from the first on; `null` "
        "stores all. Not with lazy stores.",
        unit="tokens",
        least=1,
    )
    delay_shared_loads: bool = _flag(
        False,
        "scheduler",
        "Let a request wait while another loads one of its blocks, to find it on "
        "the device then, rather than load it twice.",
    )
    max_blocks_in_flight: int | None = _number(
        None,
        "scheduler",
        "The most blocks in flight at a time, in either direction; loads go first. "
        "`null` for no bound.",
        unit="device blocks",
        least=1,
    )
    skip_slow_loads: bool = _flag(
        False,
        "scheduler",
        "Decline a load that would take longer than computing its tokens, by the "
        "rates given to `OffloadScheduler.note_rates`.",
    )
    copy_on_device: bool = _flag(
        True,
        "scheduler",
        "Copy a block that the device still holds after a gap in a prefix, rather "
        "than load it.",
    )
    load_in_step: bool = _flag(
        False,
        "scheduler",
        "Let the step that first runs a request write its loads itself "
        "(`OffloadWorker.take_step_loads`), so that no request waits for one.",
    )
    flush_on_preemption: bool = _flag(
        False,
        "scheduler",
        "Before a step that preempts, wait for all transfers in flight.",
    )
    retention: bool = _flag(
        False,
        "scheduler",
        "Let a request say how long its blocks are kept, by a priority that fades or "
        "ends (`Retention`). Without this, `request.retention` is ignored.",
    )
    remember_drops: int = _number(
        0,
        "scheduler",
        "For this many of the last blocks that were evicted or not stored, remember "
        "why, for `OffloadScheduler.explain`.",
        unit="host blocks",
        least=0,
    )
    world_size: int = _number(
        1,
        "scheduler",
        "How many workers report each transfer to one scheduler.",
        unit="workers",
        least=1,
    )
    enable_events: bool = _flag(
        False,
        "scheduler",
        "Keep the host tier's events for `OffloadScheduler.take_events`.",
    )
    transfer_mode: Mode | None = _name(  # noqa: RUF009 - it is a field
        None,
        "engine",
        "How blocks are copied: by one program between device and host memory "
        "(`fused`), or through a staging buffer on the device (`staged`); `null` for "
        "`fused` on CPU, and `staged` on GPU and TPU.",
        names=lambda: MODES,
    )
    transfer_kernel: Kernel | None = _name(  # noqa: RUF009 - it is a field
        None,
        "engine",
        "How programs of the mode `staged` copy blocks, `dma` or `xla`; `null` for "
        "`dma` on TPU, if its compiler accepts the layout.",
        names=lambda: KERNELS,
    )
    staging_bytes: int | str = _size(
        DEFAULT_STAGING_BYTES, "engine", "The most bytes in flight at a time."
    )
    extent_bytes: int | str | None = _size(
        None,
        "engine",
        "How many bytes move in one piece; `null` for 8 MiB, or less if blocks or "
        "the host tier are small.",
    )
    layer_groups: int = _number(
        1,
        "engine",
        "In how many parts a load arrives, the first layers first.",
        unit="parts",
        least=1,
    )
    compression: Quantised | None = _name(  # noqa: RUF009 - it is a field
        None,
        "engine",
        "Keep blocks in less room on the host, as `int8` or `fp8`, which loses "
        "bits; `null` keeps every bit.",
        names=lambda: get_args(Quantised),
    )
    deadline_s: float | None = _seconds(
        30.0,
        "worker",
        "Abandon a transfer that takes longer; `null` waits without limit. Several "
        "processes wait this long for a transfer that is due; one process with "
        "`report_after_steps` waits without limit in any case.",
        or_none=True,
    )
    report_after_steps: int | None = _number(
        None,
        "worker",
        "Report each transfer exactly this many steps after its own, as several "
        "processes need; `null` reports it as soon as it is done.",
        unit="steps",
        least=1,
    )
    check_plans: bool = _flag(
        False,
        "worker",
        "In each step, compare what all processes planned, and what they agreed on; "
        "for debugging.",
    )
    agreement_timeout_s: float = _seconds(
        60.0,
        "worker",
        "How long several processes wait for one another, and for transfers that are "
        "due, before they end the run with `AgreementError`.",
    )
    storage: str | None = _text(
        None,
        "storage",
        "A store behind the host that outlives the process and that engines share: a "
        "folder, or a URL such as `file:///PATH`, `s3://BUCKET/PREFIX`, "
        "`gs://BUCKET/PREFIX` or `redis://HOST:PORT` ([storage.md](storage.md)). "
        "`null` for none.",
        expected="a folder or a URL such as file:///var/cache/kv or s3://bucket/prefix",
        pattern=r"\S(?:.{0,1022}\S)?",
        show=shown_url,
    )
    storage_bytes: int | str = _size(
        16 << 30,
        "storage",
        "The most bytes that this model's blocks may take in the store.",
    )
    storage_write: StorageWrite = _name(  # noqa: RUF009 - it is a field
        "on_reuse",
        "scheduler",
        "Which blocks are written to the store: those that are asked for a second "
        "time (`on_reuse`), those that the host is about to evict (`on_evict`; only "
        "with `lru`, and without `retention`), or all that reach the host "
        "(`through`).",
        names=lambda: get_args(StorageWrite),
    )
    max_storage_blocks: int = _number(
        128,
        "scheduler",
        "The most blocks on their way to the store, or from it, at a time.",
        unit="host blocks",
        least=1,
    )
    storage_deadline_s: float = _seconds(
        5.0,
        "storage",
        "Time limit for reads from the store and writes to it. When a read times out, "
        "its blocks are computed; a write that times out is abandoned.",
    )
    storage_list_s: float | None = _seconds(
        60.0,
        "storage",
        "List the store again after this time, to find what others have written; "
        "`null` lists it once.",
        or_none=True,
    )
    storage_secret: str | None = dataclasses.field(
        default=None,
        repr=False,
        metadata={
            "key": Key(
                "storage",
                "Secret of at least 16 bytes that seals what is written with an HMAC, "
                "so that nobody without it can plant blocks in the store. `null` for a "
                "checksum only.",
                "",
                "a text of at least 16 bytes",
                _check_secret,
                may_be_none=True,
                is_secret=True,
            )
        },
    )
    events_endpoint: str | None = _endpoint(
        None,
        "events",
        "Address on which `make_publisher` publishes events, `tcp://HOST:PORT` or "
        "`ipc://PATH`; setting it turns the host tier's events on. `null` for none.",
    )
    events_replay_endpoint: str | None = _endpoint(
        None, "events", "Address that answers requests for a replay."
    )
    events_topic: str = _text("", "events", "Topic that subscribers filter by.")
    metrics_port: int | None = _number(
        None,
        "metrics",
        "Port on which `serve_metrics` serves metrics over HTTP; 0 for any free "
        "port, `null` for none.",
        unit="",
        least=0,
        most=65535,
    )
    metrics_address: str = _text(
        "127.0.0.1",
        "metrics",
        "Address on which it serves them; by default only this machine can reach it.",
        expected="an address such as 127.0.0.1",
        pattern=r"\S+",
    )
    record: str | None = _file(
        None,
        "record",
        "File in which requests are recorded, for `jaxkv replay`; compressed if its "
        "name ends in `.gz`. `null` for none.",
    )
    record_max_bytes: int | str = _size(
        DEFAULT_MAX_BYTES,
        "record",
        "The most bytes of that file; then it is renamed to `FILE.1`, and a new one "
        "begins.",
        least=LEAST_MAX_BYTES,
    )
    record_max_files: int = _number(
        DEFAULT_MAX_FILES,
        "record",
        "How many of these files are kept, including the one that is being written.",
        unit="files",
        least=1,
    )
    record_key_file: str | None = _file(
        None,
        "record",
        "File with the secret from which recorded ids are made; created if it is "
        "missing. Engines whose records are to be replayed together need the same. "
        "`null` for a random secret that is not kept.",
    )

    def __post_init__(self) -> None:
        faults = []
        for key_name, key in KEYS.items():
            try:
                value = key.read(getattr(self, key_name))
            except ValueError as error:
                faults.append(f"{key_name}={error}")
            else:
                object.__setattr__(self, key_name, value)
        if not faults:
            faults = self._contradictions()
        if faults:
            raise ConfigError(faults)

    def __repr__(self) -> str:
        """Write all that was chosen, without secrets."""
        values = (
            f"{field.name}={KEYS[field.name].show(value)!r}"
            if isinstance(value := getattr(self, field.name), str)
            else f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if field.repr
        )
        return f"{type(self).__name__}({', '.join(values)})"

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

    def storage_keys(self) -> dict[str, Any]:
        """Give the keys about the store behind the host, as `PrefixStore` takes them.

        >>> OffloadConfig(storage="kv").storage_keys()["storage_write"]
        'on_reuse'
        """
        return {name: getattr(self, name) for name in KEYS if "storage" in name}

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
            kernel=self.transfer_kernel,
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
            block_bytes: Bytes of a device block, which `skip_slow_loads` needs.

        Raises:
            ValueError: `skip_slow_loads` is set and `block_bytes` is 0.
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
        num_storage_blocks: int = 0,
        policy_clock: Callable[[], float] | None = None,
    ) -> OffloadScheduler:
        """Make the scheduler, and a recorder for it if there is a file to record to.

        Close its `recorder` when the engine stops, or leave that to the interpreter.

        Args:
            groups: The groups of the model's layers; see `OffloadScheduler`.
            num_host_blocks: Those of the engine; None for the key of that name.
            block_bytes: Bytes of a device block, which `skip_slow_loads` needs.
            num_storage_blocks: Host blocks that the store may hold, as the worker's
                `storage.num_blocks(config.storage_bytes)` says; 0 for no store.
            policy_clock: As of `OffloadScheduler`: several processes need one if the
                cache policy asks for the time, or with `retention`.

        Raises:
            ValueError: There is no number of host blocks, or as `OffloadScheduler`.
            OSError: As `make_recorder`.
        """
        if num_host_blocks is None:
            num_host_blocks = self.num_host_blocks
        if num_host_blocks is None:
            raise ValueError(
                "num_host_blocks=None must be given where the configuration has none: "
                "pass that of the engine, which knows it."
            )
        rules = self.make_rules(block_bytes)
        recorder = self.make_recorder()
        try:
            return OffloadScheduler(
                groups,
                num_host_blocks,
                self.cache_policy,
                self.enable_events or self.events_endpoint is not None,
                rules=rules,
                executor=self.executor,
                num_storage_blocks=num_storage_blocks,
                policy_clock=policy_clock,
                recorder=recorder,
            )
        except BaseException:
            if recorder is not None:
                recorder.close()
            raise

    def make_worker(
        self,
        engine: TransferEngine,
        *,
        storage_namespace: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> OffloadWorker:
        """Make the worker, and open the store if there is to be one.

        Args:
            engine: The engine whose blocks it moves.
            storage_namespace: What the bytes of all blocks depend on; see
                `open_storage`.
            clock: Seconds since some moment.

        Raises:
            ValueError: As `OffloadWorker` and `open_storage`.
            ImportError: The store needs an extra that is missing.
            StoreError: The store cannot be used.
        """
        storage = None
        if self.storage is not None:
            storage = open_storage(
                engine,
                self.storage,
                namespace=storage_namespace,
                secret=self.storage_secret,
                shard=jax.process_index(),
                num_shards=jax.process_count(),
                deadline_s=self.storage_deadline_s,
                list_every_s=self.storage_list_s,
                max_blocks=self.max_storage_blocks,
                clock=clock,
            )
        try:
            if storage is not None:  # Refuses too few bytes.
                storage.num_blocks(cast(int, self.storage_bytes))
            return OffloadWorker(
                engine,
                deadline_s=self.deadline_s,
                report_after_steps=self.report_after_steps,
                check_plans=self.check_plans,
                agreement_timeout_s=self.agreement_timeout_s,
                clock=clock,
                storage=storage,
            )
        except BaseException:
            if storage is not None:
                storage.close()
            raise

    def make_recorder(self) -> TraceRecorder | None:
        """Make a `TraceRecorder`; None without `record`.

        Of several processes that serve one model together only the first records, as
        all of them see the same requests: None in the others.

        Raises:
            ValueError: The secret is too short.
            OSError: The file cannot be written, or another process records to it.
        """
        if self.record is None or _is_another_process():
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
        storage_namespace: bytes = b"",
        policy_clock: Callable[[], float] | None = None,
    ) -> Offload:
        """Make all parts for one pool.

        The arguments and errors are those of the methods for each part.
        """
        groups = as_groups(groups)
        # Before gigabytes are set aside in vain.
        check_rules(self.make_rules(block_bytes=1), groups)
        engine = self.make_engine(pool, block_axis=block_axis, head_axis=head_axis)
        block_bytes = engine.block_bytes // engine.blocks_per_host_block
        worker = self.make_worker(engine, storage_namespace=storage_namespace)
        num_storage_blocks = 0
        if worker.storage is not None:
            num_storage_blocks = worker.storage.num_blocks(
                cast(int, self.storage_bytes)
            )
        try:
            scheduler = self.make_scheduler(
                groups,
                engine.num_host_blocks,
                block_bytes=block_bytes,
                num_storage_blocks=num_storage_blocks,
                policy_clock=policy_clock,
            )
        except BaseException:
            if worker.storage is not None:
                worker.storage.close()
            raise
        return Offload(engine, scheduler, worker)

    def _contradictions(self) -> list[str]:
        """Say which values do not go together, whatever the model is."""
        if self.host_bytes is not None and self.num_host_blocks is not None:
            return [
                f"host_bytes={shown(self.host_bytes)} and num_host_blocks="
                f"{shown(self.num_host_blocks)} exclude one another: both are the "
                "size of the host tier."
            ]
        if self.record is not None and self.record == self.record_key_file:
            return [
                f"record={shown(self.record)} and record_key_file must be two files: "
                "a secret beside what it hides hides nothing."
            ]
        if self.events_replay_endpoint is not None and self.events_endpoint is None:
            return [
                f"events_replay_endpoint={shown(self.events_replay_endpoint)} needs "
                "an events_endpoint, whose events it replays."
            ]
        if self.storage is not None and self.world_size > 1:
            return [
                f"storage={KEYS['storage'].shown(self.storage)} and "
                f"world_size={self.world_size} "
                "exclude one another: a worker does not know which part of a block it "
                "has."
            ]
        if self.storage_secret is not None and self.storage is None:
            return ["storage_secret needs a storage, whose objects it seals."]
        if (
            self.storage is not None
            and self.storage_write == "on_evict"
            and (self.cache_policy, self.executor, self.retention)
            != ("lru", "native", False)
        ):
            return [
                f"storage_write='on_evict' needs cache_policy='lru', "
                f"executor='native' and retention=False, not "
                f"{shown(self.cache_policy)}, {shown(self.executor)} and "
                f"{self.retention}: another policy does not tell what it would evict."
            ]
        try:
            check_rules(self.make_rules(block_bytes=1), (FullAttention(1),))
        except ValueError as error:
            return [str(error)]
        return []


def _is_another_process() -> bool:
    """Whether the first of several processes runs beside this; starts no backend."""
    return jax.distributed.is_initialized() and jax.process_index() > 0


_NO_SIZE = (
    "host_bytes and num_host_blocks are both None; set the size of the host tier, such "
    "as host_bytes='8GiB' or JAXKV_HOST_BYTES=8GiB. `jaxkv doctor` recommends one."
)


KEYS: Mapping[str, Key] = MappingProxyType(
    {key.name: key.metadata["key"] for key in dataclasses.fields(OffloadConfig)}
)
"""All keys, in the order of the fields."""


def table_of_keys() -> str:
    """Write the table of docs/configuration.md."""
    rows = ["| key | unit | default | scope | what it does |", "|---|---|---|---|---|"]
    for name, default in OffloadConfig().to_dict().items():
        key = KEYS[name]
        if key.unit == "bytes" and default is not None:
            default = size_text(default, "")
        cells = f"`{name}`", key.unit, f"`{json.dumps(default)}`", key.scope, key.about
        rows.append("|" + "".join(f" {cell}".rstrip() + " |" for cell in cells))
    return "\n".join(rows)


def variable_of(key: str) -> str:
    """Name the variable of the environment that sets a key.

    >>> variable_of("host_bytes")
    'JAXKV_HOST_BYTES'
    """
    return PREFIX + key.upper()


def unknown(
    given: Iterable[object], kind: str, spell: Callable[[str], str] = str
) -> list[str]:
    """Say of what names no key what it may have been meant to be.

    Args:
        given: What names keys.
        kind: What to call one of them.
        spell: How they spell a key.
    """
    known = [spell(key) for key in KEYS]
    faults = []
    for word in given:
        if word not in known:
            shown = shown_name(word)
            plain = (word if isinstance(word, str) else shown).lower()
            plain = plain.removeprefix(PREFIX.lower())
            near = nearest(plain, list(KEYS))
            hint = (
                f"did you mean {spell(near)}?"
                if near
                else f"choose from {', '.join(known)}"
            )
            faults.append(f"unknown {kind} {shown}: {hint}")
    return faults


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that are meant for a configuration, in order."""
    return {
        variable: environ[variable]
        for variable in sorted(environ)
        if variable.startswith(PREFIX) and not variable.startswith(_TEST_PREFIX)
    }


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Read the values of keys from variables.

    Returns:
        The values, and what is wrong with the variables.
    """
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


def with_variables(fault: str, used: Set[str]) -> str:
    """Say of which of its values the environment is the source."""
    words = [word for word in KEYS if word in used and f"{word}=" in fault]
    named = [variable_of(word) for word in words]
    return f"{fault} ({', '.join(named)} in the environment)" if named else fault


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Read a JSON object; bytes are taken for UTF-8.

    Raises:
        ConfigError: It is none, or has a key more than once.
    """
    if not isinstance(text, str | bytes | bytearray):
        raise ConfigError([f"{shown(text)} must be JSON, as a str or as bytes"])
    try:
        # Not what `json` takes bytes for, which may be UTF-16 by their look.
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fault = f"this is not JSON: it is no UTF-8 text ({error.reason})"
        raise ConfigError([fault]) from None
    try:
        values = json.loads(text, object_pairs_hook=_distinct)
    except ConfigError:
        raise
    except RecursionError:
        fault = "this is nested too deeply to be a JSON object of keys and values"
        raise ConfigError([fault]) from None
    except ValueError as error:  # of the syntax, or of the encoding
        raise ConfigError([f"this is not JSON: {error}"]) from None
    if not isinstance(values, dict):
        fault = f"{shown(values)} must be a JSON object of keys and values"
        raise ConfigError([fault])
    return cast(dict[str, Any], values)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key_name for key_name, _ in pairs)
        twice = sorted(word for word, count in counts.items() if count > 1)
        raise ConfigError(
            [f"key {shown_name(word)} is there more than once" for word in twice]
        )
    return values

"""Reads and checks vLLM's configuration for `OffloadConnector`.

The scheduler's and the worker's half of the connector each read it, and must get the
same number of host blocks.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv import FullAttention, OffloadRules, SlidingWindow, TraceRecorder
from jaxkv._util import parse_bytes, shown
from jaxkv.config import KEYS, OffloadConfig, variable_of
from jaxkv.integrations.vllm import namespace
from jaxkv.scheduling.record import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_FILES,
    LEAST_MAX_BYTES,
)
from jaxkv.search.groups import GroupSpec
from jaxkv.transfer.storage.objects import HEADER_BYTES
from jaxkv.transfer.storage.opening import folder_of
from jaxkv.transfer.storage.store import shown_url

DEFAULT_HOST_BYTES = 8 << 30

# These must be 1: the connector was never tested with more schedulers, workers or kinds
# of block ids.
_SIZES = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)

# The newest tpu-inference, as (major, minor), known to lose tokens with asynchronous
# scheduling; docs/vllm.md explains how. Raise it with each release that still does.
_LAST_TO_LOSE_TOKENS = (0, 32)


@dataclasses.dataclass(frozen=True)
class StorageConfig:
    """Configuration of the store behind the host.

    Attributes:
        url: Where it is.
        num_blocks: Host blocks that it may hold, by vLLM's size of a block.
        namespace: What the bytes of all blocks depend on besides their keys.
        about: The same in a line, part by part, to compare with another engine's.
        secret: Seals what is written; None for a checksum.
        deadline_s: How long a fetch or a write may take.
        list_every_s: How long after a listing the store is listed again; None for once.
        max_blocks: Host blocks on their way at a time.
        keep_on_reset: Whether it is used after a reset, as weights never change.
    """

    url: str
    num_blocks: int
    namespace: bytes
    about: str
    secret: str | None = dataclasses.field(repr=False)
    deadline_s: float
    list_every_s: float | None
    max_blocks: int
    keep_on_reset: bool

    @property
    def shown_url(self) -> str:
        """Where it is, as a log may have it."""
        return shown_url(self.url)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this machine."""
        return folder_of(self.url) is not None


@dataclasses.dataclass(frozen=True)
class ConnectorConfig:
    """Configuration of the connector.

    Attributes:
        groups: The groups of the model's layers.
        rules: Rules for stores and loads.
        num_host_blocks: Number of host blocks.
        planned_bytes: Their bytes, by vLLM's size of a block.
        cache_policy: Policy that chooses the blocks to evict.
        enable_events: Whether vLLM publishes events of its KV caches.
        max_model_len: Maximum tokens of a request.
        max_num_batched_tokens: Maximum tokens of a step.
        staging_bytes: Device memory for transfers; None for the engine's default.
        deadline_s: Maximum seconds of a transfer.
        record: The file that requests are recorded in; None for none.
        record_max_bytes: Most bytes of that file.
        record_max_files: Files that are kept.
        record_key_file: File with the secret of the recorded ids; None for a random
            secret.
        storage: The store behind the host; None for none.
    """

    groups: tuple[GroupSpec, ...]
    rules: OffloadRules
    num_host_blocks: int
    planned_bytes: int
    cache_policy: str
    enable_events: bool
    max_model_len: int
    max_num_batched_tokens: int
    staging_bytes: int | None
    deadline_s: float
    record: str | None = None
    record_max_bytes: int = DEFAULT_MAX_BYTES
    record_max_files: int = DEFAULT_MAX_FILES
    record_key_file: str | None = None
    storage: StorageConfig | None = None

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> ConnectorConfig:
        """Read vLLM's configuration.

        Args:
            vllm_config: vLLM's `VllmConfig`.
            kv_cache_config: vLLM's `KVCacheConfig`.

        Raises:
            ValueError: If jaxkv cannot serve it or was never tested with it; if a key
                of ``kv_connector_extra_config`` is unknown or has a bad value.
        """
        _check_engine(vllm_config)
        groups = _groups_of(kv_cache_config)
        _check_hashes(vllm_config.cache_config, kv_cache_config, groups)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        values = read_extra_config(extra)
        factor = values["blocks_per_chunk"]
        block_bytes = _block_bytes(kv_cache_config) * factor
        num_host_blocks = values["num_cpu_blocks"]
        if num_host_blocks is None:
            num_host_blocks = values["cpu_bytes_to_use"] // block_bytes
        if num_host_blocks < 1:
            raise ValueError(
                f"cpu_bytes_to_use={values['cpu_bytes_to_use']} must be at least "
                f"{block_bytes}, the bytes of a block of all layers."
            )
        events = getattr(vllm_config, "kv_events_config", None)
        scheduler_config = vllm_config.scheduler_config
        return cls(
            groups,
            OffloadRules(
                blocks_per_host_block=factor,
                store_threshold=values["store_threshold"],
                max_unseen_blocks=values["max_unseen_blocks"],
                prompt_only=values["offload_prompt_only"],
                max_offload_tokens=values["max_offload_tokens"],
                delay_shared_loads=values["delay_shared_loads"],
                retention=values["retention"],
                storage_write=values["storage_write"],
                max_storage_blocks=values["max_storage_blocks"],
                # vLLM may leave an offer unanswered and ask for others first. Device
                # blocks held for such an offer could not be used.
                copy_on_device=False,
            ),
            num_host_blocks,
            num_host_blocks * block_bytes,
            values["eviction_policy"],
            bool(events and events.enable_kv_cache_events),
            vllm_config.model_config.max_model_len,
            scheduler_config.max_num_batched_tokens,
            values["staging_bytes"],
            values["transfer_deadline_s"],
            values["record"],
            values["record_max_bytes"],
            values["record_max_files"],
            values["record_key_file"],
            _storage_of(vllm_config, kv_cache_config, values, block_bytes),
        )

    def make_recorder(self) -> TraceRecorder | None:
        """Make what records the requests; None if nothing is to.

        Raises:
            ValueError: The secret is too short.
            OSError: The file cannot be written, or another process records to it.
        """
        if self.record is None:
            return None
        return TraceRecorder(
            self.record,
            max_bytes=self.record_max_bytes,
            max_files=self.record_max_files,
            key_file=self.record_key_file,
        )


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}={shown(value)} must be a whole number of at least 0.")
    return value


def _count_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _count(name, value)


def _bytes(name: str, value: Any) -> int:
    try:
        return parse_bytes(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _bytes_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _bytes(name, value)


def _file_bytes(name: str, value: Any) -> int:
    num_bytes = _bytes(name, value)
    if num_bytes < LEAST_MAX_BYTES:
        raise ValueError(f"{name}={shown(value)} must be at least {LEAST_MAX_BYTES}.")
    return num_bytes


def _num_files(name: str, value: Any) -> int:
    if _count(name, value) < 1:
        raise ValueError(f"{name}={value} must be at least 1.")
    return int(value)


def _file_or_none(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"{name}={shown(value)} must be the name of a file.")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} must be true or false.")
    return value


def _not_lazy(name: str, value: Any) -> bool:
    if _flag(name, value):
        raise ValueError(
            f"{name}=true is not supported: vLLM's block pool moves a block to the end "
            "of its order of eviction when its store is over, so the blocks evicted "
            "next would be those that were not stored."
        )
    return False


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={shown(value)} must be the name of a cache policy.")
    return value


def _seconds(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ValueError(f"{name}={shown(value)} must be a number of seconds above 0.")
    return float(value)


def _as_in_config(name: str, value: Any) -> Any:
    """Read what `OffloadConfig` has under the same name."""
    try:
        return KEYS[name].read(value)
    except ValueError as error:
        raise ValueError(f"{name}={error}.") from None


def _text_or_none(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{name}={shown(value)} must be a text that is not empty.")
    return value


# The keys of `OffloadConfig` that are about the store.
_STORAGE_KEYS = (
    "storage",
    "storage_bytes",
    "storage_write",
    "max_storage_blocks",
    "storage_deadline_s",
    "storage_list_s",
    "storage_secret",
)

# vLLM's names where vLLM has them: name -> (default, parser of a value).
EXTRA_KEYS: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
    "cpu_bytes_to_use": (DEFAULT_HOST_BYTES, _bytes),
    "num_cpu_blocks": (None, _count_or_none),
    "eviction_policy": ("lru", _name),
    "store_threshold": (0, _count),
    "max_unseen_blocks": (None, _count_or_none),
    "offload_prompt_only": (False, _flag),
    "max_offload_tokens": (None, _count_or_none),
    "blocks_per_chunk": (1, _count),
    "delay_shared_loads": (False, _flag),
    "retention": (False, _flag),
    "lazy_offload": (False, _not_lazy),
    "staging_bytes": (None, _bytes_or_none),
    "transfer_deadline_s": (30.0, _seconds),
    "record": (None, _file_or_none),
    "record_max_bytes": (DEFAULT_MAX_BYTES, _file_bytes),
    "record_max_files": (DEFAULT_MAX_FILES, _num_files),
    "record_key_file": (None, _file_or_none),
    **{name: (getattr(OffloadConfig(), name), _as_in_config) for name in _STORAGE_KEYS},
    "storage_namespace": (None, _text_or_none),
    "storage_keep_on_reset": (False, _flag),
}


def read_extra_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``kv_connector_extra_config``.

    Args:
        extra: The values that the user set.

    Returns:
        A value for each of `EXTRA_KEYS`.

    Raises:
        ValueError: If a key is unknown or has a bad value; the message gives the
            nearest valid name.
    """
    for name in extra:
        if name not in EXTRA_KEYS:
            near = difflib.get_close_matches(str(name), EXTRA_KEYS, 1, cutoff=0.5)
            hint = f": did you mean {near[0]!r}?" if near else "."
            raise ValueError(
                f"kv_connector_extra_config has no key {shown(name)}{hint} "
                f"Known are {', '.join(EXTRA_KEYS)}."
            )
    values = {
        name: read(name, extra.get(name, default))
        for name, (default, read) in EXTRA_KEYS.items()
    }
    if "cpu_bytes_to_use" in extra and values["num_cpu_blocks"] is not None:
        raise ValueError(
            "cpu_bytes_to_use and num_cpu_blocks both set the size of the host tier: "
            "set one of them."
        )
    for name in ("num_cpu_blocks", "blocks_per_chunk"):
        if values[name] == 0:
            raise ValueError(f"{name}=0 must be at least 1.")
    _check_storage(extra, values)
    return values


def _check_storage(extra: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Refuse keys of the store that do not go together."""
    if values["storage"] is None:
        alone = [name for name in extra if name.startswith(("storage_", "max_storage"))]
        if alone:
            raise ValueError(
                f"{alone[0]} needs a storage, such as storage='file:///var/cache/kv'."
            )
    elif values["storage_write"] == "on_evict" and (
        values["eviction_policy"] != "lru" or values["retention"]
    ):
        raise ValueError(
            "storage_write='on_evict' needs eviction_policy='lru' and retention=false: "
            "others do not tell what they would evict."
        )


def _storage_of(
    vllm_config: Any, kv_cache_config: Any, values: dict[str, Any], block_bytes: int
) -> StorageConfig | None:
    """Read what there is to know of the store; None without one."""
    if values["storage"] is None:
        return None
    num_blocks = values["storage_bytes"] // (block_bytes + HEADER_BYTES)
    if num_blocks < 1:
        raise ValueError(
            f"storage_bytes={values['storage_bytes']} must be at least "
            f"{block_bytes + HEADER_BYTES}, what one host block takes in the store."
        )
    secret = values["storage_secret"]
    variable = variable_of("storage_secret")
    if secret is None and os.environ.get(variable):
        secret = _as_in_config("storage_secret", os.environ[variable])
    parts = namespace.namespace_of(
        vllm_config, kv_cache_config, values["storage_namespace"]
    )
    return StorageConfig(
        values["storage"],
        num_blocks,
        namespace.encode(parts),
        namespace.summary(parts),
        secret,
        values["storage_deadline_s"],
        values["storage_list_s"],
        values["max_storage_blocks"],
        values["storage_keep_on_reset"],
    )


def _check_engine(config: Any) -> None:
    """Refuse an engine that the connector cannot serve or was never tested with."""
    for name in _SIZES:
        size = getattr(config.parallel_config, name, 1)
        if size != 1:
            raise ValueError(f"{name}={size} must be 1: more was never tested.")
    sharding = getattr(config, "sharding_config", None)
    dp_size = getattr(sharding, "total_dp_size", 1)
    if dp_size != 1:
        raise ValueError(
            f"total_dp_size={dp_size} must be 1: each rank has separate blocks, and a "
            "store of one rank could be loaded by another."
        )
    if not config.cache_config.enable_prefix_caching:
        raise ValueError(
            "enable_prefix_caching must be true: blocks have the hashes of vLLM's "
            "prefix cache as keys."
        )
    if getattr(config, "speculative_config", None) is not None:
        raise ValueError(
            "speculative_config must be none: draft tokens may be rejected after their "
            "block was stored, which was never tested."
        )
    if getattr(config.model_config, "runner_type", "generate") == "pooling":
        raise ValueError(
            "runner_type='pooling' has no KV cache to load into, and its steps do not "
            "report which transfers are over."
        )
    additional = getattr(config, "additional_config", None) or {}
    if additional.get("enable_continue_decode"):
        raise ValueError(
            "enable_continue_decode must be false: its loop restores the KV caches "
            "after the connector has run, and loaded blocks are lost."
        )
    role = config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise ValueError(
            f"kv_role={shown(role)} must be 'kv_both': it stores and loads."
        )
    _check_async_scheduling(config.scheduler_config)


def _check_async_scheduling(scheduler_config: Any) -> None:
    """Refuse asynchronous scheduling where tpu-inference loses tokens with it."""
    # vLLM replaces None, its default, before it makes a connector. Versions that leave
    # it None, or lack it, schedule synchronously.
    if not getattr(scheduler_config, "async_scheduling", None):
        return
    version = _tpu_inference_version()
    if version is None:
        return
    found = re.match(r"([0-9]+)\.([0-9]+)", version)
    if found and (int(found[1]), int(found[2])) > _LAST_TO_LOSE_TOKENS:
        return
    raise ValueError(
        f"async_scheduling=True with tpu-inference {version or 'of unknown version'} "
        "gives wrong tokens: a request that is left out of a step continues from token "
        "0 instead of its last token, and the host tier would keep the KV of it. Add "
        "--no-async-scheduling (async_scheduling=False)."
    )


def _tpu_inference_version() -> str | None:
    """Return the version of the installed tpu-inference.

    It is empty for a checkout on the path, and None if tpu-inference is not installed.
    """
    try:
        return importlib.metadata.version("tpu-inference") or ""
    except importlib.metadata.PackageNotFoundError:
        return "" if importlib.util.find_spec("tpu_inference") else None


def _groups_of(kv_cache_config: Any) -> tuple[GroupSpec, ...]:
    """Translate vLLM's groups of layers."""
    groups: list[GroupSpec] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        # The worker's vLLM wraps layers of one kind that differ in size.
        each = getattr(spec, "kv_cache_specs", None)
        layers = list(each.values()) if each else [spec]
        kinds = sorted({type(layer).__name__ for layer in layers})
        windows = sorted(
            {getattr(layer, "sliding_window", None) or 0 for layer in layers}
        )
        if kinds == ["FullAttentionSpec"]:
            groups.append(FullAttention(spec.block_size))
        elif kinds == ["SlidingWindowSpec"] and len(windows) == 1:
            groups.append(SlidingWindow(spec.block_size, windows[0]))
        else:
            raise ValueError(
                f"KV cache group {index} is of {', '.join(kinds)} with windows "
                f"{windows}; served are groups of FullAttentionSpec, "
                "or of SlidingWindowSpec with one window. Others (MLA, Mamba, chunked "
                "attention) were never tested with the layouts of tpu-inference."
            )
    if not groups:
        raise ValueError("the model has no KV cache group, so nothing to offload.")
    return tuple(groups)


def _check_hashes(
    cache_config: Any, kv_cache_config: Any, groups: tuple[GroupSpec, ...]
) -> None:
    """Refuse block hashes of another size than the blocks of each group."""
    sizes = {group.block_size for group in groups}
    units: set[int] = {
        getattr(kv_cache_config, "hash_block_size", None) or 0,
        getattr(cache_config, "prefix_match_unit", None) or 0,
        getattr(cache_config, "hash_block_size", None) or 0,
    } - {0}
    if len(sizes) > 1 or units - sizes:
        raise ValueError(
            f"blocks of {sorted(sizes)} tokens and block hashes of "
            f"{sorted(units or sizes)} tokens must all be of one size."
        )


def _block_bytes(kv_cache_config: Any) -> int:
    """Return the bytes of a device block of all layers, by vLLM's sizes."""
    tensors = kv_cache_config.kv_cache_tensors
    # Tensors with a stride share one allocation, whose size each repeats. Earlier
    # versions allocate each tensor separately.
    is_shared = hasattr(tensors[0], "layer_stride")
    num_bytes = tensors[0].size if is_shared else sum(t.size for t in tensors)
    return max(int(num_bytes // kv_cache_config.num_blocks), 1)

"""Reads and checks vLLM's configuration for `OffloadConnector`.

The scheduler's and the worker's half of the connector each read it, and must get the
same number of host blocks.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from typing import Any, cast

from jaxkv import (
    ConfigError,
    FullAttention,
    Mamba,
    OffloadConfig,
    SlidingWindow,
    policy_names,
    register_policy,
)
from jaxkv._util import did_you_mean, settings, shown
from jaxkv._util.settings import Settings
from jaxkv.config import KEYS, blank_secret_faults, variable_of
from jaxkv.integrations.vllm import namespace, tokens
from jaxkv.integrations.vllm.hosts import num_hosts
from jaxkv.policies.registry import get_policy_maker
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.search.groups import GroupSpec
from jaxkv.transfer.storage.objects import HEADER_BYTES
from jaxkv.transfer.storage.store_url import StoreUrl, shown_url

DEFAULT_HOST_BYTES = 8 << 30
_SCALE_BYTES = 4

# These must be 1: the connector was never tested with more workers or kinds of block
# ids.
_SIZES = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)

# Ways to make drafts.
_DRAFTS = ("ngram", "eagle3", "dflash", "mtp")

# Files that only one engine may write. `_RANK` in their paths becomes its rank.
_FILES_OF_ENGINE = ("record", "policy_state")
_RANK = "{rank}"

# Keys of `OffloadConfig` that vLLM has another name for, or docs/vllm.md another text:
# key -> (vLLM's name, the text or nothing).
_OTHERWISE = {
    "host_bytes": (
        "cpu_bytes_to_use",
        "Size of the host tier, of all chips together. An eighth more is set aside as "
        "spare room, so that what is stored together lies together: 64 GiB take 72.",
    ),
    "num_host_blocks": (
        "num_cpu_blocks",
        "The same as a number of host blocks; set only one of the two.",
    ),
    "cache_policy": ("eviction_policy", ""),
    "blocks_per_host_block": ("blocks_per_chunk", ""),
    "prompt_only": (
        "offload_prompt_only",
        "Do not store generated tokens. vLLM's own connector does so by default; the "
        "next turn then computes the last answer again.",
    ),
    "retention": (
        "retention",
        "Let a request say how long its blocks are "
        "[kept](#keep-a-prompt-longer-than-others).",
    ),
    "staging_bytes": (
        "staging_bytes",
        "Device memory for transfers, which is also the most that is in flight.",
    ),
    "deadline_s": ("transfer_deadline_s", "Abandon a transfer that takes longer."),
    "skip_slow_loads": (
        "skip_slow_loads",
        "Compute what would take longer to load, by the rates of vLLM's steps and of "
        "the loads so far.",
    ),
    "storage_secret": (
        "storage_secret",
        "Secret of at least 16 bytes that signs what is written; blocks without its "
        "signature are not read. vLLM logs its configuration: put it in the "
        "environment as `JAXKV_STORAGE_SECRET` instead.",
    ),
}

# Of the keys of `OffloadConfig`, what vLLM decides or has ways of its own for, and what
# was never tried with it.
_NOT_SERVED = {
    *("executor", "mode", "max_num_batched_tokens", "world_size", "enable_events"),
    *("max_blocks_in_flight", "copy_on_device", "load_in_step"),
    *("flush_on_preemption", "remember_drops", "transfer_mode", "transfer_kernel"),
    *("extent_bytes", "layer_groups", "report_after_steps"),
    *("check_plans", "agreement_timeout_s"),
    *(word for word, key in KEYS.items() if key.scope in ("events", "metrics")),
    *(word for word, key in KEYS.items() if key.scope == "strict"),
}

_NAMES = {
    word: _OTHERWISE.get(word, (word,))[0] for word in KEYS if word not in _NOT_SERVED
}
_WORDS = {name: word for word, name in _NAMES.items()}


@dataclasses.dataclass(frozen=True)
class VllmSettings(Settings):
    """The settings of the connector that only vLLM needs."""

    cache_policy_module_path: str | None = settings.text(
        None,
        "scheduler",
        "The module to import `eviction_policy` from, a function that makes a "
        "[policy of your own](write-a-policy.md), unless importing registers it.",
        settings.Text("the path of a module", r"[^\W\d]\w*(\.[^\W\d]\w*)*"),
    )
    storage_namespace: str | None = settings.text(
        None,
        "storage",
        "A name for the weights, in place of [what is looked "
        "at](#which-engines-share).",
        settings.Text("a text that is not empty", r"(?s:.*\S.*)"),
    )
    storage_keep_on_reset: bool = settings.flag(
        False,
        "storage",
        "Use the store after a [reset](#when-weights-change), as the weights never "
        "change while the engine runs.",
    )
    keep_on_device_reset: bool = settings.flag(
        False,
        "scheduler",
        "Keep the host tier when vLLM's prefix cache alone is [reset]"
        "(#when-weights-change), as the weights stay the same then.",
    )
    restore_tokens: bool = settings.flag(
        True,
        "worker",
        "With asynchronous scheduling, restore the tokens that tpu-inference "
        "[drops](#asynchronous-scheduling); `false` refuses asynchronous scheduling "
        "instead.",
    )
    lazy_offload: bool = settings.flag(
        False,
        "scheduler",
        "Refused if `true`: vLLM's block pool cannot pin a block in its place.",
    )

    def _contradictions(self) -> Iterator[str]:
        if self.lazy_offload:
            yield (
                "lazy_offload=true is not supported: vLLM's block pool moves a block "
                "to the end of its order of eviction when its store is over, so the "
                "blocks evicted next would be those that were not stored."
            )


_OWN_KEYS = settings.keys_of(VllmSettings)

EXTRA_KEYS = (*_WORDS, *_OWN_KEYS)
"""All keys of ``kv_connector_extra_config``."""


def table_of_keys() -> str:
    """Write the table of docs/vllm.md: what docs/configuration.md does not say."""
    defaults = OffloadConfig(host_bytes=DEFAULT_HOST_BYTES).to_dict()
    rows = {
        name: (KEYS[word], defaults[word], text)
        for word, (name, text) in _OTHERWISE.items()
    }
    own = dataclasses.asdict(VllmSettings())
    rows |= {name: (key, own[name], "") for name, key in _OWN_KEYS.items()}
    return settings.table_of(rows, has_scope=False)


def names_of_shared_keys() -> list[str]:
    """Name the keys that are served as docs/configuration.md has them."""
    return [name for word, name in _NAMES.items() if word not in _OTHERWISE]


@dataclasses.dataclass(frozen=True)
class StorageConfig:
    """What there is to know of the store behind the host, besides its settings.

    Attributes:
        url: Where it is.
        num_blocks: Host blocks that it may hold, by vLLM's size of a block.
        namespace: What the bytes of all blocks depend on besides their keys.
        about: The same in a line, part by part, to compare with another engine's.
        keep_on_reset: Whether it is used after a reset, as weights never change.
    """

    url: str = dataclasses.field(repr=False)
    num_blocks: int
    namespace: bytes
    about: str
    keep_on_reset: bool

    @property
    def shown_url(self) -> str:
        """Where it is, as a log may have it."""
        return shown_url(self.url)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this machine."""
        return StoreUrl.parse(self.url).is_folder


@dataclasses.dataclass(frozen=True)
class ConnectorConfig:
    """Configuration of the connector.

    Attributes:
        groups: The groups of the model's layers.
        offload: What the user chose; the size is `num_host_blocks`.
        num_host_blocks: Number of host blocks.
        block_bytes: Bytes of a device block, by vLLM's sizes.
        planned_bytes: Bytes of the host blocks, likewise; compressed ones are smaller.
        enable_events: Whether vLLM publishes events of its KV caches.
        storage: The store behind the host; None for none.
        restore_tokens: Whether the runner has to be kept from dropping tokens.
        keep_on_device_reset: Whether a reset of vLLM's prefix cache alone leaves the
            host tier as it is.
        layers: Names of the layers of each group.
        num_hosts: Hosts with a worker, each with a part of every block.
        num_ranks: Ranks of data or attention parallelism, each with a scheduler and an
            equal part of the host blocks.
        memory_utilization: The share of device memory that vLLM fills.
        num_blocks_override: Device blocks set in place of that share; None if not set.
        drops_last_block: Whether a request computes the last block that it finds, as
            the draft model's KV there depends on the next token.
    """

    groups: tuple[GroupSpec, ...]
    offload: OffloadConfig
    num_host_blocks: int
    block_bytes: int
    planned_bytes: int
    enable_events: bool
    storage: StorageConfig | None = None
    restore_tokens: bool = False
    keep_on_device_reset: bool = False
    layers: tuple[tuple[str, ...], ...] = ()
    num_hosts: int = 1
    num_ranks: int = 1
    memory_utilization: float = 0.9
    num_blocks_override: int | None = None
    drops_last_block: bool = False

    @property
    def rank_host_blocks(self) -> int:
        """Number of host blocks of each rank."""
        return self.num_host_blocks // self.num_ranks

    def flag_that_leaves(self, num_bytes: int, devices: Collection[Any]) -> str:
        """Return vLLM's flag, with its value, that leaves more memory on each device.

        No connector exists when vLLM sizes its KV cache, and tpu-inference sets memory
        aside for the modules of its own connectors alone. It does not read
        ``--kv-cache-memory-bytes``.
        """
        if self.num_blocks_override is not None:
            num_devices = len(devices) * self.num_hosts
            num_blocks = -(-num_bytes * num_devices // self.block_bytes)
            return f"--num-gpu-blocks-override={self.num_blocks_override - num_blocks}"
        smallest = min(device.memory_stats()["bytes_limit"] for device in devices)
        share = self.memory_utilization - num_bytes / smallest
        return f"--gpu-memory-utilization={math.floor(share * 1000) / 1000}"

    @property
    def state_groups(self) -> tuple[int, ...]:
        """Which groups have a state in place of keys and values."""
        each = enumerate(self.groups)
        return tuple(number for number, group in each if isinstance(group, Mamba))

    @classmethod
    def of(
        cls, vllm_config: Any, kv_cache_config: Any, *, is_rank: bool = False
    ) -> ConnectorConfig:
        """Read vLLM's configuration.

        Args:
            vllm_config: vLLM's `VllmConfig`.
            kv_cache_config: vLLM's `KVCacheConfig`.
            is_rank: Whether that is the configuration of one rank, of several: with the
                rank's number of blocks, and the bytes of all.

        Raises:
            ValueError: If jaxkv cannot serve it or was never tested with it; if a key
                of ``kv_connector_extra_config`` is unknown or has a bad value.
        """
        _check_engine(vllm_config)
        groups = _groups_of(kv_cache_config)
        _check_hashes(vllm_config.cache_config, kv_cache_config, groups)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        offload, own = read_extra_config(extra)
        offload = _with_files_of_engine(offload, _engine_rank(vllm_config))
        _check_states(groups, offload)
        hosts = num_hosts(vllm_config.parallel_config)
        num_ranks = _num_ranks(vllm_config)
        drops_last_block = _drops_last_block(vllm_config, groups, hosts, num_ranks)
        if num_ranks > 1:
            _check_ranks(num_ranks, hosts, groups, offload)
        num_blocks = kv_cache_config.num_blocks
        if not is_rank:  # As each rank computes it, if they are no multiple.
            num_blocks //= num_ranks
        num_blocks *= num_ranks
        block_bytes = _block_bytes(kv_cache_config, groups, num_blocks)
        groups_of_layers = map(_layers_of, kv_cache_config.kv_cache_groups)
        if offload.compression is not None and any(map(_are_latents, groups_of_layers)):
            raise ValueError(
                f"compression={offload.compression!r} cannot be used with MLA: a "
                "latent has no heads to have a scale each."
            )
        share = _host_share(kv_cache_config, offload.compression)
        host_block_bytes = math.ceil(
            block_bytes * share * offload.blocks_per_host_block
        )
        num_host_blocks = offload.num_host_blocks
        if num_host_blocks is None:
            num_host_blocks = cast(int, offload.host_bytes) // host_block_bytes
        num_host_blocks -= num_host_blocks % num_ranks
        if num_host_blocks < 1:
            if offload.num_host_blocks is not None:
                raise ValueError(
                    f"num_cpu_blocks={offload.num_host_blocks} must be at least "
                    f"{num_ranks}, one for each rank."
                )
            raise ValueError(
                f"cpu_bytes_to_use={offload.host_bytes} must be at least "
                f"{num_ranks * host_block_bytes}, the bytes of a block of all layers"
                f"{' for each rank' if num_ranks > 1 else ''}."
            )
        events = getattr(vllm_config, "kv_events_config", None)
        return cls(
            groups,
            offload,
            num_host_blocks,
            block_bytes,
            num_host_blocks * host_block_bytes,
            bool(events and events.enable_kv_cache_events),
            _storage_of(vllm_config, kv_cache_config, offload, own, host_block_bytes),
            _restores_tokens(vllm_config, own.restore_tokens),
            own.keep_on_device_reset,
            tuple(
                tuple(getattr(group, "layer_names", ()))
                for group in kv_cache_config.kv_cache_groups
            ),
            hosts,
            num_ranks,
            getattr(vllm_config.cache_config, "gpu_memory_utilization", 0.9),
            getattr(vllm_config.cache_config, "num_gpu_blocks_override", None),
            drops_last_block,
        )

    def make_rules(self) -> OffloadRules:
        """Make the rules of the scheduler, which all hosts report to."""
        rules = self.offload.make_rules(self.block_bytes)
        return dataclasses.replace(rules, world_size=self.num_hosts)


def read_extra_config(extra: Mapping[str, Any]) -> tuple[OffloadConfig, VllmSettings]:
    """Read ``kv_connector_extra_config``.

    Args:
        extra: The values that the user set.

    Returns:
        What `OffloadConfig` has too, and what only vLLM needs.

    Raises:
        ValueError: If a key is unknown or has a bad value; the message gives the
            nearest valid name.
    """
    for name in extra:
        if name not in EXTRA_KEYS:
            raise ValueError(
                f"kv_connector_extra_config has no key {shown(name)}: "
                f"{did_you_mean(str(name), EXTRA_KEYS)}."
            )
    alone = [name for name in extra if name.startswith(("storage_", "max_storage"))]
    if alone and extra.get("storage") is None:
        raise ValueError(
            f"{alone[0]} needs a storage, such as storage='file:///var/cache/kv'."
        )
    values = {_WORDS[name]: extra[name] for name in extra if name in _WORDS}
    if values.get("host_bytes") is None and values.get("num_host_blocks") is None:
        values["host_bytes"] = DEFAULT_HOST_BYTES
    if values.get("staging_bytes") is None:
        values.pop("staging_bytes", None)
    if values.get("storage") is not None and values.get("storage_secret") is None:
        if faults := blank_secret_faults(os.environ):
            raise ConfigError(faults)
        values["storage_secret"] = os.environ.get(variable_of("storage_secret"))
    own = VllmSettings(**{name: extra[name] for name in extra if name in _OWN_KEYS})
    if own.cache_policy_module_path is not None:
        _import_policy(own.cache_policy_module_path, extra.get("eviction_policy"))
    try:
        # vLLM may leave an offer unanswered and ask for others first. Device blocks
        # held for such an offer could not be used.
        offload = OffloadConfig(copy_on_device=False, **values)
    except ConfigError as error:
        # Its messages name a value as `name=value`.
        raise ConfigError(
            [
                re.sub(r"(?<!\S)\w+(?==)", lambda m: _NAMES.get(m[0], m[0]), fault)
                for fault in error.faults
            ]
        ) from None
    return offload, own


def _import_policy(path: str, name: Any) -> None:
    """Import a policy from where vLLM's own connector would, and register it."""
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise ValueError(
            f"cache_policy_module_path={shown(path)} cannot be imported: {error}"
        ) from error
    if name not in policy_names():
        maker = getattr(module, str(name), None)
        if not callable(maker):
            raise ValueError(
                f"eviction_policy={shown(name)} must be a function of "
                f"cache_policy_module_path={path} that makes a policy, or a name that "
                "the module registers (jaxkv.register_policy)."
            )
        register_policy(name, maker)


def _storage_of(
    vllm_config: Any,
    kv_cache_config: Any,
    offload: OffloadConfig,
    own: VllmSettings,
    block_bytes: int,
) -> StorageConfig | None:
    """Read what there is to know of the store; None without one."""
    if offload.storage is None:
        return None
    object_bytes = block_bytes + HEADER_BYTES
    num_blocks = cast(int, offload.storage_bytes) // object_bytes
    if num_blocks < 1:
        raise ValueError(
            f"storage_bytes={offload.storage_bytes} must be at least {object_bytes}, "
            "what one host block takes in the store."
        )
    parts = namespace.namespace_of(vllm_config, kv_cache_config, own.storage_namespace)
    return StorageConfig(
        offload.storage,
        num_blocks,
        namespace.encode(parts),
        namespace.summary(parts),
        own.storage_keep_on_reset,
    )


def _engine_rank(config: Any) -> int | None:
    """Return the rank of an engine of ``--data-parallel-size``; None for a single one.

    vLLM resets the data-parallel size of an engine of a dense model to 1, but not its
    index, and appends the rank to its id.
    """
    parallel = config.parallel_config
    rank: int = getattr(parallel, "data_parallel_index", 0)
    engine_id = str(getattr(config.kv_transfer_config, "engine_id", None) or "")
    is_single = getattr(parallel, "data_parallel_size", 1) == 1
    return None if is_single and not engine_id.endswith(f"_dp{rank}") else rank


def _with_files_of_engine(offload: OffloadConfig, rank: int | None) -> OffloadConfig:
    """Put the rank of an engine into the paths of the files that it alone writes."""
    paths = {}
    for name in _FILES_OF_ENGINE:
        path = getattr(offload, name)
        if path is None:
            continue
        if rank is not None and _RANK not in path:
            folder, file = os.path.split(path)
            stem, dot, suffixes = file.partition(".")
            right = os.path.join(folder, f"{stem}-{_RANK}{dot}{suffixes}")
            raise ValueError(
                f"{name}={shown(path)} must contain {_RANK}, such as {shown(right)}: "
                "--data-parallel-size makes several engines, and each needs its own "
                "file."
            )
        paths[name] = path.replace(_RANK, str(rank or 0))
    return dataclasses.replace(offload, **paths)


def _check_engine(config: Any) -> None:
    """Refuse an engine that the connector cannot serve or was never tested with."""
    for name in _SIZES:
        size = getattr(config.parallel_config, name, 1)
        if size != 1:
            raise ValueError(f"{name}={size} must be 1: more was never tested.")
    if not config.cache_config.enable_prefix_caching:
        raise ValueError(
            "enable_prefix_caching must be true: blocks have the hashes of vLLM's "
            "prefix cache as keys."
        )
    drafts = getattr(config, "speculative_config", None)
    if drafts is not None and drafts.method not in _DRAFTS:
        raise ValueError(
            f"speculative_config: method={shown(drafts.method)} must be one of "
            f"{', '.join(_DRAFTS)}: others, which may add layers to each block, were "
            "never tested."
        )
    if getattr(config, "use_v2_model_runner", False):
        raise ValueError(
            "use_v2_model_runner must be false (VLLM_USE_V2_MODEL_RUNNER=0): vLLM's "
            "scheduler then sends a preempted request as a new one, of which JAX "
            "runners such as tpu-inference's read the prompt and not the tokens "
            "generated so far."
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
    num_engines = getattr(config.parallel_config, "data_parallel_size", 1)
    sharding = getattr(config, "sharding_config", None)
    if num_engines != 1 and not hasattr(sharding, "total_dp_size"):
        raise ValueError(
            f"data_parallel_size={num_engines} must be 1: this vLLM's configuration "
            "has no sharding_config.total_dp_size, which says whether each rank is a "
            "complete engine, as with tpu-inference."
        )


def _num_ranks(config: Any) -> int:
    """Return how many schedulers tpu-inference runs, each over a part of the caches."""
    sharding = getattr(config, "sharding_config", None)
    return int(getattr(sharding, "total_dp_size", 1))


def _check_ranks(
    num_ranks: int, hosts: int, groups: tuple[GroupSpec, ...], offload: OffloadConfig
) -> None:
    """Refuse what schedulers of several ranks, each in its process, cannot share."""
    if hosts > 1:
        raise ValueError(
            f"total_dp_size={num_ranks} must be 1 on {hosts} hosts: ranks were never "
            "tested with a part of each block on every host."
        )
    for name, value, reason in (
        ("storage", offload.storage, "host blocks lie sharded over the ranks' devices"),
        ("record", offload.record, "each rank would write to the same file"),
        ("policy_state", offload.policy_state, "each rank would write the same file"),
    ):
        if value is not None:
            raise ValueError(
                f"{name}={shown(value)} cannot be used with total_dp_size={num_ranks}: "
                f"{reason}. Leave it out, or use one rank."
            )
    policy = offload.cache_policy
    if policy in policy_names() and get_policy_maker(policy)(1, 1).native is None:
        raise ValueError(
            f"eviction_policy={shown(policy)} cannot be used with total_dp_size="
            f"{num_ranks}: it has no native functions, and JAX may hang in the "
            "schedulers' processes, which tpu-inference forks. Give it some, or use "
            "one rank."
        )
    if any(isinstance(group, Mamba) for group in groups):
        raise ValueError(
            f"total_dp_size={num_ranks} cannot be used with a model that has states "
            "(Mamba, gated delta nets): their caches were never tested in shards."
        )


def _restores_tokens(config: Any, is_wanted: bool) -> bool:
    """Whether the worker must restore tokens; refuse if vLLM does not send them."""
    if not tokens.is_async(config):
        return False
    missing = tokens.missing_from_vllm() if is_wanted else ["restore_tokens=true"]
    if missing:
        raise ValueError(tokens.refusal(missing))
    return True


def _groups_of(kv_cache_config: Any) -> tuple[GroupSpec, ...]:
    """Translate vLLM's groups of layers."""
    groups: list[GroupSpec] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        layers = _layers_of(group)
        kinds = sorted({type(layer).__name__ for layer in layers})
        windows = sorted(
            {getattr(layer, "sliding_window", None) or 0 for layer in layers}
        )
        if kinds == ["FullAttentionSpec"] or _are_latents(layers):
            groups.append(FullAttention(spec.block_size))
        elif kinds == ["SlidingWindowSpec"] and len(windows) == 1:
            groups.append(SlidingWindow(spec.block_size, windows[0]))
        elif kinds == ["MambaSpec"]:
            modes = {getattr(layer, "mamba_cache_mode", "none") for layer in layers}
            if modes != {"align"}:
                raise ValueError(
                    f"mamba_cache_mode={', '.join(sorted(modes))} must be 'align' "
                    "(--mamba-cache-mode align): otherwise no state is kept for the "
                    "next request."
                )
            groups.append(Mamba(spec.block_size))
        else:
            raise ValueError(
                f"KV cache group {index} is of {', '.join(kinds)} with windows "
                f"{windows}; served are groups of FullAttentionSpec, of "
                "MLAAttentionSpec with a state for each token, of SlidingWindowSpec "
                "with one window, or of MambaSpec. Others were never tested with the "
                "layouts of tpu-inference."
            )
    if not groups:
        raise ValueError("the model has no KV cache group, so nothing to offload.")
    return tuple(groups)


def _check_states(groups: tuple[GroupSpec, ...], offload: OffloadConfig) -> None:
    """Refuse what cannot be done with states.

    Their blocks have other bytes than those of attention, and only some of a prompt's
    blocks have one.
    """
    if not any(isinstance(group, Mamba) for group in groups):
        return
    given: dict[str, Any] = {"compression": offload.compression}
    if offload.blocks_per_host_block > 1:
        given["blocks_per_chunk"] = offload.blocks_per_host_block
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={shown(value)} cannot be used with a model that has states "
                "(Mamba, gated delta nets)."
            )


def _drops_last_block(
    config: Any, groups: tuple[GroupSpec, ...], hosts: int, num_ranks: int
) -> bool:
    """Whether vLLM drops the last block of a hit; refuse drafts beside other groups."""
    drafts = getattr(config, "speculative_config", None)
    if drafts is None or drafts.method == "ngram":
        return False
    if [type(group) for group in groups] != [FullAttention]:
        raise ValueError(
            f"speculative_config: method={shown(drafts.method)} cannot be used with "
            f"{groups}: a draft's layers were tested in one group of full attention."
        )
    if hosts > 1 or num_ranks > 1:
        raise ValueError(
            f"speculative_config: method={shown(drafts.method)} needs one host and "
            f"total_dp_size=1, not {hosts} and {num_ranks}: more was never tested."
        )
    return bool(drafts.use_eagle_block_drop())


def _layers_of(group: Any) -> list[Any]:
    """Return the specs of a group's layers, once where they are all the same."""
    spec = group.kv_cache_spec
    # The worker's vLLM wraps layers of one kind that differ in size.
    each = getattr(spec, "kv_cache_specs", None)
    return list(each.values()) if each else [spec]


def _are_latents(layers: list[Any]) -> bool:
    """Whether layers have a latent of every token (MLA), in blocks like any other."""
    return all(
        type(layer).__name__ == "MLAAttentionSpec"
        # DeepSeek V4 has one for several tokens, under other names in other versions.
        and getattr(layer, "tokens_per_state", 1) == 1
        and getattr(layer, "compress_ratio", 1) == 1
        for layer in layers
    )


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


def _block_bytes(
    kv_cache_config: Any, groups: tuple[GroupSpec, ...], num_blocks: int
) -> int:
    """Return the bytes of a device block of all layers, by vLLM's sizes.

    Beside states a block has the layers of its group alone; the largest one counts.
    """
    if any(isinstance(group, Mamba) for group in groups):
        return max(map(_group_bytes, kv_cache_config.kv_cache_groups))
    tensors = kv_cache_config.kv_cache_tensors
    # Tensors with a stride share one allocation, whose size each repeats. Earlier
    # versions allocate each tensor separately.
    is_shared = hasattr(tensors[0], "layer_stride")
    num_bytes = tensors[0].size if is_shared else sum(t.size for t in tensors)
    return max(int(num_bytes // num_blocks), 1)


def _group_bytes(group: Any) -> int:
    """Return the bytes of a block of all layers of a group."""
    layers = _layers_of(group)
    each = len(group.layer_names) // len(layers)  # One spec may be that of all.
    return each * sum(int(layer.page_size_bytes) for layer in layers)


def _host_share(kv_cache_config: Any, compression: str | None) -> Fraction:
    """Return what a block takes on the host, as a part of what it takes on the device.

    Compressed, a value takes a byte, and each block has two float32 scales for each
    head. Of layers that differ, the largest part counts.
    """
    if compression is None:
        return Fraction(1)
    shares = []
    for group in kv_cache_config.kv_cache_groups:
        for layer in _layers_of(group):
            itemsize = layer.dtype.itemsize
            values = layer.block_size * layer.head_size
            share = Fraction(values + _SCALE_BYTES, values * itemsize)
            shares.append(share if itemsize > 1 else Fraction(1))
    return max(shares)

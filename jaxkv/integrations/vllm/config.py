"""Reads and checks vLLM's configuration for `OffloadConnector`.

Both halves of the connector read it, and must get the same number of host blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

from jaxkv import ConfigError, OffloadConfig, __version__
from jaxkv._util import did_you_mean, settings, shown
from jaxkv._util.settings import Settings
from jaxkv.config import KEYS, blank_secret_faults, variable_of
from jaxkv.integrations.vllm import namespace, tokens
from jaxkv.integrations.vllm.hosts import num_hosts
from jaxkv.policies import get_policy_maker, policy_names, register_policy
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.search import FullAttention, Mamba, SlidingWindow
from jaxkv.search.groups import GroupSpec
from jaxkv.transfer.storage.objects import HEADER_BYTES
from jaxkv.transfer.storage.store_url import StoreUrl, shown_url

DEFAULT_HOST_BYTES = 8 << 30
_SCALE_BYTES = 4

# Settings of vLLM -> their required values, and the reasons.
_REQUIRED: dict[str, tuple[Any, str]] = {
    "parallel_config.pipeline_parallel_size": (1, "more was never tested"),
    "parallel_config.decode_context_parallel_size": (1, "more was never tested"),
    "parallel_config.prefill_context_parallel_size": (1, "more was never tested"),
    "cache_config.enable_prefix_caching": (
        True,
        "the keys of blocks are the hashes of vLLM's prefix cache",
    ),
    "use_v2_model_runner": (
        False,
        "with it, vLLM's scheduler sends a preempted request as a new one, and JAX "
        "runners such as tpu-inference's read its prompt, but not the tokens generated "
        "so far. Set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    "model_config.runner_type": (
        "generate",
        "pooling has no KV cache to load into, and its steps do not report which "
        "transfers have ended",
    ),
    "aux_output_config.enable_return_routed_experts": (
        False,
        "the experts of a loaded prefix are unknown, and those of other tokens would "
        "be returned",
    ),
    "kv_transfer_config.kv_role": ("kv_both", "the connector stores and loads"),
}
_DRAFT_METHODS = ("ngram", "eagle3", "dflash", "mtp")

# Files that only one engine may write. `_RANK` in their paths becomes its rank.
_FILES_OF_ENGINE = ("record", "policy_state")
_RANK = "{rank}"

# vLLM's names of fields of `OffloadConfig`.
_RENAMED = {
    "cpu_bytes_to_use": "host_bytes",
    "num_cpu_blocks": "num_host_blocks",
    "eviction_policy": "cache_policy",
    "blocks_per_chunk": "blocks_per_host_block",
    "offload_prompt_only": "prompt_only",
    "transfer_deadline_s": "deadline_s",
}

# Fields that vLLM decides, that the connector serves in vLLM's way, or that were never
# tested with vLLM.
_NOT_SERVED = {
    *("executor", "mode", "max_num_batched_tokens", "world_size", "enable_events"),
    *("max_blocks_in_flight", "flush_on_preemption"),
    *("transfer_mode", "transfer_kernel", "extent_bytes", "report_after_steps"),
    *("check_plans", "agreement_timeout_s"),
    *(name for name in KEYS if KEYS[name].scope in ("events", "metrics", "strict")),
}

# Fields that the scheduler and all workers must have in common; a store has its own
# line, and the others are of one process.
_COMMON = [
    name
    for name in KEYS
    if name not in (*_NOT_SERVED, *_FILES_OF_ENGINE, "log_requests", "shadow")
    and not name.startswith(("record", "storage"))
]

_ALIASES = {field: key for key, field in _RENAMED.items()}
FIELDS = {
    _ALIASES.get(field, field): field for field in KEYS if field not in _NOT_SERVED
}
"""The keys of ``kv_connector_extra_config`` that are fields of `OffloadConfig`."""

# Descriptions in docs/vllm.md that replace the fields' descriptions.
_TEXTS = {
    "cpu_bytes_to_use": "Host memory for the blocks of all chips. Spare memory adds "
    'an eighth: `"64GiB"` takes 72 GiB.',
    "num_cpu_blocks": "Number of host blocks, instead of `cpu_bytes_to_use`.",
    "eviction_policy": "[Cache policy](policies.md) of the host tier, such as "
    "`hazard`, or your own.",
    "blocks_per_chunk": "Device blocks per host block, as `blocks_per_host_block` in "
    "[configuration.md](configuration.md#all-settings).",
    "offload_prompt_only": "Do not store generated tokens, as vLLM's own connector "
    "does by default; the next turn then recomputes the last answer.",
    "retention": "Let a request say how long its blocks are "
    "[kept](#keep-a-prompt-longer-than-others).",
    "transfer_deadline_s": "Abandon a transfer that takes longer.",
    "skip_slow_loads": "Recompute tokens whose KV would take longer to load, judging "
    "by the measured rates of steps and loads.",
    "storage_secret": "Secret that [signs blocks](storage.md#security). vLLM logs its "
    "configuration, so set `JAXKV_STORAGE_SECRET` in the environment instead.",
}


@dataclasses.dataclass(frozen=True)
class VllmSettings(Settings):
    """The settings of the connector that only vLLM needs."""

    cache_policy_module_path: str | None = settings.text(
        None,
        "scheduler",
        "Module that registers the policy named by `eviction_policy`, or has a "
        "function of that name that makes [your policy](write-a-policy.md).",
        settings.Text("the path of a module", r"[^\W\d]\w*(\.[^\W\d]\w*)*"),
    )
    storage_namespace: str | None = settings.text(
        None,
        "storage",
        "A name for the weights, instead of [their commit or files]"
        "(#which-engines-share).",
        settings.Text("a text that is not empty", r"(?s:.*\S.*)"),
    )
    storage_keep_on_reset: bool = settings.flag(
        False,
        "storage",
        "Keep using the store after a [reset](#when-weights-change). Safe only if the "
        "weights never change while the engine runs.",
    )
    keep_on_device_reset: bool = settings.flag(
        False,
        "scheduler",
        "Keep the host tier's blocks if only vLLM's prefix cache is "
        "[reset](#when-weights-change). Safe only if the weights stay the same.",
    )
    restore_tokens: bool = settings.flag(
        True,
        "worker",
        "With asynchronous scheduling, restore the tokens that tpu-inference "
        "[drops](#asynchronous-scheduling); `false` refuses asynchronous scheduling "
        "instead.",
    )
    report_requests: bool = settings.flag(
        False,
        "scheduler",
        "Add what a request found in each tier to the `kv_transfer_params` of its "
        "[response](#log-and-metrics).",
    )


_VLLM_KEYS = settings.keys_of(VllmSettings)


def table_of_keys() -> str:
    """Return the table of docs/vllm.md: what docs/configuration.md does not say."""
    defaults = OffloadConfig(host_bytes=DEFAULT_HOST_BYTES).to_dict()
    rows = {
        name: (KEYS[field], defaults[field], _TEXTS.get(name, ""))
        for name, field in FIELDS.items()
        if name in _RENAMED or name in _TEXTS
    }
    defaults = dataclasses.asdict(VllmSettings())
    rows |= {name: (key, defaults[name], "") for name, key in _VLLM_KEYS.items()}
    return settings.table_of(rows, has_scope=False)


@contextlib.contextmanager
def names_of_vllm() -> Iterator[None]:
    """Raise errors of `OffloadConfig` with vLLM's names of its fields."""
    try:
        yield
    except ConfigError as error:
        faults = [fault.renamed(_ALIASES) for fault in error.faults]
        raise ConfigError(faults) from None


@dataclasses.dataclass(frozen=True)
class StorageConfig:
    """The store behind the host."""

    url: str = dataclasses.field(repr=False)
    num_blocks: int  # Host blocks that it may hold, by vLLM's size of a block.
    namespace: bytes  # What the bytes of all blocks depend on besides their keys.
    about: str  # The namespace in a line, to compare with another engine's.

    @property
    def shown_url(self) -> str:
        """The URL without secrets, for a log."""
        return shown_url(self.url)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this machine."""
        return StoreUrl.parse(self.url).is_folder


@dataclasses.dataclass(frozen=True)
class ConnectorConfig:
    """Configuration of the connector."""

    groups: tuple[GroupSpec, ...]  # Of the model's layers.
    offload: OffloadConfig  # What the user set; the size is `num_host_blocks`.
    vllm: VllmSettings
    num_host_blocks: int
    block_bytes: int  # Bytes of a device block, by vLLM's sizes.
    planned_bytes: int  # Bytes of the host blocks, by vLLM's sizes.
    enable_events: bool  # Whether vLLM publishes events of its KV caches.
    storage: StorageConfig | None = None
    restore_tokens: bool = False  # Whether the runner would drop tokens.
    layers: tuple[tuple[str, ...], ...] = ()  # Names of the layers of each group.
    num_hosts: int = 1  # Hosts with a worker, each with a part of every block.
    # Ranks of data or attention parallelism, each with a scheduler and an equal share
    # of the host blocks.
    num_ranks: int = 1
    memory_utilization: float = 0.9  # The share of device memory that vLLM fills.
    num_blocks_override: int | None = None  # Device blocks, set instead of the share.
    # Whether a request recomputes the last block of a hit, as the draft model's KV
    # there depends on the next token.
    drops_last_block: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """Return, as texts, what the schedulers and workers must have in common."""
        values = {name: getattr(self.offload, name) for name in _COMMON}
        values |= {"num_host_blocks": self.num_host_blocks, "groups": self.groups}
        if (store := self.storage) is not None:
            values |= {"storage url": store.shown_url, "namespace": store.about}
            secret = f"jaxkv settings {self.offload.storage_secret}".encode()
            values["secret's digest"] = hashlib.sha256(secret).hexdigest()[:8]
        return {name: str(value) for name, value in values.items()}

    @property
    def rank_host_blocks(self) -> int:
        """Number of host blocks of each rank."""
        return self.num_host_blocks // self.num_ranks

    def flag_that_leaves(self, num_bytes: int, devices: Collection[Any]) -> str:
        """Return vLLM's flag, with its value, that leaves more memory on each device.

        No connector exists when vLLM sizes its KV cache, and tpu-inference sets memory
        aside only for the modules of its own connectors. It does not read
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
        """The groups with a state instead of keys and values."""
        groups = enumerate(self.groups)
        return tuple(number for number, group in groups if isinstance(group, Mamba))

    @classmethod
    def of(
        cls, vllm_config: Any, kv_cache_config: Any, *, is_rank: bool = False
    ) -> ConnectorConfig:
        """Read vLLM's `VllmConfig` and `KVCacheConfig`.

        With `is_rank`, `kv_cache_config` belongs to one rank of several: it has the
        rank's number of blocks, and the bytes of all ranks. ValueError if jaxkv cannot
        serve the configuration or was never tested with it, or for a bad key.
        """
        _check_engine(vllm_config)
        groups = _groups_of(kv_cache_config)
        _check_hashes(vllm_config.cache_config, kv_cache_config, groups)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        offload, vllm = read_extra_config(extra)
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
        num_host_blocks = _num_host_blocks(offload, host_block_bytes, num_ranks)
        if offload.storage is not None and offload.storage_label is None:
            label = _label_of(vllm_config, groups)
            offload = dataclasses.replace(offload, storage_label=label)
        events = getattr(vllm_config, "kv_events_config", None)
        cache_config = vllm_config.cache_config
        layers = [
            tuple(getattr(group, "layer_names", ()))
            for group in kv_cache_config.kv_cache_groups
        ]
        return cls(
            *(groups, offload, vllm, num_host_blocks, block_bytes),
            num_host_blocks * host_block_bytes,
            bool(events and events.enable_kv_cache_events),
            _storage_of(vllm_config, kv_cache_config, offload, vllm, host_block_bytes),
            _restores_tokens(vllm_config, vllm.restore_tokens),
            *(tuple(layers), hosts, num_ranks),
            getattr(cache_config, "gpu_memory_utilization", 0.9),
            getattr(cache_config, "num_gpu_blocks_override", None),
            drops_last_block,
        )

    def make_rules(self) -> OffloadRules:
        """Make the rules of the scheduler, which all hosts report to."""
        rules = self.offload.make_rules(self.block_bytes)
        return dataclasses.replace(rules, world_size=self.num_hosts)


def read_extra_config(extra: Mapping[str, Any]) -> tuple[OffloadConfig, VllmSettings]:
    """Read ``kv_connector_extra_config``; ValueError for a bad key or value."""
    valid = (*FIELDS, *_VLLM_KEYS)
    for name in extra:
        if name not in valid:
            raise ValueError(
                f"kv_connector_extra_config has no key {shown(name)}: "
                f"{did_you_mean(str(name), valid)}."
            )
    alone = [name for name in extra if name.startswith(("storage_", "max_storage"))]
    if alone and extra.get("storage") is None:
        raise ValueError(
            f"{alone[0]} needs a storage, such as storage='file:///var/cache/kv'."
        )
    values = {FIELDS[name]: extra[name] for name in extra if name in FIELDS}
    if values.get("host_bytes") is None and values.get("num_host_blocks") is None:
        values["host_bytes"] = DEFAULT_HOST_BYTES
    if values.get("staging_bytes") is None:
        values.pop("staging_bytes", None)
    if values.get("storage") is not None and values.get("storage_secret") is None:
        if faults := blank_secret_faults(os.environ):
            raise ConfigError(faults)
        values["storage_secret"] = os.environ.get(variable_of("storage_secret"))
    vllm = VllmSettings(**{name: extra[name] for name in extra if name in _VLLM_KEYS})
    if vllm.cache_policy_module_path is not None:
        _import_policy(vllm.cache_policy_module_path, extra.get("eviction_policy"))
    with names_of_vllm():
        return OffloadConfig(**values), vllm


def _num_host_blocks(offload: OffloadConfig, block_bytes: int, num_ranks: int) -> int:
    """Return the number of host blocks, a multiple of the ranks."""
    setting, value, unit = "num_cpu_blocks", offload.num_host_blocks, 1
    if value is None:
        setting, value = "cpu_bytes_to_use", cast(int, offload.host_bytes)
        unit = block_bytes
    if value < num_ranks * unit:
        raise ValueError(
            f"{setting}={value} must be at least {num_ranks * unit}: a host block of "
            "all layers for each rank."
        )
    return value // unit // num_ranks * num_ranks


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
    vllm: VllmSettings,
    block_bytes: int,
) -> StorageConfig | None:
    if offload.storage is None:
        return None
    object_bytes = block_bytes + HEADER_BYTES
    num_blocks = cast(int, offload.storage_bytes) // object_bytes
    if num_blocks < 1:
        raise ValueError(
            f"storage_bytes={offload.storage_bytes} must be at least {object_bytes}, "
            "what one host block takes in the store."
        )
    deps = namespace.namespace_of(vllm_config, kv_cache_config, vllm.storage_namespace)
    about = namespace.summary(deps)
    return StorageConfig(offload.storage, num_blocks, namespace.encode(deps), about)


def _label_of(config: Any, groups: Sequence[GroupSpec]) -> str:
    """Return what `jaxkv store ls` shows of a model, without its folder's path."""
    name = os.path.basename(str(config.model_config.model).rstrip("/"))
    dtype = config.cache_config.cache_dtype
    dtype = config.model_config.dtype if dtype == "auto" else dtype
    sizes = "/".join(dict.fromkeys(str(group.block_size) for group in groups))
    dtype = str(dtype).removeprefix("torch.")
    return f"{name}, {dtype}, {sizes} tokens a block, jaxkv {__version__}"


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
    """Insert the rank of an engine into the paths of its files."""
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
    for path, (required, reason) in _REQUIRED.items():
        owner, _, name = path.rpartition(".")
        part = getattr(config, owner, None) if owner else config
        value = getattr(part, name, required)
        if value != required:
            raise ValueError(f"{name}={shown(value)} must be {required!r}: {reason}.")
    drafts = getattr(config, "speculative_config", None)
    if drafts is not None and drafts.method not in _DRAFT_METHODS:
        raise ValueError(
            f"speculative_config: method={shown(drafts.method)} must be one of "
            f"{', '.join(_DRAFT_METHODS)}: others, which may add layers to each block, "
            "were never tested."
        )
    additional = getattr(config, "additional_config", None) or {}
    if additional.get("enable_continue_decode"):
        raise ValueError(
            "enable_continue_decode must be false: its loop restores the KV caches "
            "after the connector has run, and loaded blocks are lost."
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
    """Refuse settings that schedulers of several ranks cannot share."""
    if hosts > 1:
        raise ValueError(
            f"total_dp_size={num_ranks} must be 1 on {hosts} hosts: ranks were never "
            "tested with a part of each block on every host."
        )
    for name in _FILES_OF_ENGINE:
        if (path := getattr(offload, name)) is not None:
            raise ValueError(
                f"{name}={shown(path)} cannot be used with total_dp_size={num_ranks}: "
                "each rank would write the same file. Remove it, or use one rank."
            )
    policy = offload.cache_policy
    if policy in policy_names() and get_policy_maker(policy)(1, 1).native is None:
        raise ValueError(
            f"eviction_policy={shown(policy)} cannot be used with total_dp_size="
            f"{num_ranks}: it has no native functions, and JAX may hang in the "
            "schedulers' processes, which tpu-inference forks. Choose another policy, "
            "or use one rank."
        )
    if any(isinstance(group, Mamba) for group in groups):
        raise ValueError(
            f"total_dp_size={num_ranks} cannot be used with a model that has states "
            "(Mamba, gated delta nets): their caches were never tested in shards."
        )


def _restores_tokens(config: Any, may_restore: bool) -> bool:
    """Whether the worker must restore tokens; refuse if vLLM does not send them."""
    if not tokens.is_async(config):
        return False
    missing = tokens.missing_from_vllm() if may_restore else ["restore_tokens=true"]
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
    """Refuse settings that exclude states, which only some blocks of a prompt have."""
    if not any(isinstance(group, Mamba) for group in groups):
        return
    for name, value, default in (
        ("compression", offload.compression, None),
        ("blocks_per_chunk", offload.blocks_per_host_block, 1),
    ):
        if value != default:
            raise ValueError(
                f"{name}={shown(value)} cannot be used with a model that has states "
                "(Mamba, gated delta nets)."
            )


def _drops_last_block(
    config: Any, groups: tuple[GroupSpec, ...], hosts: int, num_ranks: int
) -> bool:
    """Whether vLLM drops the last block of a hit; refuse drafts with other groups."""
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
            f"total_dp_size=1, not {hosts} and {num_ranks}: with ranks, tpu-inference "
            "0.32 itself hangs on the CPU; several hosts were never tested."
        )
    return bool(drafts.use_eagle_block_drop())


def _layers_of(group: Any) -> list[Any]:
    """Return the specs of a group's layers; one if they are all the same."""
    spec = group.kv_cache_spec
    # The worker's vLLM wraps layers of one kind that differ in size.
    specs = getattr(spec, "kv_cache_specs", None)
    return list(specs.values()) if specs else [spec]


def _are_latents(layers: list[Any]) -> bool:
    """Whether layers have a latent for every token (MLA), in ordinary blocks."""
    return all(
        type(layer).__name__ == "MLAAttentionSpec"
        # DeepSeek V4 has one for several tokens; its name depends on the version.
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
    """Return a device block's bytes by vLLM's sizes; the largest one's with states."""
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
    num_repeats = len(group.layer_names) // len(layers)  # One spec may describe all.
    return num_repeats * sum(int(layer.page_size_bytes) for layer in layers)


def _host_share(kv_cache_config: Any, compression: str | None) -> Fraction:
    """Return the bytes of a host block as a fraction of a device block's.

    A compressed value takes a byte, and each block has two float32 scales per head. If
    layers differ, the largest fraction counts.
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

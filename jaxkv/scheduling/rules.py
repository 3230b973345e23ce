"""The rules of offloading that an engine sets, and checks of their conflicts."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias, get_args

from jaxkv._util import settings, shown
from jaxkv._util.settings import ConfigError, Fault, Key, Settings, exclusion
from jaxkv.policies import policy_names
from jaxkv.search.groups import FullAttention, GroupSpec, alignment

WriteRule: TypeAlias = Literal["on_reuse", "on_evict", "through"]
"""Which blocks of a tier are written to the next one down."""

# The default batch of stores. Below this size, to start a transfer takes the engine's
# thread about as long as the bus takes to move it.
_BATCH_BYTES = 32 << 20
_MAX_BATCH_BLOCKS = 64

NO_LIMIT = 1 << 62
"""More tokens than a request has."""


OFF = "off"
"""The name of a shadow without hits: the engine without a host tier."""

_MAX_SHADOWS = 16
_FACTOR = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


class Shadow(NamedTuple):
    """An alternative to the host tier that serves."""

    policy: str  # Or `OFF`.
    factor: float  # Its size, as a multiple of the serving tier's; 0 for `OFF`.


def parse_shadows(text: str) -> tuple[Shadow, ...]:
    """Parse the setting `shadow`: policies with multiples of the serving tier's size.

    Example:
        >>> parse_shadows("lru*0.5,2; hazard*1; off")[1:]
        (Shadow(policy='lru', factor=2.0), Shadow(policy='hazard', factor=1.0), \
Shadow(policy='off', factor=0.0))
    """
    shadows: list[Shadow] = []
    for part in text.split(";"):
        policy, star, factors = map(str.strip, part.partition("*"))
        if policy == OFF and not star:
            shadows.append(Shadow(OFF, 0.0))
            continue
        if policy not in policy_names():
            names = ", ".join(policy_names())
            raise ValueError(f"{shown(policy)} must be one of {names}, or {OFF}")
        for factor in factors.split(","):
            number = factor.strip()
            if not _FACTOR.fullmatch(number) or not 0.01 <= float(number) <= 100:
                raise ValueError(
                    f"{shown(number)} must be a multiple of the host tier's size, from "
                    f"0.01 to 100, as in {policy}*0.5,2"
                )
            shadows.append(Shadow(policy, float(number)))
    if len(set(shadows)) < len(shadows) or len(shadows) > _MAX_SHADOWS:
        raise ValueError(f"name at most {_MAX_SHADOWS} shadows, and each only once")
    return tuple(shadows)


def _checked_shadow(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError
    parse_shadows(text)
    return text


@dataclasses.dataclass(frozen=True)
class RuleSettings(Settings):
    """The settings that `OffloadRules` and `OffloadConfig` share."""

    mode: Literal["eager", "lazy"] = settings.name(
        "eager",
        "scheduler",
        "Store blocks once they are full (`eager`), or shortly before the device "
        "evicts them (`lazy`).",
        names=lambda: ("eager", "lazy"),
    )
    max_num_batched_tokens: int = settings.number(
        8192,
        "scheduler",
        "The engine's maximum tokens per step. Lazy mode stores from the blocks that "
        "the device evicts next, looking ahead by up to twice as many tokens.",
        unit="tokens",
        minimum=1,
    )
    world_size: int = settings.number(
        1,
        "scheduler",
        "Workers that report to one scheduler; a transfer is complete once every "
        "worker has reported it.",
        unit="workers",
        minimum=1,
    )
    blocks_per_host_block: int = settings.number(
        1,
        "engine, scheduler",
        "Device blocks per host block, stored and evicted together. More than one "
        "makes a store's objects larger, but transfers no faster, and needs one "
        "full-attention group and eager stores.",
        unit="device blocks",
        minimum=1,
    )
    store_threshold: int = settings.number(
        0,
        "scheduler",
        "Store only blocks that at least this many requests have asked for; a "
        "preempted request counts once. 0 or 1: store all blocks.",
        unit="requests",
        minimum=0,
    )
    max_unseen_blocks: int | None = settings.number(
        None,
        "scheduler",
        "Of a prompt's blocks that no request has asked for before, store at most "
        "this many, from the first on; the others once a later request asks for them. "
        "`null`: store all. Blocks of generated tokens are not limited.",
        unit="host blocks",
        minimum=0,
    )
    prompt_only: bool = settings.flag(
        False, "scheduler", "Do not store generated tokens. Not in lazy mode."
    )
    max_offload_tokens: int | None = settings.number(
        None,
        "scheduler",
        "Store only this many tokens per request, from the first on. `null`: store "
        "all. Not in lazy mode.",
        unit="tokens",
        minimum=1,
    )
    delay_shared_loads: bool = settings.flag(
        False,
        "scheduler",
        "If another request is already loading a block, wait rather than load it "
        "twice.",
    )
    max_blocks_in_flight: int | None = settings.number(
        None,
        "scheduler",
        "Maximum blocks in flight, loads plus stores; loads go first. `null`: no "
        "limit.",
        unit="device blocks",
        minimum=1,
    )
    store_batch_blocks: int | None = settings.number(
        None,
        "scheduler",
        "Blocks per batch of stores. Full blocks wait on the device until a batch is "
        "complete, device blocks run short, no model runs or their request ends. 0: "
        "store in each step. `null`: 32 MiB of blocks, at most 64 blocks.",
        unit="device blocks",
        minimum=0,
    )
    store_max_wait_steps: int = settings.number(
        16,
        "scheduler",
        "Maximum steps that a block waits until its batch is complete.",
        unit="steps",
        minimum=1,
    )
    pause_unused_stores: bool = settings.flag(
        False,
        "scheduler",
        "After storing twice the host's capacity without one hit, store only 1 "
        "request in 16 until a hit occurs. Not in lazy mode.",
    )
    skip_slow_loads: bool = settings.flag(
        False,
        "scheduler",
        "Decline loads that would take longer than recomputing, judging by the rates "
        "passed to `OffloadScheduler.set_rates`.",
    )
    keep_heads: bool = settings.flag(
        False,
        "scheduler",
        "Refuse to store a block that would evict an earlier block of its own prefix, "
        "and store as much of a prefix as fits. `false`: as vLLM does, and as traces "
        "and shadows are replayed.",
    )
    flush_on_preemption: bool = settings.flag(
        False,
        "scheduler",
        "Before a step that preempts, wait for all transfers in flight; otherwise, "
        "their blocks stay held.",
    )
    storage_write: WriteRule = settings.name(
        "on_reuse",
        "scheduler",
        "Which blocks are [written to the "
        "store](storage.md#how-blocks-are-written-and-read): `on_reuse`, `on_evict` "
        "or `through`.",
        names=lambda: get_args(WriteRule),
    )
    max_storage_blocks: int = settings.number(
        128,
        "scheduler",
        "Maximum blocks being written to the store, and as many being read; fewer if "
        "the host tier is small. No limit on what a request gets.",
        unit="host blocks",
        minimum=1,
    )
    storage_probe_s: float | None = settings.seconds(
        None,
        "scheduler",
        "How long a request waits for a [probe of the "
        "store](storage.md#other-engines). 0: do not probe. `null`: 0.005, or 0 for a "
        "bucket.",
        or_none=True,
        or_zero=True,
    )
    retention: bool = settings.flag(
        False,
        "scheduler",
        "Let `request.retention` set [how long blocks are "
        "kept](policies.md#retention-blocks-to-keep-longer).",
    )
    shadow: str | None = settings.declare(
        None,
        Key(
            "scheduler",
            "Count the hits that other host tiers would have, by policy and multiples "
            "of the host's size: `lru*0.5,2;hazard*1;off` ([shadows.md](shadows.md)).",
            "",
            f"policies ({', '.join(policy_names())}) with multiples of the host's "
            "size, from 0.01 to 100, as in lru*0.5,2;hazard*1;off",
            _checked_shadow,
        ),
    )
    log_requests: bool = settings.flag(
        False,
        "scheduler",
        "Log [a line of JSON](metrics.md#log-requests) for each finished request.",
    )

    def _contradictions(self) -> Iterator[Fault]:
        yield from super()._contradictions()
        if self.shadow is not None:
            reason = (
                "shadows simulate neither retention nor host blocks of several blocks."
            )
            for name, required in (("retention", False), ("blocks_per_host_block", 1)):
                if (other := getattr(self, name)) != required:
                    value = shown(self.shadow)
                    yield exclusion("shadow", value, name, other, reason)
        if self.mode != "lazy":
            return
        if (factor := self.blocks_per_host_block) > 1:
            reason = (
                "the device evicts single blocks, and a host block holds several "
                "consecutive ones."
            )
            yield exclusion("blocks_per_host_block", factor, "mode", "'lazy'", reason)
        for name in ("prompt_only", "max_offload_tokens", "pause_unused_stores"):
            if value := getattr(self, name):
                reason = "a block that the device evicts belongs to no request."
                yield exclusion(name, value, "mode", "'lazy'", reason)


@settings.documented
@dataclasses.dataclass(frozen=True)
class OffloadRules(RuleSettings):
    """Rules for the stores and loads of `OffloadScheduler`.

    Raises:
        ConfigError: A ValueError. Values are out of range, unknown, of the wrong type,
            or exclude one another.
    """

    block_bytes: int = settings.number(
        0,
        "scheduler",
        "Size of a device block, for `skip_slow_loads`, and for the default of "
        "`store_batch_blocks`.",
        unit="bytes",
        minimum=0,
    )

    @property
    def store_batch(self) -> int:
        """Blocks to store at a time; 0 to store all in each step."""
        if self.store_batch_blocks is not None:
            return self.store_batch_blocks
        if not self.block_bytes:
            return 0
        num_blocks = _BATCH_BYTES // self.block_bytes
        # A batch of one block would be full, and so be stored, in nearly every step.
        return min(num_blocks, _MAX_BATCH_BLOCKS) if num_blocks > 1 else 0

    def _contradictions(self) -> Iterator[Fault]:
        yield from super()._contradictions()
        if self.skip_slow_loads and not self.block_bytes:
            yield Fault(
                "{skip_slow_loads}=True needs {block_bytes}, a device block's bytes."
            )


def settings_of(
    rules: OffloadRules, num_host_blocks: int, num_storage_blocks: int
) -> dict[str, str]:
    """Return, as texts, the version, the sizes and all rules that change decisions."""
    sizes = {
        "num_host_blocks": num_host_blocks,
        "num_storage_blocks": num_storage_blocks,
    }
    values = {"version": sys.modules["jaxkv"].__version__, **sizes, **vars(rules)}
    del values["shadow"], values["log_requests"]
    return {name: str(value) for name, value in values.items()}


def check_groups(rules: RuleSettings, groups: tuple[GroupSpec, ...]) -> None:
    """Raise ConfigError for rules that do not suit the model's groups of layers."""
    if rules.shadow is not None:
        reason, value = "shadows cannot simulate {}.", shown(rules.shadow)
        _check_one_group("shadow", value, groups, reason)
    factor = rules.blocks_per_host_block
    if factor > 1:
        reason = "blocks of {} cannot be stored and evicted several at a time."
        _check_one_group("blocks_per_host_block", factor, groups, reason)
    num_tokens, min_tokens = rules.max_offload_tokens, factor * alignment(groups)
    if num_tokens is not None and num_tokens < min_tokens:
        text = (
            "{max_offload_tokens}={} must be at least {}, the tokens of the shortest "
            "prefix that can be loaded: fewer are never stored whole."
        )
        raise ConfigError([Fault(text, num_tokens, min_tokens)])


def _check_one_group(
    setting: str, value: object, groups: tuple[GroupSpec, ...], reason: str
) -> None:
    if groups != (FullAttention(groups[0].block_size),):
        text = (
            f"{{{setting}}}={{}} needs a model with a single group of full-attention "
            f"layers: {reason}"
        )
        raise ConfigError([Fault(text, value, groups)])


def check_lists_victims(write: WriteRule, can_list_victims: bool) -> None:
    """Raise ConfigError for `on_evict` unless the tier can list its next victims."""
    if write == "on_evict" and not can_list_victims:
        fault = Fault(
            "{storage_write}='on_evict' needs {cache_policy}='lru', "
            "{executor}='native' and {retention}=False: other host tiers cannot list "
            "the blocks that they evict next."
        )
        raise ConfigError([fault])

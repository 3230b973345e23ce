"""A random engine's setup: groups, configuration, sizes, faults and habits."""

import dataclasses

from jaxkv import (
    ChunkedLocal,
    FullAttention,
    Mamba,
    OffloadConfig,
    SlidingWindow,
    policy_names,
)
from tests.campaign.model import BLOCK_BYTES

GROUPS = {
    "full": (FullAttention(4),),
    "full of 8": (FullAttention(8),),
    "window": (SlidingWindow(4, 10),),
    "chunked": (ChunkedLocal(4, 8),),
    "mamba": (Mamba(4),),
    "full+window": (FullAttention(4), SlidingWindow(4, 10)),
    "full+chunked": (FullAttention(4), ChunkedLocal(4, 8)),
    "full+mamba": (FullAttention(4), Mamba(4)),
    "full+full": (FullAttention(4), FullAttention(4)),
    "window+mamba": (SlidingWindow(4, 6), Mamba(4)),
    "two sizes": (FullAttention(4), SlidingWindow(8, 12)),
    "three": (FullAttention(4), SlidingWindow(4, 7), Mamba(8)),
}

POLICIES = tuple(policy_names())
SHADOWED = ("full", "full of 8")


@dataclasses.dataclass(frozen=True)
class Habits:
    """The choices that the contract leaves to an engine."""

    names_new_blocks: bool
    gives_tables_at_end: bool
    takes_answers: bool
    leaves_holes: bool
    trims: bool
    says_preempted: bool
    keeps_offers: bool
    renames_weights: bool


@dataclasses.dataclass(frozen=True)
class Setup:
    groups: str
    config: OffloadConfig
    num_device_blocks: int
    max_tokens: int
    failures: float
    stuck: float
    max_steps: int
    habits: Habits

    def __str__(self):
        defaults = OffloadConfig().to_dict()
        config = self.config.to_dict()
        chosen = {key: config[key] for key in config if config[key] != defaults[key]}
        fields = dataclasses.asdict(self) | {"config": chosen}
        return " ".join(f"{name}={value}" for name, value in fields.items())


def random_setup(rng, *, groups=None, **fixed):
    """Choose an engine; `fixed` are keys of the configuration."""
    if groups is None:
        groups = rng.choice(list(GROUPS))
        if rng.random() < 0.15:  # As shadows are refused for most others.
            groups = rng.choice(SHADOWED)
    num_groups = len(GROUPS[groups])
    values = {
        "num_host_blocks": rng.choice((6, 12, 30, 80)) * num_groups,
        "cache_policy": rng.choice(POLICIES),
        "transfer_mode": rng.choice(("fused", "staged")),
        "extent_bytes": rng.choice((None, 2 * BLOCK_BYTES, 6 * BLOCK_BYTES)),
        "store_threshold": rng.choice((0, 0, 0, 0, 2)),
        "max_unseen_blocks": rng.choice((None, None, None, 0, 2)),
        "retention": rng.random() < 0.3,
        "delay_shared_loads": rng.random() < 0.25,
        "max_blocks_in_flight": rng.choice((None, None, None, 2, 8)),
        "skip_slow_loads": rng.random() < 0.15,
        "flush_on_preemption": rng.random() < 0.15,
        "world_size": rng.choice((1, 1, 1, 2)),
        "enable_events": rng.random() < 0.5,
        "report_after_steps": rng.choice((None, None, None, 1, 2)),
        "deadline_s": 12.0,
    }
    is_pure = values["cache_policy"] != "hazard"
    if is_pure and not values["retention"] and rng.random() < 0.2:
        values["executor"] = "xla"
    if rng.random() < 0.3:
        values |= {"mode": "lazy", "max_num_batched_tokens": rng.choice((8, 16, 32))}
    else:
        values["prompt_only"] = rng.random() < 0.15
        values["max_offload_tokens"] = rng.choice((None, None, None, 18))
        if groups.startswith("full") and num_groups == 1:
            values["blocks_per_host_block"] = rng.choice((1, 2, 3))
    if fixed.get("storage") is not None:
        values |= {
            "world_size": 1,
            "storage_bytes": rng.choice((9, 40, 4000))
            * 2048
            * values.get("blocks_per_host_block", 1),
            "storage_write": rng.choice(
                ("on_reuse", "through", "on_evict")
                if (values["cache_policy"], values.get("executor"), values["retention"])
                == ("lru", None, False)
                else ("on_reuse", "through")
            ),
            "max_storage_blocks": rng.choice((1, 3, 128)),
            "storage_deadline_s": 12.0,
            "storage_await_s": 3.0,
            "storage_list_s": rng.choice((5.0, 20.0, 60.0)),
            "storage_probe_s": rng.choice((0.0, 1.0, 4.0)),
        }
    values |= fixed
    if values["extent_bytes"] is not None:
        per_block = values.get("blocks_per_host_block", 1)
        values["extent_bytes"] *= per_block
        if rng.random() < 0.5:  # Little room: much has to wait in the engine.
            values["staging_bytes"] = values["extent_bytes"] * rng.choice((1, 2))
    if values["max_blocks_in_flight"] is None:
        values.setdefault("store_batch_blocks", rng.choice((0, 0, 0, 3, 8)))
    if (
        groups in SHADOWED
        and values.get("blocks_per_host_block", 1) == 1
        and not values["retention"]
    ):
        shadows = "lru*1,3", "hazard*0.5;arc*2;off"
        values.setdefault("shadow", rng.choice((None, *shadows)))
    is_calm = rng.random() < 0.2
    stuck = rng.choice((0, 0.02)) if values["report_after_steps"] is None else 0
    return Setup(
        groups,
        OffloadConfig.from_dict(values),
        num_device_blocks=rng.choice((14, 18, 30)) * num_groups,
        max_tokens=rng.choice((24, 40, 48)),
        failures=0.0 if is_calm else rng.choice((0.03, 0.1, 0.3)),
        stuck=0.0 if is_calm else stuck,
        max_steps=rng.choice((1, 2, 5)),
        habits=Habits(
            *(rng.random() < share for share in (0.6, 0.6, 0.7, 0.5, 0.4, 0.8)),
            keeps_offers=rng.random() < 0.5,
            # What a store has of other weights is found again, under the same keys.
            renames_weights=rng.random() < 0.6 or values.get("storage") is not None,
        ),
    )

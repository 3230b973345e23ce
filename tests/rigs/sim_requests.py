"""Configuration of a run of the engine, and the state of requests and transfers."""

import collections
import dataclasses

from jaxkv.scheduling.protocol import NO_EVENT
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.tiers.retention import Retention
from jaxkv.types import STOPS

RETENTIONS = (
    None,
    Retention(priority=99, ttl_s=0.5),
    Retention(priority=30, half_life_s=0.01),
    Retention(ttl_s=60, num_tokens=9),
    None,
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """Configuration of a run.

    Attributes:
        groups: The groups of the model's layers.
        rules: Rules for stores and loads.
        policy: Policy of the host tier.
        num_device_blocks: Blocks of the device pool.
        num_host_blocks: Blocks of the host tier.
        max_tokens: Maximum tokens of a request.
        max_drafts: Maximum draft tokens of a step.
        key_length: Bytes of a key.
        failures: Probability that a transfer fails.
        num_storage_blocks: Host blocks of the store behind the host; 0 for none.
    """

    groups: tuple
    rules: OffloadRules = dataclasses.field(default_factory=OffloadRules)
    policy: str = "lru"
    num_device_blocks: int = 30
    num_host_blocks: int = 40
    max_tokens: int = 40
    max_drafts: int = 0
    key_length: int = 32
    failures: float = 0.1
    num_storage_blocks: int = 0


class SimRequest:
    """A request, as the scheduler sees it and as the engine does."""

    def __init__(self, request_id, engine, path, num_prompt_tokens, max_tokens):
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.stop = STOPS[num_prompt_tokens % len(STOPS)]
        self.retention = RETENTIONS[num_prompt_tokens % len(RETENTIONS)]
        self.max_tokens = max_tokens
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.block_keys_by_group = tuple([] for _ in engine.groups)
        self.block_keys = self.block_keys_by_group[0]
        self.path = [0]  # the prefixes of 0, 1, 2, ... tokens
        self.drafts = []  # those of draft tokens
        self.phase = "waiting"
        self.tables = [[] for _ in engine.groups]
        self.num_cached = [0 for _ in engine.groups]
        self.num_loading_tokens = 0
        self.new_blocks = None
        self.seen_on_host = set()
        # For how many steps each row has waited to be stored with others.
        self.steps_waited = collections.Counter()
        self.is_careless = False  # It also caches blocks out of its windows.
        self.skipped = set()  # Blocks of its offer that are not written.
        self._engine = engine
        for prefix in path[1:]:
            self.append(prefix)

    @property
    def num_tokens(self):
        return len(self.path) - 1

    @property
    def num_certain(self):
        return self.num_computed_tokens - self.num_output_placeholders

    @property
    def table(self):
        return self.tables if len(self.tables) > 1 else self.tables[0]

    def append(self, prefix):
        self.path.append(prefix)
        for g, spec in enumerate(self._engine.groups):
            if self.num_tokens % spec.block_size == 0:
                self.block_keys_by_group[g].append(self._engine.key(g, prefix))

    def content(self, group, index):
        """The content of a full block."""
        end = (index + 1) * self._engine.groups[group].block_size
        return group, self.path[end]


@dataclasses.dataclass(eq=False)
class SimLoad:
    """An offer to a request: {(group, first block of a row): indices wanted}."""

    num_tokens: int
    num_computed: int
    rows: dict
    copies: dict  # (group, index) -> source
    hosts: dict  # as `rows` -> host block
    keys: dict  # as `rows` -> key
    targets: dict | None = None  # (group, index) -> device block
    event: int = NO_EVENT
    is_wanted: bool = True
    num_reports: int = 0
    has_failed: bool = False

    def cut(self, num_blocks_of):
        """Cut the offer to a shorter prefix."""
        rows = {
            at: [i for i in indices if i < num_blocks_of[at[0]]]
            for at, indices in self.rows.items()
        }
        self.rows = {at: indices for at, indices in rows.items() if indices}
        for part in (self.hosts, self.keys):
            for at in set(part) - set(self.rows):
                del part[at]
        for g, i in list(self.copies):
            if i >= num_blocks_of[g]:
                del self.copies[g, i]


@dataclasses.dataclass(eq=False)
class SimStore:
    """A store event: rows of (key, host block), and the device blocks of all."""

    rows: list
    device_blocks: list
    num_reports: int = 0
    has_failed: bool = False
    is_stale: bool = False

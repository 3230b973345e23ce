"""A replay's host whose policy the requests choose (`jaxkv.scheduling.whatif.auto`).

It chooses by shadows, which see each request after it was served.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from jaxkv.keys.packed import PackedKeys, key_from_int, keys_to_words, words_to_keys
from jaxkv.policies import get_policy_maker
from jaxkv.scheduling.whatif.auto import CANDIDATES, PolicyChoice, with_candidates
from jaxkv.scheduling.whatif.shadows import Shadows
from jaxkv.tiers.change_over import change_over
from jaxkv.tiers.executors import Executor, Words, make_executor
from jaxkv.tools.replay.serve import Facts, Request
from jaxkv.tools.replay.traces import Trace
from jaxkv.types import STOPS


class AutoHost:
    """A host whose policy the requests choose."""

    def __init__(self, trace: Trace, num_blocks: int, max_batch: int) -> None:
        self._shadows = Shadows(with_candidates(()), num_blocks, 1)
        self.choice = PolicyChoice(self._shadows)  # Chooses its policy
        self._policies = {
            name: get_policy_maker(name)(num_blocks, max_batch) for name in CANDIDATES
        }
        # Its index, which each call of `note` may replace
        self.executor: Executor = make_executor(self._policies[self.choice.policy])
        # Hashes, as an engine's keys are: a sample goes by their bits.
        keys = list(map(key_from_int, range(trace.num_unique_blocks)))
        self._words = keys_to_words(keys)

    def keys_of(self, ids: NDArray[Any]) -> Words:
        """Make keys of a trace's blocks (int[n])."""
        words: Words = self._words[ids]
        words.flags.writeable = False
        return words

    def note(self, request: Request, facts: Facts) -> None:
        """Show a served request to the shadows, and change the policy if due."""
        keys, num_asked, _, device, passes, _ = request
        num_local, num_findable, num_running = device or (0, num_asked, num_asked)
        shadows, packed = self._shadows, PackedKeys(words_to_keys(keys), keys)
        asked_keys, num_keys = packed[:num_asked], request.num_keys
        shadows.look_up("", asked_keys, num_local, num_findable)
        arrival = facts.input_tokens, facts.time_ms
        shadows.begin("", asked_keys, *arrival, is_found=True, is_loaded=False)
        ends = [*range(min(num_asked, num_keys), min(num_running, num_keys) + 1)]
        for end, is_end in [*((end, False) for end in ends), (num_keys, True)]:
            may = None if passes is None else passes[:end]
            shadows.offer("", packed, end, (), may, is_end=is_end)
        output = None if facts.output_tokens < 0 else facts.output_tokens
        shadows.finish("", packed, facts.time_ms, output, STOPS[facts.stop])
        shadows.forget("")
        before = self._policies[self.choice.policy]
        policy = self.choice.choose()
        if policy is not None:
            learned, scale = shadows.learned_by(policy)
            after = self._policies[policy]
            self.executor = change_over(
                self.executor, before, after, learned=learned, scale=scale
            )

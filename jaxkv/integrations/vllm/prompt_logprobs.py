"""Keeps the log-probabilities of prompts right in tpu-inference's runner.

docs/internals/vllm.md shows what is wrong. A response has each row that was computed,
once. If a prefix was not computed, such as with ``skip_reading_prefix_cache=False``, it
has no ``prompt_logprobs``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

_UNKNOWN = -1  # The token id of rows that no step has computed.


def guard_prompt_logprobs(runner: Any) -> None:
    """Wrap what fills and returns the buffers of a runner, if it has any."""
    manager: Any = getattr(runner, "persistent_batch_manager", None)
    collect = getattr(runner, "_get_prompt_logprobs_dict", None)
    batch = getattr(manager, "input_batch", None)
    if collect is None or not hasattr(batch, "num_prompt_logprobs"):
        return
    update = manager.update_states

    @functools.wraps(update)
    def update_and_keep(scheduler_output: Any, *args: Any, **named: Any) -> Any:
        cached, requests = scheduler_output.scheduled_cached_reqs, manager.requests
        in_batch = manager.input_batch.req_id_to_index
        kept = {}
        for name, num_outputs in zip(
            cached.req_ids, cached.num_output_tokens, strict=True
        ):
            if name in in_batch and name not in cached.resumed_req_ids:
                continue
            params = getattr(requests[name], "sampling_params", None)
            if getattr(params, "prompt_logprobs", None) is not None:
                # Results in flight keep the earlier state.
                requests[name] = copy.copy(requests[name])
                kept[name] = num_outputs, requests[name].in_progress_prompt_logprobs_cpu
        changed = update(scheduler_output, *args, **named)
        for name, (num_outputs, buffers) in kept.items():
            if num_outputs:  # They were returned with the first one.
                requests[name].in_progress_prompt_logprobs_cpu = None
                manager.input_batch.num_prompt_logprobs.pop(name, None)
            elif buffers is not None:
                requests[name].in_progress_prompt_logprobs_cpu = buffers
            else:
                _mark_unknown(requests[name])
        for new in scheduler_output.scheduled_new_reqs:
            _mark_unknown(requests[new.req_id])
        return changed

    @functools.wraps(collect)
    def collect_known(data: Any) -> dict[str, Any]:
        snaps = [
            snap
            for snap in data.req_snaps
            if snap.req_state is manager.requests.get(snap.req_id)
        ]
        collected = collect(dataclasses.replace(data, req_snaps=snaps))
        return {
            name: rows
            for name, rows in collected.items()
            if not (rows.logprob_token_ids == _UNKNOWN).any()
        }

    manager.update_states, runner._get_prompt_logprobs_dict = (
        update_and_keep,
        collect_known,
    )


def _mark_unknown(state: Any) -> None:
    buffers = state.in_progress_prompt_logprobs_cpu
    if buffers is not None:
        token_ids, *_ = buffers
        token_ids[:] = _UNKNOWN

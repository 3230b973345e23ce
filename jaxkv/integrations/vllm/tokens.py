"""Restores the tokens that tpu-inference drops with asynchronous scheduling.

docs/internals/vllm.md shows how. vLLM sends all tokens of each request that was not in
the last step (``CachedRequestData.all_token_ids``). `TokenRestorer` wraps
``update_states``, takes the outputs from there, and withdraws such a request from the
results in flight. Both halves of the connector refuse to start without what this needs.
They look for features, not for modules by name, so a renamed runner is served. If ids
stop coming, `TokenRestorer` raises before it changes anything; vLLM ends the engine.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Collection
from typing import Any

_LOG = logging.getLogger("jaxkv")

_NEEDED_OF_VLLM = "req_ids", "resumed_req_ids", "num_output_tokens", "all_token_ids"

# Attributes that a runner must have.
_NEEDED_OF_RUNNER = (
    "_pre_async_results",
    "persistent_batch_manager.update_states",
    "persistent_batch_manager.requests",
    "persistent_batch_manager.input_batch.req_id_to_index",
)

# Classes that the runner's module has, and their fields.
_NEEDED_BESIDE_RUNNER = {
    "CachedRequestState": ("prompt_token_ids", "output_token_ids"),
    "AsyncPreResults": ("request_seq_lens", "placeholder_req_id_to_index"),
}


def is_async(vllm_config: Any) -> bool:
    """Whether steps are scheduled before the tokens of earlier ones are known."""
    # vLLM replaces None, its default, before it makes a connector. Versions that leave
    # it None, or have no such setting, schedule synchronously.
    return bool(getattr(vllm_config.scheduler_config, "async_scheduling", None))


def missing_from_vllm() -> list[str]:
    """Return what restoring tokens needs and this vLLM's scheduler does not send."""
    try:
        from vllm.v1.core.sched.output import CachedRequestData
    except ImportError as error:
        return [f"CachedRequestData ({error})"]
    return _missing_parameters(CachedRequestData, _NEEDED_OF_VLLM)


def missing_from_runner(runner: Any) -> list[str]:
    """Return what `TokenRestorer` needs and a runner does not have."""
    kind = type(runner)
    for path in _NEEDED_OF_RUNNER:
        owner: Any = runner
        for name in path.split("."):
            if not hasattr(owner, name):
                return [f"{kind.__name__}.{path}"]
            owner = getattr(owner, name)
    update_states = runner.persistent_batch_manager.update_states
    missing = _missing_parameters(update_states, ["scheduler_output"])
    modules = [sys.modules.get(base.__module__) for base in kind.__mro__]
    for name, fields in _NEEDED_BESIDE_RUNNER.items():
        owners = [module for module in modules if hasattr(module, name)]
        if owners:
            missing += _missing_parameters(getattr(owners[0], name), fields)
        else:
            missing.append(f"{kind.__module__}.{name}")
    return missing


def _missing_parameters(function: Any, names: Collection[str]) -> list[str]:
    has = inspect.signature(function).parameters
    return [f"{function.__qualname__}: {name}" for name in names if name not in has]


class TokenRestorer:
    """Wraps ``update_states`` of a ``TPUModelRunner``, and restores tokens first."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._manager = runner.persistent_batch_manager
        self._update_states = self._manager.update_states
        self.num_restored = 0  # Requests whose tokens were wrong, counted each time.

    @classmethod
    def install(cls, runner: Any) -> TokenRestorer:
        """Wrap the ``update_states`` of a runner once, and return the wrapper.

        ValueError if the runner has not all that is needed.
        """
        manager = getattr(runner, "persistent_batch_manager", None)
        installed = getattr(manager, "update_states", None)
        if isinstance(installed, cls):
            return installed
        missing = missing_from_runner(runner)
        if missing:
            raise ValueError(refusal(missing))
        installed = runner.persistent_batch_manager.update_states = cls(runner)
        _LOG.info(
            "asynchronous scheduling: tokens that tpu-inference drops are restored "
            "from what vLLM's scheduler sends (restore_tokens=false refuses "
            "asynchronous scheduling instead)"
        )
        return installed

    def __call__(self, scheduler_output: Any, *args: Any, **named: Any) -> Any:
        """Restore the tokens of requests that are added again, and go on."""
        self._restore(scheduler_output)
        return self._update_states(scheduler_output, *args, **named)

    def _restore(self, scheduler_output: Any) -> None:
        manager, cached = self._manager, scheduler_output.scheduled_cached_reqs
        in_batch = manager.input_batch.req_id_to_index
        outputs = {
            request_id: self._outputs_of(cached, request_id, num_outputs)
            for request_id, num_outputs in zip(
                cached.req_ids, cached.num_output_tokens, strict=True
            )
            if request_id not in in_batch or request_id in cached.resumed_req_ids
        }
        for request_id, right in outputs.items():
            known = manager.requests[request_id].output_token_ids
            self.num_restored += known[: len(right)] != right
            known[:] = right  # The batch may share the list.
        # A request whose input streams comes as a new one under the id that it has.
        new = [request.req_id for request in scheduler_output.scheduled_new_reqs]
        self._withdraw([*outputs, *new])

    def _outputs_of(self, cached: Any, request_id: str, num_outputs: int) -> list[int]:
        """Return the scheduler's outputs of a request; RuntimeError without them."""
        if not num_outputs:
            return []
        num_prompt = len(self._manager.requests[request_id].prompt_token_ids)
        ids = cached.all_token_ids.get(request_id, ())
        if len(ids) != num_prompt + num_outputs:
            raise RuntimeError(
                f"request {request_id!r} runs again after a step without it, and "
                f"vLLM's scheduler sent {len(ids)} token ids instead of those of its "
                f"{num_prompt} prompt and {num_outputs} output tokens: tpu-inference "
                "may have dropped the last one, and all that follows would be wrong. "
                "Restart with --no-async-scheduling (async_scheduling=False)."
            )
        return list(ids[num_prompt:])

    def _withdraw(self, request_ids: Collection[str]) -> None:
        """Drop pending results of requests that are added again."""
        results = self._runner._pre_async_results
        if results is None:
            return
        stale = [
            request_id
            for request_id in request_ids
            if results.placeholder_req_id_to_index.pop(request_id, None) is not None
        ]
        if stale:
            results.request_seq_lens = [
                entry
                for entry in results.request_seq_lens
                if entry[1].req_id not in stale
            ]


def refusal(missing: list[str]) -> str:
    """Return why asynchronous scheduling is refused."""
    return (
        "async_scheduling=True gives wrong tokens with tpu-inference: a request that "
        "is left out of a step continues from token 0 instead of its last token, and "
        f"the host tier would keep the KV of it. To restore them, {', '.join(missing)} "
        "is missing. Add --no-async-scheduling (async_scheduling=False)."
    )

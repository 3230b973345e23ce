"""A host tier for sglang-jax, in place of HiCache.

A load ends in sglang-jax's radix tree, where its request then finds it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import time
import uuid
from typing import Any

import numpy as np

from jaxkv import BorrowedPool, Extras, Namespace, OffloadConfig
from jaxkv.integrations import weights as weights_of
from jaxkv.integrations.engine_hooks import EngineHooks, ParkedFrees
from jaxkv.integrations.weights_watch import WeightsWatch

_LOG = logging.getLogger("jaxkv")

# Arguments of the server, and the values that are served.
_REQUIRED: dict[str, Any] = {
    "hicache_storage": "disable",
    "disaggregation_mode": "null",
    "pd_disaggregation": "",
    "speculative_algorithm": None,
    **dict.fromkeys(("dp_size", "nnodes"), 1),
    **dict.fromkeys(("disable_radix_cache", "enable_unified_radix_tree"), False),
    "enable_return_routed_experts": False,
}
# Recurrent states, windows, latents and pages of one token have other classes.
_CLASSES = ("RadixCache", "PagedTokenToKVPoolAllocator", "MHATokenToKVPool")
# Arguments that may differ between engines that share a store.
_LOCAL = {"model_path", "tokenizer_path", "download_dir", "served_model_name"}
_LOCAL |= {"host", "port", "api_key", "log_level", "random_seed", "lora_paths"}


class _Request:
    """A `Req` of sglang-jax, as `EngineHooks` reads it."""

    def __init__(self, req: Any, offload: SglangOffload) -> None:
        # A client chooses `rid`, and may use it again at once.
        self.req, self.request_id = req, f"{req.rid}-{uuid.uuid4().hex[:8]}"
        self._offload = offload
        self.num_planned = 0  # Tokens of the step that is being planned.
        self.pages: list[int] = []  # Of its prefix and load, until it runs.
        self.slots: Any = None  # i32[n], of the same tokens, while it loads.
        self.num_found = 0  # How many of these the tree had.
        self.lock: Any = None  # The locked node of the tree, and how to unlock it.

    num_tokens = property(lambda self: self.req.seqlen)
    num_prompt_tokens = property(lambda self: len(self.req.origin_input_ids))
    num_computed_tokens = property(
        lambda self: self.req.kv_committed_len - self.num_planned
    )

    @property
    def max_offload_tokens(self) -> int | None:
        """0 if its keys do not name all that its KV depends on."""
        has_media = self.req.mm_inputs or self.req.multimodal_embedding is not None
        return 0 if has_media or self._offload.is_stale else None

    @property
    def max_load_tokens(self) -> int | None:
        """Tokens before the first one whose log-probability is asked for."""
        if self.max_offload_tokens == 0 or not self.req.return_logprob:
            return self.max_offload_tokens
        num_found = len(self.req.prefix_indices)
        return max(0, int(self.req.logprob_start_len) - num_found)


class SglangOffload:
    """The host tier of a scheduler; `hooks.scheduler` and `worker` are its parts."""

    def __init__(self, engine: Any, config: OffloadConfig, *options: Any) -> None:
        from sgl_jax.srt.managers import schedule_policy
        from sgl_jax.srt.mem_cache import common, radix_cache

        self._policy, self._radix, self._common = schedule_policy, radix_cache, common
        self._engine, (weights, self._keeps_on_flush) = engine, options
        self._tree, self._page = tree, page = engine.tree_cache, engine.page_size
        self._allocator = allocator = engine.token_to_kv_pool_allocator
        self._kv, free = allocator.get_kvcache(), allocator.free
        num_free = allocator.available_size
        self._rows = engine.req_to_token_pool.req_to_token
        self._space = space = _namespace_of(engine, self._kv, config, weights)
        # An adapter that is loaded replaces arrays, too.
        runner = None if engine.server_args.enable_lora else engine.tp_worker
        self._watch = runner and WeightsWatch(runner.get_model_runner())
        self.is_stale = False  # Whether the tree may have KV of other weights.
        # By id: requests that were asked for or retracted, and do not run.
        self._waiting: dict[str, _Request] = {}

        transfers, scheduler, self.worker = config.connect(
            self._kv.kv_buffer, page, storage_namespace=repr(space).encode()
        )
        self.parked = ParkedFrees(lambda pages: free(np.array(pages) * page))
        pool = BorrowedPool(
            transfers.num_device_blocks,
            num_free=lambda: (num_free() + tree.evictable_size()) // page,
            hold=self.parked.hold,
            release=self.parked.release,
            content_of=self.parked.version,
        )
        self.publisher = publisher = config.make_publisher(page)
        self.metrics = config.serve_metrics(scheduler, self.worker)
        self.hooks = EngineHooks(
            *(scheduler, pool, space),
            tokens_of=lambda r: r.req.origin_input_ids + r.req.output_ids,
            table_of=self._table_of,
            # `extra_key` is salt and adapter in one text, which is ambiguous.
            extras_of=lambda r: Extras(r.req.extra_key, r.req.lora_id),
            record=None if publisher is None else publisher.catalog.record,
        )
        scheduler.warm_up()
        transfers.warm_up()
        scheduler.wait_for_storage(self.worker)
        for owner, name, hook in (
            (engine, "get_next_batch_to_run", self._step),
            (engine, "_flush_pending_h2d", self._start),
            (engine, "on_idle", self._on_idle),
            (engine, "flush_cache", self._flush),
            (tree, "cache_finished_req", self._release),
            (tree, "cache_unfinished_req", self._keep),
            (tree, "evict", self._evict),
            (allocator, "free", self._free),
            (allocator, "clear", self._clear),
        ):
            setattr(owner, name, functools.partial(hook, getattr(owner, name)))
        tree.jaxkv, adder = self, schedule_policy.PrefillAdder
        if not hasattr(adder, "own_add_one_req"):
            adder.own_add_one_req, adder.add_one_req = adder.add_one_req, _add_one_req
        # The overlap loop waits for the last launch, then flushes, if there is an item.
        engine._pending_h2d = [()]

    def _table_of(self, request: _Request) -> list[int]:
        if (row := request.req.req_pool_idx) is None:
            return request.pages
        return self._pages(self._rows[row, : request.req.kv_committed_len])

    def _pages(self, slots: Any) -> list[int]:
        pages: list[int] = (np.asarray(slots)[:: self._page] // self._page).tolist()
        return pages

    def _step(self, own: Any) -> Any:
        self.worker.adopt()
        if self._watch is not None and self._watch.has_changed():
            _LOG.warning(
                "the weights were replaced: nothing is stored or loaded until "
                "flush_cache() drops the KV of the old weights from the radix tree"
            )
            self.is_stale = True
            self._change_namespace()
        self._end_aborted()
        self._collect(self.worker.poll())
        return own()

    def _end_aborted(self) -> None:
        """End the requests that sglang-jax has taken out of its queue."""
        waiting = self._waiting and {id(req) for req in self._engine.waiting_queue}
        for request in [r for r in self._waiting.values() if id(r.req) not in waiting]:
            self._drop(request, has_ended=True)

    def _collect(self, output: Any) -> None:
        """Insert loaded pages into the tree; lock them until their request runs."""
        for request, num_tokens in self.hooks.collect(output):
            if request.slots is None:
                continue
            if not num_tokens:
                self._drop(request, has_ended=False)
                continue
            slots, request.slots, request.pages = request.slots, None, []
            key = self._radix.build_radix_key(request.req, num_tokens)
            found = self._tree.insert(self._radix.InsertParams(key=key, value=slots))
            self._allocator.free(slots[request.num_found : found])
            params = self._radix.MatchPrefixParams(key=key)
            self._lock(request, self._tree.match_prefix(params).last_device_node)

    def _start(self, own: Any) -> None:
        """Start the transfers of a step, once its batch is known."""
        batch = self._engine.cur_batch
        reqs = batch.reqs_info[0].reqs or () if batch else ()
        for req in reqs:
            is_extend = batch.forward_mode.is_extend()
            req.jaxkv.num_planned = req.extend_input_len if is_extend else 1
        self._run({r.jaxkv.request_id: r.jaxkv.num_planned for r in reqs})
        for req in reqs:
            req.jaxkv.num_planned = 0
        self._engine._pending_h2d = [()]
        if self.publisher is not None:
            self.publisher.publish(self.hooks.scheduler.take_events())

    def _run(self, num_scheduled_tokens: dict[str, int]) -> None:
        plan = self.hooks.plan(num_scheduled_tokens)
        self._kv.kv_buffer = self.worker.start(plan, self._kv.kv_buffer)

    def add(self, own: Any, adder: Any, req: Any) -> Any:
        """Run a waiting request, load for it, or leave it in the queue."""
        results = self._policy.AddReqResult
        result = self._try_to_add(own, adder, req, results)
        is_running = adder.can_run_list[0] or not self._engine.running_batch.is_empty()
        if result is results.NO_TOKEN and not is_running:
            for request in self._waiting.values():  # Nothing else gives way.
                if request.slots is None:
                    self._unlock(request)
            result = self._try_to_add(own, adder, req, results)
        if result is results.NO_TOKEN and self.parked.holds:
            return results.OTHER  # NO_TOKEN would wait for the end of a request.
        return result

    def _try_to_add(self, own: Any, adder: Any, req: Any, results: Any) -> Any:
        request: _Request | None = getattr(req, "jaxkv", None)
        if request is None:
            request = req.jaxkv = _Request(req, self)
            self._waiting[request.request_id] = request
        if request.slots is not None:
            return results.CONTINUE
        num_found = len(req.prefix_indices)
        offered = self.hooks.query(request, num_found)
        if offered is None:
            return results.CONTINUE
        if not offered:
            result = own(adder, req)
            if req in adder.can_run_list[0]:
                request.pages = self._pages(req.prefix_indices)
                self.hooks.allocate(request, req.extend_input_len, lambda *_, **__: ())
                self._unlock(request)
                del self._waiting[request.request_id]
            return result

        def allocate(_: int, *, delay_cache_blocks: bool) -> Any:
            """Allocate the offer if the whole request has room."""
            num_new = req.sampling_params.max_new_tokens
            num_new = min(num_new, self._policy.CLIP_MAX_NEW_TOKENS_ESTIMATION)
            num_tokens, slots = req.extend_input_len + num_new, None
            self._lock(request, req.last_node)
            if num_tokens < adder.rem_total_tokens_for_dp(0):
                self._common.evict_from_tree_cache(self._tree, offered)
                slots = self._allocator.alloc(offered)
            if slots is None:
                return self._unlock(request)
            slots = np.concatenate([req.prefix_indices, slots]).astype(np.int32)
            request.slots, request.num_found = slots, num_found
            request.pages = self._pages(slots)
            adder.rem_total_token_offset[0] += num_tokens - offered
            return slots

        self.hooks.allocate(request, offered, allocate)
        is_loading = self.hooks.is_loading(request)
        return results.CONTINUE if is_loading else results.NO_TOKEN

    def _lock(self, request: _Request, node: Any) -> None:
        lock = node, self._tree.inc_lock_ref(node)
        self._unlock(request)
        request.lock = lock

    def _unlock(self, request: _Request) -> None:
        if request.lock is not None:
            (node, result), request.lock = request.lock, None
            self._tree.dec_lock_ref(node, result.to_dec_params())

    def _drop(self, request: _Request, *, has_ended: bool) -> None:
        """End the load of a waiting request, or the request."""
        self.hooks.free(request, has_ended=has_ended)
        if request.slots is not None:
            self._allocator.free(request.slots[request.num_found :])
        self._unlock(request)
        request.slots, request.pages = None, []
        if has_ended:
            del self._waiting[request.request_id], request.req.jaxkv

    def _release(self, own: Any, req: Any, **options: Any) -> Any:
        """End or retract a request that runs."""
        if (request := getattr(req, "jaxkv", None)) is not None:
            has_ended = req.finished() or req.to_finish is not None
            self.hooks.free(request, has_ended=has_ended)
            request.pages = []
            if has_ended:
                del req.jaxkv
            else:
                self._waiting[request.request_id] = request
        return own(req, **options)

    def _keep(self, own: Any, req: Any) -> None:
        """Insert a request's pages; the tree may have others for the same tokens."""
        before = self._table_of(req.jaxkv)
        own(req)
        if self._table_of(req.jaxkv) != before:
            self.hooks.change_table(req.jaxkv)

    def _free(self, own: Any, slots: Any, dp_rank: int = 0) -> None:
        self.parked.free(np.unique(np.asarray(slots, np.int32) // self._page).tolist())

    def _evict(self, own: Any, params: Any) -> Any:
        """Evict other pages for those that are parked, or wait for their transfers."""
        parked, num_before, result = self.parked, len(self.parked.parked), own(params)
        while (num_more := len(parked.parked) - num_before) > 0:
            num_before += num_more
            own(dataclasses.replace(params, num_tokens=num_more * self._page))
        while parked.parked and self._allocator.available_size() < params.num_tokens:
            self._engine._wait_donation_safe()
            self._run({})
            time.sleep(1e-4)
            self._collect(self.worker.poll())
        return result

    def _clear(self, own: Any, dp_rank: int | None = None) -> None:
        own(dp_rank)
        held, free_pages = self.parked.park_held(), self._allocator.free_pages
        free_pages[0] = np.setdiff1d(free_pages[0], np.array(held, np.int32))

    def _on_idle(self, own: Any) -> None:
        if not self.parked.parked:  # sglang-jax would take them for a leak.
            own()

    def _flush(self, own: Any) -> Any:
        self._end_aborted()
        answer = own()
        if answer[0] and (self.is_stale or not self._keeps_on_flush):
            self.is_stale = False
            self._change_namespace()
            self.hooks.scheduler.reset()
        return answer

    def _change_namespace(self) -> None:
        self._space = dataclasses.replace(self._space, weights_epoch=uuid.uuid4().hex)
        self.hooks.change_namespace(self._space)


def _add_one_req(adder: Any, req: Any) -> Any:
    own, offload = type(adder).own_add_one_req, getattr(adder.tree_cache, "jaxkv", None)
    return own(adder, req) if offload is None else offload.add(own, adder, req)


def _namespace_of(
    engine: Any, kv: Any, config: OffloadConfig, weights: str | None
) -> Namespace:
    args, array = engine.server_args, kv.kv_buffer[0]
    facts = {name: value for name, value in vars(args).items() if name not in _LOCAL}
    if weights is None and config.storage is not None:
        about = weights_of.describe_weights(
            *(args.model_path, args.revision),
            hub_folder=weights_of.hub_folder_of(os.environ, args.download_dir),
            read_since_s=weights_of.process_started_s(),
        )
        weights = f"{about} {args.load_format == 'dummy' and args.random_seed}"
    facts["weights"] = weights or uuid.uuid4().hex
    facts["version"] = importlib.metadata.version("sglang-jax")
    epoch = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
    layout = f"{len(kv.kv_buffer)} x {array.shape[1:]}, {array.sharding.spec}"
    return Namespace("", epoch, str(array.dtype), layout, engine.page_size)


def _check(engine: Any) -> None:
    """Refuse what is not served."""
    for name, required in _REQUIRED.items():
        if (value := getattr(engine.server_args, name)) != required:
            raise ValueError(f"{name}={value!r} must be {required!r} with jaxkv.")
    allocator = engine.token_to_kv_pool_allocator
    parts = engine.tree_cache, allocator, allocator.get_kvcache()
    for part, served in zip(parts, _CLASSES, strict=True):
        if type(part).__name__ != served:
            raise ValueError(
                f"{type(part).__name__} must be {served}: jaxkv serves full attention, "
                "with --page-size 2 and above."
            )
    if hasattr(engine.tree_cache, "jaxkv") or not engine.is_fully_idle():
        raise ValueError("the scheduler must be new: it has a host tier, or requests.")


def attach(
    scheduler: Any,
    config: OffloadConfig | None = None,
    *,
    weights: str | None = None,
    keep_on_flush: bool = False,
) -> SglangOffload:
    """Add a host tier to a new scheduler of sglang-jax.

    Args:
        scheduler: An `sgl_jax.srt.managers.scheduler.Scheduler`.
        config: The settings; None reads the environment's.
        weights: A name for the weights in a store; None for their commit or files.
        keep_on_flush: Whether ``flush_cache`` keeps the host tier. Safe only if no
            weights are overwritten in place.

    Raises:
        ValueError: The scheduler is not served, or a store's weights have no name. As
            for other errors of `OffloadConfig.connect`, nothing has changed then.
    """
    _check(scheduler)
    config = OffloadConfig.from_env() if config is None else config
    return SglangOffload(scheduler, config, weights, keep_on_flush)

"""Many requests in one call: the keys of all in a row, and where each begins.

A call costs tens of microseconds before it does anything, and a step of a scheduler
asks about dozens of requests. `in_order` turns a function that serves one batch into
one that serves a ragged batch of requests, each after the one before, so that the
results are those of as many calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv.types import KEY_LANES, PyTree


def in_order(
    function: Callable[..., tuple[PyTree, PyTree]], width: int
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Make a function of one batch serve a ragged batch of requests.

    Args:
        function: ``(state, keys, count, *each) -> (state, answer)``, such as those of
            `jaxkv.manager` with the policy bound. Arrays in the answer have one row
            for each key or are scalars.
        width: Most keys of one request; every request costs as much as one of these.

    Returns:
        ``(state, keys, offsets, num, *each) -> (state, answers)``, where

        - keys: u32[N, 8]. The keys of all requests. N is at least `width` more than
          there are keys; what follows them is padding.
        - offsets: i32[R + 1]. Request i has the keys from ``offsets[i]`` up to
          ``offsets[i + 1]``, at most `width`.
        - num: i32[]. How many of the R requests are meant.
        - each: [R, ...]. Further arguments, a row for each request.
        - answers: Arrays with a row for each key have N rows, in the places of the
          keys; scalars become [R]. What belongs to no request is arbitrary.

    Example:
        >>> import functools
        >>> import jax.numpy as jnp
        >>> from jaxkv import make_lru, manager
        >>> lru = make_lru(num_blocks=4)
        >>> serve = in_order(functools.partial(manager.request_step, lru), width=2)
        >>> keys = jnp.arange(40, dtype=jnp.uint32).reshape(5, 8)
        >>> offsets = jnp.array([0, 1, 3])  # One key, then two.
        >>> state, answers = serve(manager.init(lru, 4), keys, offsets, jnp.int32(2))
        >>> answers.block_ids[:3].tolist()
        [0, 1, 2]
    """

    def serve(
        state: PyTree, keys: Array, offsets: Array, num: Array, *each: Array
    ) -> tuple[PyTree, PyTree]:
        num_requests = offsets.shape[0] - 1

        def serve_one(state: PyTree, request: Array) -> tuple[PyTree, PyTree]:
            start = offsets[request]
            own = lax.dynamic_slice(keys, (start, jnp.int32(0)), (width, KEY_LANES))
            count = offsets[request + 1] - start
            return function(state, own, count, *(x[request] for x in each))

        def make_room(answer: jax.ShapeDtypeStruct) -> Array:
            if answer.ndim:
                return jnp.zeros((keys.shape[0], *answer.shape[1:]), answer.dtype)
            return jnp.zeros((num_requests,), answer.dtype)

        def next_request(request: Array, carry: tuple[PyTree, Any]) -> Any:
            state, answers = carry
            state, answer = serve_one(state, request)

            def put(answers: Array, answer: Array) -> Array:
                # The rows of a request's padding are overwritten by the next request.
                at = offsets[request] if answer.ndim else request
                answer = answer if answer.ndim else answer[None]
                return lax.dynamic_update_slice_in_dim(answers, answer, at, axis=0)

            return state, jax.tree.map(put, answers, answer)

        shapes = jax.eval_shape(serve_one, state, jnp.int32(0))[1]
        answers = jax.tree.map(make_room, shapes)
        state, answers = lax.fori_loop(0, num, next_request, (state, answers))
        return state, answers

    return serve

"""The time that a policy was told last, in place; `jaxkv.policies.clock`."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.native.compiling import inlined

TIME_MASK = (1 << 32) - 1
_HALF_TIME = 1 << 31


@inlined
def tell(state: Any, now_ms: int) -> None:
    """Note the time, which does not go back."""
    ahead = (now_ms - np.int64(state.now_ms[()])) & TIME_MASK
    if not state.is_told[()] or ahead < _HALF_TIME:
        state.now_ms[()] = now_ms & TIME_MASK
    state.is_told[()] = True


@inlined
def age_of(now_ms: int, last_ms: Any) -> Any:
    """Tell how long ago a time was; both are modulo 2**32."""
    return (now_ms - np.int64(last_ms)) & TIME_MASK

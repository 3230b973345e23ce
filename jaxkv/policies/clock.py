"""The clock of a policy: the time of its last `note`, milliseconds modulo 2**32.

Callers pass the time, and the clock never goes back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.compiling import inlined

TIME_MASK = (1 << 32) - 1
_HALF_TIME = np.uint32(1 << 31)


@inlined
def set_time(state: Any, now_ms: int) -> None:
    """Set the clock of a state, unless it would go back."""
    ahead = (now_ms - np.int64(state.now_ms[()])) & TIME_MASK
    if not state.has_time[()] or ahead < _HALF_TIME:
        state.now_ms[()] = now_ms & TIME_MASK
    state.has_time[()] = True


@inlined
def age_of(now_ms: int, last_ms: Any) -> Any:
    """Return the milliseconds from `last_ms` to `now_ms`, both modulo 2**32."""
    return (now_ms - np.int64(last_ms)) & TIME_MASK

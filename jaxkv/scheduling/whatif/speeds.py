"""The speeds of a server's transfers and prefill, and the time that loads save."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class PrefillCosts(Protocol):
    """The prefill costs of a model."""

    def prefill_flops(
        self, start: Any, stop: Any
    ) -> NDArray[np.float64]:  # pragma: no cover
        """Return the FLOPs to prefill tokens [start, stop) of a prompt: f64[...]."""


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Speeds of transfers and of prefill, in tokens or in FLOPs, not in both."""

    load_bytes_per_s: float  # From the host, per device.
    store_bytes_per_s: float  # To the host, per device.
    load_latency_s: float = 0.0  # The minimum duration of a load.
    prefill_tokens_per_s: float | None = None
    prefill_flops_per_s: float | None = None  # All devices together.

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            min_value = 0.0 if field.name == "load_latency_s" else 1e-9
            if value is not None and not min_value <= value < float("inf"):
                raise ValueError(f"{field.name}={value} must be a number above 0.")
        if (self.prefill_tokens_per_s is None) == (self.prefill_flops_per_s is None):
            raise ValueError(
                "Give one of prefill_tokens_per_s and prefill_flops_per_s."
            )

    def prefill_s(
        self, model: PrefillCosts | None, start: Any, stop: Any
    ) -> NDArray[np.float64]:
        """Return the seconds to prefill tokens [start, stop), i64[...] each: f64[...].

        `model` may be None if `prefill_tokens_per_s` is set.
        """
        if self.prefill_flops_per_s is not None:
            assert model is not None
            flops = model.prefill_flops(start, stop)
            return np.asarray(flops / self.prefill_flops_per_s, np.float64)
        assert self.prefill_tokens_per_s is not None
        return np.asarray((stop - start) / self.prefill_tokens_per_s, np.float64)

    def load_s(self, load_bytes: Any) -> NDArray[np.float64]:
        """Return the seconds to load `load_bytes` to each device: f64[...]."""
        return np.asarray(self.load_latency_s + load_bytes / self.load_bytes_per_s)

    def saved_s(self, prefill_s: Any, load_bytes: Any) -> NDArray[np.float64]:
        """Return the seconds saved by loads instead of prefill: f64[...].

        0 where a load of `load_bytes` to each device would take longer than `prefill_s`
        (`OffloadRules.skip_slow_loads` declines it).
        """
        saved_s = np.maximum(prefill_s - self.load_s(load_bytes), 0.0)
        return np.asarray(saved_s, np.float64)

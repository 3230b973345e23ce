"""Which of the two modes an engine is to use."""

from __future__ import annotations

from jaxkv.transfer import probe
from jaxkv.transfer.kernels import MODES, Mode


def choose_mode(mode: Mode | None, platform: str) -> Mode:
    """Check a mode, or choose one.

    Args:
        mode: What was asked for; None for what is best on the platform.
        platform: The platform of the pool's devices.

    Raises:
        ValueError: There is no such mode, or it does not work here.
    """
    if mode is None:
        return "fused" if platform == "cpu" else "staged"
    if mode not in MODES:
        raise ValueError(f"{mode=} must be one of {MODES} or None.")
    if mode == "fused" and platform != "cpu":
        result = probe.probe_fused(platform)
        if not result.ok:
            raise ValueError(f"{mode=} cannot be used here: {result.reason}")
    return mode

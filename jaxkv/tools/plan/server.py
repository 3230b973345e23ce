"""The server that a plan is for: its speeds, given, measured here or published."""

from __future__ import annotations

import jax

from jaxkv._util import shown
from jaxkv.scheduling.whatif.speeds import Speeds
from jaxkv.tools.plan.accelerators import (
    ACCELERATORS,
    Accelerator,
    find_accelerator,
    measure_flops_per_s,
)
from jaxkv.tools.plan.model_costs import ModelCosts
from jaxkv.tools.progress import show_progress
from jaxkv.tools.replay.traces import Recording
from jaxkv.tools.speed import Bandwidth, BytesDifferError, measure_bandwidth
from jaxkv.tools.usage import Args, UsageError, check_absent

LATENCY_MS = 1.0
MFU = 0.4
_LINK_SHARE = 0.8  # Of its peak, which transfers of blocks reach
_RESERVE_SHARE = 0.1  # Of HBM: compiled programs, activations, the runtime


def check_speeds(args: Args) -> None:
    if args.measure and (args.load_gb_per_s or args.store_gb_per_s):
        raise UsageError("--measure: the speeds are given already")
    if args.mfu is not None and args.mfu > 1:
        raise UsageError(f"--mfu: {args.mfu:g} must be at most 1")
    if args.prefill_tokens_per_s is not None:
        what_it_says = "{}: --prefill-tokens-per-s says it all"
        check_absent(args, ("flops_per_s", "mfu"), what_it_says)


def find_machine(args: Args, recording: Recording | None) -> Accelerator | None:
    """Return the accelerator to plan for; None if the speeds are given without one."""
    if args.accelerator is not None:
        return ACCELERATORS[args.accelerator]
    if (args.load_gb_per_s or args.measure) and (
        args.prefill_tokens_per_s or args.flops_per_s
    ):
        return None
    if recording is not None and recording.device_kind is not None:
        kind, whose = recording.device_kind, "the recording's device"
    else:
        kind, whose = _device_kind(), "this machine's device"
    accelerator = find_accelerator(kind)
    if accelerator is None:
        raise UsageError(
            f"--accelerator: {whose} is {shown(kind)}, whose speeds are not known: "
            "name another one, or give --load-gb-per-s and --flops-per-s"
        )
    return accelerator


def device_blocks_of(
    machine: Accelerator | None, model: ModelCosts, num_devices: int, block_size: int
) -> int | None:
    """Return the blocks that fit HBM beside weights and a reserve; None if unknown."""
    weight_bytes = model.weight_bytes
    if machine is None or machine.hbm_bytes is None or weight_bytes is None:
        return None
    check_hbm(machine, model, num_devices, 0, "--model")
    room_bytes = (1 - _RESERVE_SHARE) * machine.hbm_bytes - weight_bytes / num_devices
    return int(room_bytes / model.kv_bytes_per_token_on(num_devices) / block_size)


def check_hbm(
    machine: Accelerator | None,
    model: ModelCosts,
    num_devices: int,
    num_tokens: int,
    option: str,
) -> None:
    """Refuse weights, KV and a reserve that are more than the HBM of a device."""
    if machine is None or machine.hbm_bytes is None:
        return
    parts = {
        "weights": (model.weight_bytes or 0) / num_devices,
        "KV": num_tokens * model.kv_bytes_per_token_on(num_devices),
        "reserve": _RESERVE_SHARE * machine.hbm_bytes,
    }
    if sum(parts.values()) > machine.hbm_bytes:
        texts = [
            f"{size / 1e9:,.1f} GB of {name}" for name, size in parts.items() if size
        ]
        raise UsageError(
            f"{option}: {' + '.join(texts)} are {sum(parts.values()) / 1e9:,.1f} GB, "
            f"more than the {machine.hbm_bytes / 1e9:,.1f} GB of HBM of each of "
            f"{num_devices} x {machine.name}: name more devices by --tensor-parallel"
            + ", or less KV"
            * bool(num_tokens)
        )


def choose_speeds(
    args: Args, machine: Accelerator | None, num_devices: int
) -> tuple[Speeds, dict[str, str]]:
    """Return the speeds of a server, and the source of each by its field."""
    latency_ms, sources = LATENCY_MS, {"load_latency_s": "assumed"}
    if args.load_latency_ms is not None:
        latency_ms, sources["load_latency_s"] = args.load_latency_ms, "given"
    if args.load_gb_per_s:
        load = store = 1e9 * args.load_gb_per_s
        sources |= {"load_bytes_per_s": "given", "store_bytes_per_s": "as loads"}
    elif machine is not None and machine.link_bytes_per_s and not args.measure:
        load = store = _LINK_SHARE * machine.link_bytes_per_s
        peak_source = f"{100 * _LINK_SHARE:g}% of the peak of {machine.name}"
        sources |= {"load_bytes_per_s": peak_source, "store_bytes_per_s": "as loads"}
    else:
        if not args.measure:
            _check_is_here(machine, "link to the host", "--load-gb-per-s")
        measured = _measure_link(args.quiet)
        load, store = (
            1e9 * speed.p50_gb_per_s for speed in (measured.load, measured.save)
        )
        names = "load_bytes_per_s", "store_bytes_per_s"
        sources |= dict.fromkeys(names, _measured_here())
    if args.store_gb_per_s:
        store, sources["store_bytes_per_s"] = 1e9 * args.store_gb_per_s, "given"
    latency_s, tokens_per_s = latency_ms / 1e3, args.prefill_tokens_per_s
    if tokens_per_s is not None:
        sources["prefill_tokens_per_s"] = "given"
        return Speeds(load, store, latency_s, tokens_per_s), sources
    if args.flops_per_s is not None:
        peak, source = args.flops_per_s, "{}, given"
    elif machine is not None and machine.flops_per_s:
        peak, source = machine.flops_per_s, f"{machine.name}'s {{}}"
    else:
        _check_is_here(machine, "FLOPs per second", "--flops-per-s")
        peak, source = (
            measure_flops_per_s(),
            f"{{}}, measured here, on {_device_kind()}",
        )
    mfu, mfu_source = (args.mfu, "given") if args.mfu else (MFU, "assumed")
    devices = f"{num_devices} x " if num_devices > 1 else ""
    peak_text = source.format(f"{peak / 1e12:,.4g}")
    sources["prefill_flops_per_s"] = (
        f"{devices}{peak_text}, at {100 * mfu:g}%, {mfu_source}"
    )
    return Speeds(load, store, latency_s, None, num_devices * peak * mfu), sources


def _check_is_here(machine: Accelerator | None, what: str, option: str) -> None:
    """Refuse to measure for a machine that is not this one."""
    if machine is not None and _device_kind() not in machine.kinds:
        raise UsageError(
            f"--accelerator: no source gives the {what} of {machine.name}, and this "
            f"machine has none to measure: give {option}"
        )


def _device_kind() -> str:
    try:
        return str(jax.devices()[0].device_kind)
    except RuntimeError as error:  # Such as a TPU that another process uses.
        raise UsageError(
            f"--accelerator: this machine's device cannot be asked ({error}): name one"
        ) from error


def _measured_here() -> str:
    return f"measured here, on {_device_kind()}"


def _measure_link(is_quiet: bool) -> Bandwidth:
    try:
        with show_progress(is_quiet=is_quiet) as on_progress:
            return measure_bandwidth(on_progress)
    except (BytesDifferError, MemoryError, RuntimeError) as error:
        raise UsageError(f"--measure: {error}") from error

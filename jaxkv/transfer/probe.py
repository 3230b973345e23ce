"""Test in another process whether an accelerator supports the mode ``"fused"``.

A runtime that cannot let a program write into donated host memory does not raise: it
aborts the process or corrupts bytes. So a separate process tries it first.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.transfer import memory

_TFRT_CLIENT = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"

_OK = "jaxkv probe: unchanged"
_CHANGED = "jaxkv probe: changed"

# `python -m` would warn that the package has already imported the module. The path is
# passed because a program may have added to it; until then -P keeps the working folder
# off it.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from jaxkv.transfer import probe; probe.main(sys.argv[2])"
)

# The test moves NaNs and compiles ahead of time. It checks the runtime, not the debug
# switches of the user.
_IGNORED_SWITCHES = (
    "JAX_DEBUG_NANS",
    "JAX_DEBUG_INFS",
    "JAX_DISABLE_JIT",
    "PYTHONWARNINGS",
)


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """Whether the mode ``"fused"`` may be used.

    Attributes:
        ok: Whether it may.
        reason: Why, in a sentence for users.
    """

    ok: bool
    reason: str


def probe_fused(platform: str, timeout_s: float = 120.0) -> ProbeResult:
    """Test whether the mode ``"fused"`` works on the devices of a platform.

    A separate process saves blocks into donated host memory, loads them and compares
    all bits. That takes seconds, and some memory of the first device. The result is
    cached for the life of this process.

    Args:
        platform: The devices' platform: ``"cpu"``, ``"gpu"``, ``"tpu"``.
        timeout_s: Seconds to wait for the result.

    Returns:
        Whether it works, and why. On TPU it cannot be tested, so it is refused.

    Raises:
        ValueError: `timeout_s` is not positive.
    """
    if not timeout_s > 0:
        raise ValueError(f"{timeout_s=} must be more than 0 seconds.")
    return _probe_once(platform, float(timeout_s))


@functools.cache
def _probe_once(platform: str, timeout_s: float) -> ProbeResult:
    if platform not in ("cpu", "gpu"):
        return ProbeResult(
            False,
            f"Mode 'fused' cannot be tested on {platform}, whose devices may belong to "
            "one process only, and if it does not work it ends this process: use mode "
            "'staged'.",
        )
    path = json.dumps([str(entry) for entry in sys.path])
    command = [sys.executable, "-P", "-c", _CHILD, path, platform]
    return _run_child(command, platform, timeout_s)


def check_client(platform: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a runtime on which no copy can overlap with a computation.

    Args:
        platform: The devices' platform: ``"cpu"``, ``"gpu"``, ``"tpu"``.
        environ: The environment that the backend was started in.

    Raises:
        ValueError: The backend runs everything on a single stream.
    """
    value = environ.get(_TFRT_CLIENT, "0").strip()
    # jaxlib accepts ints only; a word may have been set after jaxlib read the variable,
    # with the intent to have this client.
    if platform == "gpu" and value.lower() not in ("", "0", "false", "no", "off"):
        raise ValueError(
            f"{_TFRT_CLIENT}={value!r} makes XLA use a client with one stream for "
            "computations and copies alike, so that no transfer can overlap with the "
            "model: unset it, or set it to 0, before jax is imported."
        )


def check_jit() -> None:
    """Refuse to run without compilation.

    Raises:
        ValueError: ``JAX_DISABLE_JIT`` is set.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError(
            "JAX_DISABLE_JIT is set, but transfers are compiled programs: unset it."
        )


def main(platform: str) -> None:
    """Run the test and print the result. Not in a process that must survive."""
    _write_no_core_file()
    num_changed, num_values = count_changed(platform)
    print(f"{_CHANGED} {num_changed} of {num_values}" if num_changed else _OK)


def count_changed(platform: str) -> tuple[int, int]:
    """Save and load all bfloat16 values as the mode ``"fused"`` does.

    Args:
        platform: The platform; its first device is used.

    Returns:
        The number of values that came back with other bits, and of all values.

    Raises:
        RuntimeError: A save did not recycle the host memory of the one before.
    """
    device = jax.devices(platform)[0]
    on_host = memory.host_sharding(device)
    on_device = jax.sharding.SingleDeviceSharding(device)
    options = memory.compiler_options(device.platform)
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(8, 64, 128)
    leaves_bits = [bits, bits[::-1, ::-1].copy()]
    leaves = [
        jax.device_put(leaf.view(jnp.bfloat16), on_device) for leaf in leaves_bits
    ]
    # Eight blocks, two at a time, from and to blocks out of order.
    sources = np.array([5, 0, 7, 2, 1, 6, 3, 4], np.int32)
    targets = np.roll(sources, 3)
    pairs = [
        jax.device_put((sources[n : n + 2], targets[n : n + 2]), on_device)
        for n in range(0, 8, 2)
    ]

    def zeros(num_blocks: int, sharding: jax.sharding.Sharding) -> list[jax.Array]:
        shapes = [(num_blocks, *leaf.shape[1:]) for leaf in leaves]
        program = jax.jit(
            lambda: [jnp.zeros(shape, jnp.bfloat16) for shape in shapes],
            out_shardings=sharding,
        )
        zeros: list[jax.Array] = program()
        return zeros

    extent, restored = zeros(2, on_host), zeros(8, on_device)
    save_jit = jax.jit(
        _save,
        donate_argnums=2,
        keep_unused=True,
        out_shardings=(on_host, on_device),
        compiler_options=options,
    )
    load_jit = jax.jit(
        _load, donate_argnums=0, out_shardings=on_device, compiler_options=options
    )
    save = save_jit.lower(leaves, pairs[0][0], extent).compile()
    load = load_jit.lower(restored, pairs[0][1], extent).compile()
    # Four saves into the same host memory, each before the last load from it is known
    # to be done.
    for source_ids, target_ids in pairs:
        old = extent
        extent, _ = save(leaves, source_ids, old)
        if not all(array.is_deleted() for array in old):
            raise RuntimeError("the host memory that was donated was not recycled")
        restored, _ = load(restored, target_ids, extent)
    num_changed = 0
    for leaf, leaf_bits in zip(restored, leaves_bits, strict=True):
        came_back = np.asarray(leaf).view(np.uint16)
        num_changed += int(np.sum(came_back[targets] != leaf_bits[sources]))
    return num_changed, len(leaves) * bits.size


# As in the engine, both also return a scalar: with an output on the device, donated
# memory has to be matched with the right output.


def _save(
    leaves: list[jax.Array], ids: jax.Array, old: list[jax.Array]
) -> tuple[list[jax.Array], jax.Array]:
    del old  # Only its memory is used, for the result.
    return [leaf.at[ids].get(mode="clip") for leaf in leaves], ids[0]


def _load(
    leaves: list[jax.Array], ids: jax.Array, extent: list[jax.Array]
) -> tuple[list[jax.Array], jax.Array]:
    arrived = jax.device_put(extent, jax.memory.Space.Device)
    return [
        leaf.at[ids].set(blocks, mode="drop", unique_indices=True)
        for leaf, blocks in zip(leaves, arrived, strict=True)
    ], ids[0]


def _run_child(command: Sequence[str], platform: str, timeout_s: float) -> ProbeResult:
    """Run the child and describe what happened."""
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=_environment(platform),
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _refusal(platform, f"did not finish within {timeout_s:g} s")
    except OSError as error:
        return _refusal(platform, f"could not be started: {error}")
    answer = (child.stdout.strip().splitlines() or [""])[-1]
    if child.returncode < 0:
        name = _signal_name(-child.returncode)
        what = f"was ended by {name}{_last_words(child.stderr)}"
    elif child.returncode > 0:
        what = f"failed with exit status {child.returncode}{_last_words(child.stderr)}"
    elif answer.startswith(_CHANGED):
        num_values = answer.removeprefix(_CHANGED).strip()
        what = f"read back other bytes than it saved: {num_values} values differ"
    elif answer != _OK:
        what = f"gave no answer, but printed {answer[:100]!r}"
    else:
        return ProbeResult(
            True,
            f"Mode 'fused' was tested on {platform} in a separate process, which read "
            "back all bytes that it saved.",
        )
    return _refusal(platform, what)


def _refusal(platform: str, what: str) -> ProbeResult:
    return ProbeResult(
        False,
        f"Mode 'fused' was tested on {platform} in a separate process, which {what}. "
        "Use mode 'staged'.",
    )


def _environment(platform: str) -> dict[str, str]:
    """Make an environment in which the child takes little memory and tells errors."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in _IGNORED_SWITCHES
    }
    # This process may already hold nearly all memory of the device, and preallocated
    # pinned memory is as scarce.
    environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    environ["XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"] = "false"
    # Otherwise the last line of a traceback is a remark about filtering.
    environ["JAX_TRACEBACK_FILTERING"] = "off"
    # The platforms configured here, by a variable or by the program; a test of the CPU
    # opens no other device.
    configured = getattr(jax.config, "jax_platforms", None)
    platforms = "cpu" if platform == "cpu" else configured
    if platforms:
        environ["JAX_PLATFORMS"] = platforms
    return environ


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(stderr: str) -> str:
    """Return the line that tells the error, in brackets."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"Error\b|Check failed", line)]
    return f" ({(telling or lines)[-1][:300]})" if lines else ""


def _write_no_core_file() -> None:
    """Keep a crash, which is a possible result, from leaving a core file."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))

"""Compiles for NVIDIA GPUs that are not there, through the CUDA plugin of JAX.

JAX compiles for the described TPUs by itself, but a described GPU has no memory kinds.
So a program is lowered for CUDA on the CPU's devices, which have them, and the result
is compiled by the plugin. No driver and no library of NVIDIA is needed.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jaxkv.transfer import memory

_PLUGIN = "jax_plugins.xla_cuda12"


class CudaProgram:
    """A compiled program, with the methods of `jax.stages.Compiled`."""

    def __init__(self, executable: Any):
        self._executable = executable

    def as_text(self) -> str:
        modules = self._executable.hlo_modules()
        return "\n".join(module.to_string() for module in modules)

    def memory_analysis(self) -> Any:
        """Return the bytes of its arguments, results and temporaries."""
        return self._executable.get_compiled_memory_stats()

    def cost_analysis(self) -> dict[str, float]:
        """Return nothing: the compiler reports no costs."""
        return {}


@contextmanager
def compile_for_cuda(device: str, num_devices: int) -> Iterator[None]:
    """Compile JAX's programs for a GPU within this context."""
    # Private, as nothing public takes lowered programs to another compiler.
    from jax._src import compiler
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    devices: list[Any] = topologies.get_topology_desc(
        platform="cuda",
        target_config=_target_config(device),
        topology=f"1x1x{num_devices}",
    ).devices
    lower, compile_lowered = jax.stages.Traced.lower, jax.stages.Lowered.compile

    def lower_for_cuda(self: Any, **kwargs: Any) -> Any:
        return lower(self, **{**kwargs, "lowering_platforms": ("cuda",)})

    def compile_with_plugin(self: Any, *_: Any, **__: Any) -> CudaProgram:
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=num_devices,
            device_assignment=np.array([[device.id for device in devices]]),
            env_options_overrides=memory.compiler_options("gpu"),
        )
        build = options.executable_build_options
        build.use_spmd_partitioning = num_devices > 1
        build.use_shardy_partitioner = True
        return CudaProgram(
            devices[0].client.compile(
                self.compiler_ir("stablehlo"),
                executable_devices=_jax.DeviceList(tuple(devices)),
                compile_options=options,
            )
        )

    jax.stages.Traced.lower = lower_for_cuda  # type: ignore[method-assign]
    jax.stages.Lowered.compile = (  # type: ignore[method-assign]
        compile_with_plugin  # type: ignore[assignment]
    )
    try:
        yield
    finally:
        jax.stages.Traced.lower = lower  # type: ignore[method-assign]
        jax.stages.Lowered.compile = compile_lowered  # type: ignore[method-assign]


@functools.cache
def _target_config(device: str) -> str:
    """Read XLA's description of a GPU, which is embedded in the plugin as text."""
    folder = pathlib.Path(str(importlib.import_module(_PLUGIN).__file__)).parent
    path = folder / "xla_cuda_plugin.so"
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary,
    ):
        last = binary.find(f'device_description_str: "{device}"'.encode())
        if last < 0:
            raise LookupError(f"{path.name} does not describe a GPU named {device!r}.")
        start = binary.rfind(b"gpu_device_info {", 0, last)
        return binary[start : binary.find(b"\n", last) + 1].decode()

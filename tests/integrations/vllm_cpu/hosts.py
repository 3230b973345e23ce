"""Several hosts on one machine: workers that are processes of one mesh, over gloo.

On TPUs Ray starts the workers, one on each host. Here Ray starts them on nodes of this
machine, or an executor without Ray does, which is faster.
"""

import os
import socket
import types

import jax
import numpy as np
from tpu_inference.executors.multiproc_executor import MultiprocExecutor

from .ray_nodes import HOSTS, has_ray, host_of_node

COORDINATOR = "JAXKV_VLLM_COORDINATOR"


class HostsExecutor(MultiprocExecutor):
    """Starts a worker for each host, and says so as Ray's executors do."""

    def _init_executor(self):
        bundles = [{"TPU": 1}] * int(os.environ[HOSTS])
        self.parallel_config.placement_group = types.SimpleNamespace(
            bundle_specs=bundles
        )
        super()._init_executor()

    def _get_parallel_sizes(self):
        self.world_size = self.local_world_size = int(os.environ[HOSTS])
        return self.world_size, 1, 1

    def _post_init_executor(self):
        """tpu-inference connects stages of a pipeline here, and there are none."""

    def _get_output_rank(self):
        return 0


def replace_what_one_machine_lacks():
    """Choose the executor, and let each worker join the mesh."""
    from tpu_inference.platforms.tpu_platform import TpuPlatform
    from tpu_inference.worker import tpu_worker

    check = TpuPlatform.check_and_update_config.__func__
    init_device = tpu_worker.TPUWorker.init_device

    def check_and_update_config(cls, vllm_config):
        check(cls, vllm_config)
        if not has_ray():
            vllm_config.parallel_config.distributed_executor_backend = HostsExecutor
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        os.environ.setdefault(COORDINATOR, address)

    def join_and_init_device(worker, *args, **named):
        join_mesh(host_of_node() if has_ray() else worker.rank)
        return init_device(worker, *args, **named)

    TpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    tpu_worker.TPUWorker.init_device = join_and_init_device
    # CPU devices have no place in a torus.
    tpu_worker.get_device_topology_order_id = lambda *devices: jax.process_index()


def join_mesh(rank):
    """Make this process one of the hosts; libtpu does so by itself."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator = os.environ[COORDINATOR]
    jax.distributed.initialize(
        coordinator, int(os.environ[HOSTS]), rank, coordinator_bind_address=coordinator
    )
    devices, put = jax.devices, jax.device_put

    def device_put(x, device=None, *args, **named):
        if device is None or isinstance(device, jax.Device):
            return put(x, device, *args, **named)

        def put_part(target, part):
            if getattr(target, "is_fully_addressable", True):
                return put(part, target, *args, **named)
            return jax.tree.map(lambda leaf: placed(leaf, target), part)

        return jax.tree.map(put_part, device, x)

    def placed(leaf, target):
        """Spread what each host has; `device_put` would have all hosts compare it."""
        if isinstance(leaf, jax.Array):
            if not leaf.is_fully_addressable:
                return put(leaf, target)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                everywhere = jax.NamedSharding(target.mesh, jax.P())
                return jax.random.wrap_key_data(
                    placed(jax.random.key_data(leaf), everywhere)
                )
        array = np.asarray(leaf)
        return jax.make_array_from_callback(
            array.shape, target, lambda index: array[index]
        )

    # The CPU is a host's own, and here it is the mesh.
    jax.devices = lambda backend=None: (
        jax.local_devices(backend="cpu") if backend == "cpu" else devices(backend)
    )
    jax.device_put = device_put

"""A Ray cluster on one machine, with a node for each host of an engine."""

import contextlib
import os
import tempfile

HOSTS = "JAXKV_VLLM_HOSTS"
ADDRESS = "127.0.0.1"


def has_ray():
    """Whether Ray starts the workers."""
    return os.environ.get("TPU_MULTIHOST_BACKEND") == "ray"


@contextlib.contextmanager
def ray_cluster():
    """Run Ray with a node of one chip per host, if Ray starts the workers."""
    if not has_ray():
        yield
        return
    # Ray reads it when it is imported, and then stays on the loopback.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    with tempfile.TemporaryDirectory("ray", ignore_cleanup_errors=True) as folder:
        # The engine's node is the last host, whose worker has the first rank.
        for host in reversed(range(int(os.environ[HOSTS]))):
            cluster.add_node(
                resources={"TPU": 1, f"host {host}": 1},
                node_ip_address=ADDRESS,
                include_dashboard=False,
                temp_dir=folder,
            )
        os.environ |= {"RAY_ADDRESS": cluster.address, "VLLM_HOST_IP": ADDRESS}
        try:
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


def host_of_node():
    """Return the host of this worker, which is not its rank."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    (resources,) = (
        node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id
    )
    hosts = range(int(os.environ[HOSTS]))
    (host,) = (number for number in hosts if f"host {number}" in resources)
    return host

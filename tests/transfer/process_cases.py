"""One of the processes of test_processes.py: the cases of test_sharded.py in several.

python -m tests.transfer.process_cases ADDRESS NUM_PROCESSES PROCESS
"""

import sys

import jax
import numpy as np

from jaxkv.transfer import TransferEngine

# Each spec once, and both modes for shards of both axes.
CASES = [
    ("fused", "by blocks"),
    ("staged", "by heads"),
    ("fused", "by both"),
    ("staged", "by both"),
    ("staged", "int8"),
]


def main(address, num_processes, process):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(address, int(num_processes), int(process))
    from tests.transfer import test_sharded  # It looks at the devices.

    assert len(jax.devices()) == 2 * len(jax.local_devices()) == 4
    specs = test_sharded.SPECS
    for mode, name in CASES:
        if name == "int8":
            test_sharded.compressed(4, specs["by both"], mode)
        else:
            test_sharded.round_trips(4, specs[name], "Auto", mode, rounds=3)
        print(f"{mode}, {name}: as it should be", flush=True)
    in_a_row, mixed, swapped = (
        bytes_description(order) for order in ([0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1])
    )
    # On the last mesh each process has the shards of another.
    assert in_a_row == mixed != swapped
    jax.distributed.shutdown()


def bytes_description(order):
    mesh = jax.sharding.Mesh(np.array(jax.devices())[order], "heads")
    heads = jax.NamedSharding(mesh, jax.P(None, "heads"))
    pool = jax.make_array_from_callback(
        (8, 4, 2), heads, np.zeros((8, 4, 2), np.float32).__getitem__
    )
    return TransferEngine(pool, 8).host_bytes_description


if __name__ == "__main__":
    main(*sys.argv[1:])

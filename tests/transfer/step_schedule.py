"""Compiles a step that writes its loads for a device that is not there.

    python -m tests.transfer.step_schedule v5e

prints a JSON object: for each mode what the compiled program starts, waits for and
computes, in its order, and what memory it takes.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from benchmarks.compiled.cuda import compile_for_cuda
from benchmarks.compiled.targets import parse_target
from jaxkv.transfer.extents import ExtentLayout
from jaxkv.transfer.kernels import Copier
from jaxkv.transfer.layout import Leaf, PoolLayout
from jaxkv.transfer.step_loads import StepLoads

# What each layer of the compiled step has once: x + mixed @ out on TPU, x @ up on GPU.
LAYER_MARK = re.compile(r"convolution_add_fusion|gemm_fusion_dot_general")
NUM_LAYERS, NUM_EXTENTS, ROWS = 5, 2, 64
LEAF = (1024, 16, 8, 128)
WIDTH, NUM_TOKENS, NUM_HEADS = 2048, 512, 16
KV_WIDTH, HEAD_DIM = LEAF[2] * LEAF[3], LEAF[3]


def compile_step(device, kernel, with_after):
    """Compile a prefill of some layers whose KV comes from the host."""
    place = jax.sharding.SingleDeviceSharding(device)

    def spec(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    pool = [{"k": spec(*LEAF), "v": spec(*LEAF)} for _ in range(NUM_LAYERS)]
    leaves = tuple(
        Leaf(f"leaf {n}", LEAF, jnp.dtype(jnp.bfloat16), place, 0)
        for n in range(2 * NUM_LAYERS)
    )
    layout = PoolLayout(jax.tree.structure(pool), leaves, None)
    layout.__dict__["device"] = device
    extents = ExtentLayout.of(layout, ROWS, stacked=True, num_layer_groups=NUM_LAYERS)
    loads = StepLoads(
        (extents.specs("pinned_host"),) * NUM_EXTENTS,
        (spec(1, ROWS, dtype=jnp.int32),) * NUM_EXTENTS,
        Copier(extents, "staged", kernel),
    )
    weights = [
        {
            "q": spec(WIDTH, WIDTH),
            "out": spec(WIDTH, WIDTH),
            "up": spec(WIDTH, 4 * WIDTH),
            "down": spec(4 * WIDTH, WIDTH),
        }
        for _ in range(NUM_LAYERS)
    ]

    def step(pool, loads, weights, x, table):
        for layer, weight in enumerate(weights):
            pool = loads.write(pool, layer, after=x if with_after else ())
            read = {
                name: jnp.repeat(leaf[table].reshape(-1, *LEAF[2:]), 2, axis=1)
                for name, leaf in pool[layer].items()
            }
            q = (x @ weight["q"]).reshape(-1, NUM_HEADS, HEAD_DIM)
            scores = jnp.einsum("thd,shd->hts", q, read["k"])
            seen = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
            mixed = jnp.einsum("hts,shd->thd", seen, read["v"]).reshape(-1, WIDTH)
            x = x + mixed @ weight["out"]
            x = x + jax.nn.silu(x @ weight["up"]) @ weight["down"]
        return pool, x

    x, table = spec(NUM_TOKENS, WIDTH), spec(128, dtype=jnp.int32)
    jitted = jax.jit(step, donate_argnums=0)
    return jitted.lower(pool, loads, weights, x, table).compile()


def events_of(text):
    """List (what, group) in the order of the schedule; the group of layers is None."""
    started, events = {}, []
    for line in text[text.index("ENTRY") :].splitlines():
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        copied = re.search(r"copy-start\(%?(loads_extents_\d+__(\d+)_[\w.]*)\)", rest)
        done = re.search(r"copy-done\(%?([\w.-]+)\)", rest)
        if copied:
            group = int(copied[2])
            started[name.lstrip("%")] = group
            events.append(("start", group))
        elif done and done[1] in started:
            events.append(("done", started[done[1]]))
        elif LAYER_MARK.search(name):
            events.append(("layer", None))
    return events


def compile_for(target, *how):
    if target.backend == "gpu":
        with compile_for_cuda(target.device, 1):
            return compile_step(jax.devices("cpu")[0], *how)
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=target.topology
    )
    return compile_step(topology.devices[0], *how)


def main(name):
    target, record = parse_target(name), {}
    for mode, kernel, with_after in (
        ("staged", None, True),
        ("no after", "xla", False),
    ):
        program = compile_for(target, kernel, with_after)
        text = program.as_text()
        shape = ",".join(map(str, LEAF))
        record[mode] = {
            "events": events_of(text),
            "num_groups": NUM_LAYERS,
            "alias_bytes": program.memory_analysis().alias_size_in_bytes,
            "pool_bytes": 2 * NUM_LAYERS * 2 * LEAF[0] * LEAF[1] * KV_WIDTH,
            "num_whole_leaf_copies": len(
                re.findall(rf"= bf16\[{shape}\]\S* copy\(", text)
            ),
        }
    print(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1])

"""The floors of the package: a file imports only from below.

Floors are listed from the ground up. The wings of a floor never see each other; in a
wing, a row may import the rows before its "<". A new file needs a place here.
"""

import ast
import fnmatch
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

FLOORS = [
    ["types < hashing keys < batches", "closing", "units", "names"],
    [
        "policies.ordering policies.counting < policies.directory policies.recency"
        " policies.arc_target < policies.lru policies.arc < policies.registry"
        " < policies",
        "transfer.memory transfer.limits < transfer.layout transfer.probe"
        " < transfer.codecs < transfer.extents < transfer.rows transfer.sizing"
        " transfer.hoststore < transfer.plans < transfer.ids transfer.kernels"
        " < transfer.modes transfer.hostmemory transfer.tickets < transfer.flow"
        " < transfer.engine"
        " < transfer",
    ],
    [
        "id_pool < manager reuse losses ragged request_batch < programs snapshot"
        " < host_books < host_tier < offloading_manager",
        "prefix_cache < device_tier < device_programs < blocks",
        "groups < hits",
    ],
    [
        "connector scheduling.exchange scheduling.watchdog"
        " < scheduling.agreement scheduling.rules scheduling.stats search"
        " < scheduling.gate"
        " scheduling.load_plan scheduling.prefix scheduling.request_keys"
        " scheduling.warm_up < scheduling.loads scheduling.stores"
        " < scheduling.eager scheduling.lazy scheduling.explain scheduling.vllm_019"
        " < scheduling scheduler worker < compat",
        "traces < synthetic belady request_loop < replay",
    ],
    [
        "observe.catalog observe.kv_events observe.sockets < observe.describe"
        " < observe.publisher < observe.subscriber",
        "observe.families < observe.metrics",
        "observe",
    ],
    ["config_keys < config"],
    ["jaxkv"],  # the public face, jaxkv/__init__.py
    [
        "demo.records demo.request demo.model"
        " < demo.workload demo.steps demo.allocation < demo.runner demo.batcher"
        " < demo.engine < demo.report demo.run < demo",
        "integrations.prefix_blocks < integrations.prefix_layout"
        " < integrations.prefix_moves < integrations.prefix_store"
        " < integrations.prefix_template integrations.jetstream_adapters"
        " integrations.maxtext_cache integrations.maxtext_guards"
        " < integrations.jetstream integrations.maxtext",
        "integrations.vllm_config integrations.vllm_pool"
        " < integrations.vllm_worker integrations.vllm_events"
        " < integrations.vllm_scheduler < integrations.vllm",
        "integrations",
        "bench.machine < bench.records < bench.plan < bench.paged_pool < bench.designs"
        " < bench.overlap < bench.transfer bench.report < bench < doctor.bandwidth"
        " < doctor.facts < doctor.findings < doctor.report < doctor",
    ],
    [
        "commands.options commands.progress commands.replay_report"
        " < commands.demo commands.replay commands.bench commands.doctor"
        " < commands < cli"
    ],
]
CORE = {"jax", "jaxlib", "numpy"} | sys.stdlib_module_names
EXTRAS = {"flax", "rich", "matplotlib", "zmq", "msgspec", "prometheus_client"}
ENGINES = {"jetstream", "maxtext", "vllm", "tpu_inference"}  # what is plugged into
# Packages that are of no use without an extra, and say so when imported.
NEED_EXTRAS = ("jaxkv.demo", "jaxkv.observe")

Sources = dict[str, str]  # a module's full name -> its text


def place(module: str) -> tuple[int, int, int] | None:
    """Find a module's (floor, wing, row); None if it is not listed."""
    name = module.removeprefix("jaxkv.")
    for floor, wings in enumerate(FLOORS):
        for wing, rows in enumerate(wings):
            for row, patterns in enumerate(rows.split("<")):
                if any(fnmatch.fnmatchcase(name, p) for p in patterns.split()):
                    return floor, wing, row
    return None


def may_import(importer: tuple[int, int, int], imported: tuple[int, int, int]) -> bool:
    """Whether `imported` is on a floor below, or on a row before in the same wing."""
    if importer[:2] == imported[:2]:
        return imported[2] < importer[2]
    return imported[0] < importer[0]


def imports(sources: Sources, module: str) -> Iterator[tuple[str, bool]]:
    """Yield what a module imports, and whether only inside a function."""
    is_package = any(name.startswith(f"{module}.") for name in sources)
    package = module if is_package else module.rpartition(".")[0]

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in sources else base), lazy
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy)

    yield from walk(ast.parse(sources[module]), False)


def faults(sources: Sources) -> list[str]:
    """Say what breaks the rules, one line each."""
    found = []
    for module in sorted(sources):
        own = place(module)
        if own is None:
            found.append(f"{module} has no place in FLOORS of {Path(__file__).name}")
            continue
        for name, lazy in imports(sources, module):
            top = name.partition(".")[0]
            if top == "jaxkv":
                other = place(name)
                if other is None or not may_import(own, other):
                    found.append(f"{module} may not import {name}")
            elif top in EXTRAS | ENGINES:
                if not lazy and not module.startswith(NEED_EXTRAS):
                    found.append(f"{module} may import {name} only in a function")
            elif top not in CORE:
                found.append(f"{module} imports {name}, which is no dependency")
    return list(dict.fromkeys(found))


def test_every_file_imports_only_what_is_below():
    root = Path(__file__).resolve().parent.parent
    sources = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path.read_text(encoding="utf-8")
        for path in (root / "jaxkv").rglob("*.py")
    }
    assert "jaxkv.types" in sources
    assert faults(sources) == []


def check_one(module: str, source: str) -> list[str]:
    """Check one made-up module beside empty ones that it may name."""
    others = ("types", "policies", "policies.lru", "policies.arc", "manager", "blocks")
    empty = {f"jaxkv.{name}": "" for name in others}
    return faults(empty | {"jaxkv": "", "jaxkv.transfer.memory": "", module: source})


def test_the_checker_allows_what_it_should():
    assert check_one("jaxkv.manager", "from jaxkv import types\nimport numpy") == []
    assert check_one("jaxkv.policies", "from .lru import make_lru") == []
    assert check_one("jaxkv.cli", "import jaxkv\nimport jaxkv.manager") == []
    assert check_one("jaxkv.demo.run", "import rich.table\nfrom flax import nnx") == []
    assert check_one("jaxkv.cli", "def show():\n    import matplotlib") == []


def test_the_checker_catches_each_fault():
    cases = [
        ("jaxkv.types", "import jaxkv.manager", "types may not import jaxkv.manager"),
        ("jaxkv.types", "from . import manager", "types may not import jaxkv.manager"),
        ("jaxkv.manager", "from jaxkv import BlockIds", "may not import jaxkv"),
        ("jaxkv.manager", "import jaxkv.blocks", "may not import jaxkv.blocks"),
        ("jaxkv.manager", "import jaxkv.nowhere", "may not import jaxkv.nowhere"),
        ("jaxkv.policies.lru", "from .arc import f", "not import jaxkv.policies.arc"),
        ("jaxkv.policies.lru", "import jaxkv.policies", "not import jaxkv.policies"),
        (
            "jaxkv.policies.lru",
            "def f():\n    from jaxkv.transfer import memory",
            "may not import jaxkv.transfer.memory",
        ),
        ("jaxkv.cli", "import rich", "jaxkv.cli may import rich only in a function"),
        ("jaxkv.cli", "import torch", "torch, which is no dependency"),
        ("jaxkv.novel", "", "jaxkv.novel has no place in FLOORS"),
    ]
    for module, source, message in cases:
        (fault,) = check_one(module, source)
        assert fault.endswith(message) or message in fault, (source, fault)

"""The floors of the package: a room imports only rooms below it.

A room is a folder of `jaxkv/`, or a file at its top. Files of one room may import one
another, as long as that goes in no circle. A new room needs a floor here.
"""

import ast
import graphlib
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

# From the ground up. Rooms of one floor do not see each other.
FLOORS = [
    ("types", "_util"),
    ("compiling",),
    ("keys",),
    ("policies", "transfer"),
    ("tiers",),
    ("search",),
    ("scheduling",),
    ("observe", "strict"),
    ("config",),
    ("jaxkv",),  # the public face, jaxkv/__init__.py
    ("tools", "integrations"),
]
# The most lines of Python that a room may have. A ceiling only goes down.
CEILINGS = {
    "types": 43,
    "_util": 980,
    "compiling": 990,
    "keys": 698,
    "policies": 3_741,
    "transfer": 9_202,
    "tiers": 4_347,
    "search": 581,
    "scheduling": 10_063,
    "observe": 1_625,
    "strict": 1_143,
    "config": 939,
    "jaxkv": 95,
    "tools": 11_916,
    "integrations": 6_888,
}
CORE = {"jax", "jaxlib", "numpy", "numba", "llvmlite", "xxhash"}
CORE |= sys.stdlib_module_names
EXTRAS = {"flax", "rich", "zmq", "msgspec", "prometheus_client"}
EXTRAS |= {"tensorstore", "redis"}
ENGINES = {"maxtext", "vllm", "tpu_inference", "sgl_jax"}
# Packages that need an extra, and say so when imported.
NEED_EXTRAS = ("jaxkv.tools.demo", "jaxkv.observe")
# Except what the command line always imports of them.
NEED_NONE = ("jaxkv.tools.demo.command",)

ROOT = Path(__file__).resolve().parent.parent

Sources = dict[str, str]  # a module's full name -> its text


def room_of(module: str) -> str:
    path = module.replace(".__main__", ".tools").split(".")
    return path[1] if len(path) > 1 else "jaxkv"


def floor_of(room: str) -> int | None:
    for floor, rooms in enumerate(FLOORS):
        if room in rooms:
            return floor
    return None


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def imports(sources: Sources, module: str) -> Iterator[tuple[str, bool]]:
    """Yield the names that a module imports, and whether only inside a function."""
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
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from ((arg.value, lazy) for arg in node.args if is_text(arg))
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy)

    yield from walk(ast.parse(sources[module]), False)


def faults(sources: Sources) -> list[str]:
    """List the violations of the rules, one line each."""
    lines = []
    for module in sorted(sources):
        room = room_of(module)
        floor = floor_of(room)
        if floor is None:
            lines.append(f"{room} has no place in FLOORS of {Path(__file__).name}")
            continue
        for name, lazy in imports(sources, module):
            top = name.partition(".")[0]
            if top == "jaxkv":
                imported = floor_of(room_of(name))
                is_below = imported is not None and imported < floor
                if not (is_below or room_of(name) == room):
                    lines.append(f"{module} may not import {name}")
            elif top in EXTRAS | ENGINES:
                is_bound = not module.startswith(NEED_EXTRAS) or module in NEED_NONE
                if not lazy and is_bound:
                    lines.append(f"{module} may import {name} only in a function")
            elif top not in CORE:
                lines.append(f"{module} imports {name}, which is no dependency")
    graph = {
        module: {name for name, _ in imports(sources, module) if name in sources}
        - {module}
        for module in sources
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        lines.append(f"imports go in a circle: {' -> '.join(error.args[1])}")
    return list(dict.fromkeys(lines))


def read_sources() -> Sources:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path.read_text(encoding="utf-8")
        for path in (ROOT / "jaxkv").rglob("*.py")
    }


def test_every_room_imports_only_what_is_below():
    sources = read_sources()
    assert "jaxkv.types" in sources
    assert faults(sources) == []


def test_no_room_has_more_lines_than_its_ceiling():
    sizes = Counter({room: 0 for room in CEILINGS})
    for module, text in read_sources().items():
        sizes[room_of(module)] += text.count("\n")
    assert sizes.keys() == CEILINGS.keys()
    assert [
        f"{room} has {size} lines, its ceiling is {CEILINGS[room]}, and a ceiling only "
        "goes down: take lines out of the room"
        for room, size in sizes.items()
        if size > CEILINGS[room]
    ] == []


def test_a_newcomer_reads_a_short_list_first():
    assert len({room_of(module) for module in read_sources()}) <= 16


def test_the_page_of_a_package_lists_its_files():
    pages = list((ROOT / "jaxkv").glob("*/README.md"))
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        files = {path.name for path in page.parent.rglob("*.py")} - {"__init__.py"}
        assert files <= set(re.findall(r"\w+\.py", text)), page
        firsts = " ".join(re.findall(r"^\| `.*?\|", text, re.MULTILINE))
        assert set(re.findall(r"\w+\.py", firsts)) <= files, page


def check_one(module: str, source: str, **sources: str) -> list[str]:
    """Check a made-up module next to some that it may name, empty unless given."""
    names = ("types", "policies", "policies.lru", "policies.arc", "tiers.host")
    made = {f"jaxkv.{name}": sources.get(name, "") for name in names}
    return faults(made | {"jaxkv": "", "jaxkv.transfer.memory": "", module: source})


def test_the_checker_allows_what_it_should():
    for module, source in (
        ("jaxkv.tiers.host", "from jaxkv import types\nimport numpy"),
        ("jaxkv.policies", "from .lru import make_lru"),
        ("jaxkv.policies.lru", "from .arc import f"),
        ("jaxkv.tools.main", "import jaxkv\nimport jaxkv.tiers.host"),
        ("jaxkv.tools.demo.run", "import rich.table\nfrom flax import nnx"),
        ("jaxkv.tools.main", "def show():\n    import rich"),
    ):
        assert check_one(module, source) == []


LAZY = "def f():\n    from jaxkv.transfer import memory"
BY_NAME = "import importlib\nimportlib.import_module('jaxkv.tiers.host')"


def test_the_checker_catches_each_fault():
    for module, source, message in (
        ("types", "import jaxkv.tiers.host", "may not import jaxkv.tiers.host"),
        ("types", "from .tiers import host", "may not import jaxkv.tiers.host"),
        ("tiers.host", "from jaxkv import LRU", "host may not import jaxkv"),
        ("tiers.host", "import jaxkv.nowhere", "not import jaxkv.nowhere"),
        ("types", BY_NAME, "may not import jaxkv.tiers.host"),
        ("policies.lru", LAZY, "may not import jaxkv.transfer.memory"),
        ("tools.main", "import rich", "may import rich only in a function"),
        ("tools.demo.command", "import rich", "import rich only in a function"),
        ("tools.main", "import torch", "torch, which is no dependency"),
        ("novel", "", "novel has no place in FLOORS"),
    ):
        (fault,) = check_one(f"jaxkv.{module}", source)
        assert message in fault
    arc = {"policies.arc": "def f():\n    from jaxkv.policies import lru"}
    source = "from jaxkv.policies import arc"
    (fault,) = check_one("jaxkv.policies.lru", source, **arc)
    assert fault.startswith("imports go in a circle: ")

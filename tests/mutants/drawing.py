"""Mutants drawn from a seed: the operators of cosmic-ray, on the rooms' own code.

A site is a place that some operator can change. A room gets mutants in proportion to
its sites, but never fewer than a few. Then a site is drawn, and then one of its
operators: otherwise an addition, which has eleven, would be drawn eleven times as
often as a condition.
"""

import ast
import collections
import dataclasses
import difflib
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# A room is a folder of jaxkv/ or a module beside them.
ROOMS = (
    *("scheduling", "search", "tiers", "policies", "transfer", "keys"),
    *("integrations", "tools", "observe", "strict", "config", "compiling", "_util"),
)
MIN_PER_ROOM = 8

# Not drawn: those that need the names of two variables, and the removal of a decorator,
# which here makes what is cached, compiled or a property.
_NOT_DRAWN = ("RemoveDecorator", "VariableReplacer", "VariableInserter")

# What the names of operators for one kind of node begin with. There are hundreds, which
# need not be asked about other nodes.
_OF_ONE_KIND = {
    "comparison": "ReplaceComparisonOperator",
    "operator": "ReplaceBinaryOperator",
}
# The kinds of nodes that the other operators change.
_OTHER_KINDS = {
    *("assert_stmt", "break_stmt", "continue_stmt", "for_stmt", "if_stmt", "try_stmt"),
    *("while_stmt", "except_clause", "factor", "keyword", "not_test", "number", "test"),
}
_LOGS = ("debug", "info", "warning", "error", "exception", "warn", "log")


class Change(NamedTuple):
    """A change of one file: a mutant, or a fault made by hand."""

    kind: str  # "mutants" or "faults".
    name: str
    room: str
    path: str  # From the root of the tree.
    lines: list[int]  # That it changes, from 1, in the file as it is.
    source: str  # The whole file, changed.
    about: dict[str, Any]  # For the results.


def room_of(path: str) -> str:
    return path.split("/")[1].removesuffix(".py")


def draw(
    root: Path, seed: str, number: int, rooms: Sequence[str] = ROOMS
) -> list[Change]:
    """Draw mutants of some rooms; the first of them are a fair sample of all."""
    from cosmic_ray.operators.provider import OperatorProvider

    rng = random.Random(seed)
    provider = OperatorProvider()
    operators = {name: provider[name]() for name in provider if name not in _NOT_DRAWN}
    sites: dict[str, list[_Site]] = {room: [] for room in rooms}
    sources: dict[str, str] = {}
    for file in sorted((root / "jaxkv").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if room_of(path) in sites:
            sources[path] = file.read_text(encoding="utf-8")
            sites[room_of(path)] += _sites(path, sources[path], operators)
    shares = _shares({room: len(sites[room]) for room in rooms}, number)
    drawn = [
        ((place + 0.5) / len(mutants), room, mutant)
        for room, share in shares.items()
        for mutants in [
            list(_draw_from(room, sites[room], share, sources, operators, rng))
        ]
        for place, mutant in enumerate(mutants)
    ]
    return [mutant for _, _, mutant in sorted(drawn, key=lambda site: site[:2])]


def draw_once(
    root: Path, seed: str, number: int, rooms: Sequence[str], folder: Path
) -> list[Change]:
    """Draw mutants, or read the ones that a folder keeps of the same tree."""
    hasher = hashlib.sha256(f"{seed} {number} {rooms} ".encode())
    for file in (Path(__file__), *sorted((root / "jaxkv").rglob("*.py"))):
        hasher.update(file.read_bytes())
    kept = folder / f"drawn-{hasher.hexdigest()[:16]}.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(draw(root, seed, number, rooms)), encoding="utf-8")
    return [Change(*mutant) for mutant in json.loads(kept.read_text(encoding="utf-8"))]


def _shares(sizes: dict[str, int], number: int) -> dict[str, int]:
    """Share out mutants by the sizes of rooms, some to each."""
    spare = number - MIN_PER_ROOM * len(sizes)
    exact = {room: spare * size / sum(sizes.values()) for room, size in sizes.items()}
    shares = {room: int(part) for room, part in exact.items()}
    by_cut = sorted(shares, key=lambda room: shares[room] - exact[room])
    for room in by_cut[: spare - sum(shares.values())]:
        shares[room] += 1
    return {room: share + MIN_PER_ROOM for room, share in shares.items()}


@dataclasses.dataclass
class _Site:
    path: str
    line: int
    last_line: int
    changes: list[tuple[str, int]]  # An operator, and which of its occurrences.


def _sites(path: str, source: str, operators: dict[str, Any]) -> list[_Site]:
    """Find the places of a file that operators can change."""
    import parso

    sites: dict[Any, _Site] = {}
    counts: collections.Counter[str] = collections.Counter()
    wanted = {
        kind: [name for name in operators if name.startswith(prefix)]
        for kind, prefix in _OF_ONE_KIND.items()
    }
    unused = operators.keys() - {name for names in wanted.values() for name in names}
    wanted |= dict.fromkeys(_OTHER_KINDS, sorted(unused))
    for node in _nodes(parso.parse(source)):
        for name in wanted.get(node.type, ()):
            operator = operators[name]
            for start, end in operator.mutation_positions(node):
                site = sites.setdefault((start, end), _Site(path, start[0], end[0], []))
                site.changes.append((name, counts[name]))
                counts[name] += 1
    return list(sites.values())


def _nodes(node: Any) -> Iterator[Any]:
    """Walk as cosmic-ray does, which counts occurrences in this order."""
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _draw_from(
    room: str,
    sites: list[_Site],
    share: int,
    sources: dict[str, str],
    operators: dict[str, Any],
    rng: random.Random,
) -> Iterator[Change]:
    """Draw sites of a room until enough of them make a valid mutant."""
    from cosmic_ray.mutating import mutate_code

    left, num_drawn = list(sites), 0
    plain: dict[str, str] = {}
    while num_drawn < share and left:
        site = left.pop(rng.randrange(len(left)))
        name, occurrence = rng.choice(site.changes)
        before = sources[site.path]
        after = mutate_code(before, operators[name], occurrence)
        if site.path not in plain:
            plain[site.path] = _plain(ast.parse(before))
        if after is None or not _counts(name, plain[site.path], after):
            continue
        diff = difflib.unified_diff(
            before.splitlines(), after.splitlines(), lineterm="", n=0
        )
        digest = hashlib.sha256(after.encode()).hexdigest()
        yield Change(
            "mutants",
            f"{room}-{num_drawn:02d}-{digest[:6]}",
            room,
            site.path,
            list(range(site.line, site.last_line + 1)),
            after,
            {"operator": name, "line": site.line, "diff": "\n".join(list(diff)[3:])},
        )
        num_drawn += 1


def _counts(operator: str, before: str, after: str) -> bool:
    """Return whether a change is of code that runs, and is what its operator says."""
    try:
        plain = _plain(ast.parse(after))
    except SyntaxError:
        return False
    if plain == before:
        return False
    # An asterisk of a signature passes for a product.
    return "BinaryOperator" not in operator or any(
        plain.count(kind) != before.count(kind) for kind in _BINARY
    )


_BINARY = [f"{kind.__name__}()" for kind in ast.operator.__subclasses__()]


def _plain(tree: ast.Module) -> str:
    """Dump a module without annotations, docstrings, messages, and what only types."""
    return ast.dump(_Plain().visit(tree))


class _Plain(ast.NodeTransformer):
    """Takes out what must not be mutated."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant):
            return None
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            of_log = ast.unparse(call.func.value).lower().endswith(("log", "warnings"))
            if of_log and call.func.attr in _LOGS:
                call.args, call.keywords = [], []
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return None
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.msg = None
        return self.generic_visit(node)

    def visit_Module(self, node: ast.Module) -> ast.AST:
        # A name for a union of types.
        node.body = [
            part
            for part in node.body
            if not (
                isinstance(part, ast.Assign)
                and isinstance(part.value, ast.BinOp)
                and isinstance(part.value.op, ast.BitOr)
                and isinstance(part.targets[0], ast.Name)
                and not part.targets[0].id.isupper()
            )
        ]
        return self.generic_visit(node)

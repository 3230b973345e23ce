"""Search of every order of actions: each state once, and the path to a wrong one."""

import dataclasses
import json
import time
from array import array
from collections import Counter, deque

from tests.explorer.world import World, WrongError, dump, pack, unpack

_NONE = 2**32 - 1
# Far more actions than a calm engine takes to serve all requests.
_MAX_CALM_ACTIONS = 400
# States whose actions were not tried are compressed from this number on.
_MAX_UNPACKED = 1000


@dataclasses.dataclass
class Result:
    num_states: int = 0
    num_steps: int = 0  # Actions that were tried.
    num_live: int = 0  # States whose requests were all seen to end.
    depth: int = 0  # Actions to the farthest state.
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    is_exhausted: bool = False  # There are no more states.
    error: str | None = None
    actions: list = dataclasses.field(default_factory=list)  # That lead to the error.
    seen: Counter = dataclasses.field(default_factory=Counter)

    def __str__(self):
        how = "all" if self.is_exhausted else "not all"
        return (
            f"{self.num_states} states ({how}), {self.num_steps} steps, depth "
            f"{self.depth}, {self.num_live} known to end, {self.seconds:.0f} s "
            f"({self.cpu_seconds:.0f} s of the processor)"
        )


class _Graph:
    """States by number: where each came from, and where a calm engine goes from it."""

    def __init__(self):
        self.numbers = {}
        self.parents, self.actions, self.calm = array("I"), array("H"), array("I")
        self.depths = array("H")
        self._names, self._ids = [], {}

    def add(self, digest, parent, action):
        number = self.numbers[digest] = len(self.parents)
        self.parents.append(parent)
        name = self._ids.setdefault(action, len(self._names))
        if name == len(self._names):
            self._names.append(action)
        self.actions.append(name)
        self.calm.append(_NONE)
        self.depths.append(0 if parent == _NONE else self.depths[parent] + 1)
        return number

    def path(self, number):
        path = []
        while self.parents[number] != _NONE:
            path.append(self._names[self.actions[number]])
            number = self.parents[number]
        return path[::-1]


def explore(
    setup,
    *,
    minutes=None,
    max_states=None,
    max_depth=None,
    refuse_every=1,
    live_s=30.0,
    say=None,
    say_every_s=30.0,
):
    """Try every action in every state, the nearest states first.

    Refused calls are tried in one state of `refuse_every`. A timed run ends `live_s`
    later at most: until then a calm engine goes on from states that were not tried.
    `say` is called with the progress every `say_every_s`.
    """
    start_s = said_s = time.monotonic()
    start_cpu_s = time.process_time()
    end_s = None if minutes is None else start_s + 60 * minutes
    world, graph, result = World(setup), _Graph(), Result()
    saved = world.save()
    frontier = deque([(graph.add(world.digest(), _NONE, None), saved)])

    def note():
        result.num_states = len(graph.parents)
        result.depth = graph.depths[-1]
        result.seconds = time.monotonic() - start_s
        result.cpu_seconds = time.process_time() - start_cpu_s
        result.seen = world.seen

    def is_over():
        if end_s is not None and time.monotonic() >= end_s:
            return True
        return max_states is not None and len(graph.parents) >= max_states

    number, trial = 0, None
    try:
        world.check()
        while frontier and not is_over():
            number, kept = frontier[0]
            if max_depth is not None and graph.depths[number] >= max_depth:
                break
            frontier.popleft()
            saved = _open(kept)
            world.restore(saved)
            if number % refuse_every == 0:
                world.try_refused()
            calm = world.calm()
            if calm is None:
                _check_over(world)
                graph.calm[number] = number
            actions = world.actions()
            if calm is not None and calm not in actions:
                actions.append(calm)
            for action in actions:
                world.restore(saved)
                trial = action
                world.do(action)
                result.num_steps += 1
                digest = world.digest()
                after = graph.numbers.get(digest)
                if after is None:
                    after = graph.add(digest, number, action)
                    frontier.append((after, _keep(world.save(), frontier)))
                if action == calm:
                    graph.calm[number] = after
                trial = None
            now_s = time.monotonic()
            if say is not None and now_s - said_s > say_every_s:
                said_s = now_s
                note()
                say(f"{result}, {len(frontier)} to go on from")
        result.is_exhausted = not frontier
        trial = None
        result.num_live = _check_live(
            world, graph, frontier, None if end_s is None else end_s + live_s
        )
    except WrongError as error:
        result.error = str(error)
        stuck = getattr(error, "number", number)
        result.actions = graph.path(stuck)
        if trial is not None:
            result.actions.append(trial)
    note()
    return result


def _keep(saved, frontier):
    return saved if len(frontier) < _MAX_UNPACKED else pack(saved)


def _open(kept):
    return unpack(kept) if type(kept) is bytes else kept


def _check_over(world):
    """Check that all has ended where a calm engine has nothing to do."""
    left = [r.request_id for r in world.requests if r.phase != "done"]
    if left:
        raise WrongError(f"{', '.join(left)} can never end")
    scheduler = world.scheduler
    if scheduler.has_pending_loads() or scheduler.has_pending_stores():
        raise WrongError("something stays on its way for ever")


def _check_live(world, graph, frontier, end_s):
    """Follow a calm engine from every state; return how many are known to end."""
    saved = dict(frontier)
    is_live = bytearray(len(graph.calm))
    for number in range(len(graph.calm)):
        chain, at = [], number
        while not is_live[at] and graph.calm[at] not in (at, _NONE):
            chain.append(at)
            at = graph.calm[at]
            if len(chain) > _MAX_CALM_ACTIONS:
                _stuck(number)
        if not is_live[at] and graph.calm[at] == _NONE:
            # Not tried yet: following it without digests costs less.
            if end_s is not None and time.monotonic() > end_s:
                continue
            _follow(world, saved[at], at)
        for state in chain:
            is_live[state] = True
        is_live[at] = True
    return sum(is_live)


def _follow(world, kept, number):
    world.restore(_open(kept))
    try:
        go_on_calmly(world)
    except WrongError as error:
        error.number = number
        raise


def go_on_calmly(world):
    """Run a calm engine until every request has ended; WrongError if it cannot."""
    for _ in range(_MAX_CALM_ACTIONS):
        calm = world.calm()
        if calm is None:
            _check_over(world)
            return
        world.do(calm)
    _stuck(0)


def _stuck(number):
    error = WrongError(f"a calm engine goes on for ever ({_MAX_CALM_ACTIONS} actions)")
    error.number = number
    raise error


def what_goes_wrong(setup, actions):
    """Replay actions; return the error, or None, and how many actions lead to it."""
    world, num = World(setup), 0
    try:
        for action in actions:
            if action not in world.actions() and action != world.calm():
                raise LookupError(action)
            world.try_refused()
            num += 1
            world.do(action)
        world.try_refused()
        go_on_calmly(world)
    except WrongError as error:
        return str(error), num
    return None, num


def shrink(setup, actions):
    """Drop every action that an error does not need."""

    def is_wrong(some):
        try:
            return what_goes_wrong(setup, some)
        except LookupError:
            return None, 0

    error, num = is_wrong(actions)
    if error is None:
        return actions, None
    actions = list(actions[:num])
    is_shorter = True
    while is_shorter:
        is_shorter = False
        for size in (3, 2, 1):
            for start in range(len(actions) - size, -1, -1):
                some = actions[:start] + actions[start + size :]
                new_error, num = is_wrong(some)
                if new_error is not None:
                    actions, error, is_shorter = some[:num], new_error, True
    return actions, error


def write_counterexample(path, name, actions, error):
    text = json.dumps(
        {"world": name, "error": error, "actions": [list(a) for a in actions]}, indent=1
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def read_counterexample(path):
    with open(path, encoding="utf-8") as file:
        read = json.load(file)
    return read["world"], [tuple(action) for action in read["actions"]]


def compare_futures(setup, num_states):
    """Check that states of equal digests have equal actions and next digests."""
    world = World(setup)
    start = world.save()
    seen, futures, num = {world.digest(): start}, {}, 0
    frontier, again = deque(seen.items()), []

    def steps(saved):
        """Try every action; yield it, the digest that it leads to, and the state."""
        world.restore(saved)
        for action in world.actions():
            world.restore(saved)
            world.do(action)
            yield action, world.digest(), world.save()

    def future(saved):
        return [(action, digest) for action, digest, _ in steps(saved)]

    while frontier and len(seen) < num_states:
        before, saved = frontier.popleft()
        futures[before] = []
        for action, digest, after in steps(saved):
            futures[before].append((action, digest))
            if digest not in seen:
                seen[digest] = after
                frontier.append((digest, after))
            elif len(again) < num_states and dump(seen[digest]) != dump(after):
                again.append((digest, after))
    for digest, after in again:
        if digest not in futures:
            futures[digest] = future(seen[digest])
        if future(after) != futures[digest]:
            raise WrongError("a digest leaves out something that matters")
        num += 1
    return num

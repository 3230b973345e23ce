"""The Python of README and docs/ runs, prints what it says, and is right."""

import contextlib
import dataclasses
import functools
import io
import random
import re
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxkv.policies import get_policy_maker, registry
from jaxkv.search.groups import FullAttention, SlidingWindow
from tests.policies.test_contract import *  # noqa: F403 - on the policy of the docs

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES_A_FILE = re.compile(r"(?:tests|benchmarks|examples|jaxkv|docs)/[\w/.-]+\.\w+")
LINKS_TO = re.compile(r"\]\((?!https?://)([^)#]+)[^)]*\)")
SAYS_IT_PRINTS = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


def run_page(page):
    """Run a page's blocks as one module, which can be imported; give what it prints."""
    text = (ROOT / page).read_text(encoding="utf-8")
    module = types.ModuleType(re.sub(r"\W", "_", page))
    sys.modules[module.__name__] = module
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in BLOCK.finditer(text):
            # In its place, so that a traceback has the page's own line.
            above = "\n" * text.count("\n", 0, block.start(1))
            exec(compile(above + block[1], ROOT / page, "exec"), vars(module))
    return printed.getvalue().splitlines()


@pytest.fixture(scope="module")
def run():
    """Run a page once; in the end, take back what the pages registered."""
    modules, makers = dict(sys.modules), dict(registry._makers)
    yield functools.cache(run_page)
    for name in sys.modules.keys() - modules.keys():
        if name.endswith("_md"):
            del sys.modules[name]
    registry._makers.clear()
    registry._makers.update(makers)


@pytest.fixture
def make(run):
    """The maker that the contract's tests, imported above, are to be run on."""
    run("docs/write-a-policy.md")
    return get_policy_maker("fifo")


@pytest.mark.parametrize("page", sorted(PAGES))
def test_python_runs_and_prints_what_it_says(run, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    said = SAYS_IT_PRINTS.findall("".join(BLOCK.findall(text)))
    printed = run(page)
    assert [line for line in printed if line in said] == said


@pytest.mark.parametrize("page", sorted(PAGES))
def test_what_a_page_names_is_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    beside = (ROOT / page).parent
    missing = [
        name for name in NAMES_A_FILE.findall(text) if not (ROOT / name).exists()
    ]
    missing += [link for link in LINKS_TO.findall(text) if not (beside / link).exists()]
    assert missing == []


def test_the_policy_of_the_docs_evicts_the_tail_of_the_oldest_batch_first(make):
    policy = make(NUM_BLOCKS, 64)  # noqa: F405
    evicted = policy.evict(filled(policy), 4, free_refs(), WIDTH)  # noqa: F405
    assert evicted.block_ids.tolist() == [2, 1, 0, 5]


@pytest.fixture
def page(run):
    """What docs/integrate.md defines: its model, its request and its engine."""
    run("docs/integrate.md")
    return sys.modules["docs_integrate_md"]


GROUPS = {
    "full": (FullAttention(4),),
    "window": (SlidingWindow(4, 10),),
    "full and window": (FullAttention(4), SlidingWindow(4, 10)),
    "two windows": (SlidingWindow(4, 13), SlidingWindow(4, 1)),
}
of_each_kind = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)


def serve_alone(page, groups, prompt, num_new):
    """Compute each token of a request, in a pool of its own, with no tier at all."""
    windows = page.Engine(2, 1, groups).windows
    blocks = jnp.arange(len(groups) * page.MAX_BLOCKS, dtype=jnp.int32)
    tables = blocks.reshape(len(groups), page.MAX_BLOCKS)
    pool, tokens = page.new_pool(blocks.size), list(prompt)
    for position in range(len(prompt) + num_new - 1):
        where = tables, jnp.int32(position)
        pool, new = page.model(pool, *where, jnp.int32(tokens[position]), windows)
        if position + 1 == len(tokens):
            tokens.append(int(new))
    return tokens[len(prompt) :]


def let_stores_arrive(engine):
    while engine.scheduler.has_pending_stores():
        engine.step([])


def serve_turns(page, engine, num_turns):
    """Serve requests with prefixes in common; each has the tokens it has alone.

    Gives how many tokens of each were found.
    """
    rng = random.Random(7)
    prompts = [rng.choices(range(97), k=41) for _ in range(3)]
    hits = []
    for turn in range(num_turns):
        prompt = rng.choice(prompts)[: rng.randint(9, 41)]
        let_stores_arrive(engine)
        tokens, hit = engine.serve(f"turn {turn}", prompt, 5)
        alone = serve_alone(page, engine.groups, prompt, 5)
        assert tokens == alone, f"turn {turn}, of which {hit} tokens were found"
        hits.append(hit)
    let_stores_arrive(engine)
    assert engine.blocks.num_free == engine.blocks.num_blocks - 1
    engine.blocks.check()
    return hits


@of_each_kind
def test_blocks_outside_a_window_that_nobody_wrote_are_not_cached(page, groups):
    """The engine of the page had cached them: later requests had other tokens."""
    engine = page.Engine(12 * len(groups) + 4, 100, groups)
    cache, skipped = engine.blocks.cache, []
    engine.blocks.cache = lambda *pairs: skipped.extend(cache(*pairs))
    hits = serve_turns(page, engine, num_turns=40)
    assert sum(hits) > 40 * 10
    assert engine.worker.bytes_stored > 0
    assert engine.worker.bytes_loaded > 0
    assert skipped == []


@of_each_kind
def test_an_engine_that_ignores_the_returned_tables_is_right_too(page, groups):
    """`DeviceBlockPool.cache` skips what was not written, and says so."""

    class CarelessEngine(page.Engine):
        num_skipped = 0

        def take_offer(self, request, num_tokens, after):
            request.num_computed_tokens += num_tokens

        def cache(self, request):
            full = request.num_computed_tokens // page.BLOCK
            keys = request.block_keys_by_group
            for table, own in zip(request.tables, keys, strict=True):
                self.num_skipped += len(self.blocks.cache(table[:full], own[:full]))

    engine = CarelessEngine(12 * len(groups) + 4, 100, groups)
    hits = serve_turns(page, engine, num_turns=40)
    assert sum(hits) > 40 * 10
    has_window = any(isinstance(group, SlidingWindow) for group in groups)
    assert (engine.num_skipped > 0) == has_window


@of_each_kind
def test_the_engine_of_the_page_computes_what_it_could_not_load(
    page, groups, monkeypatch
):
    """And caches it: the blocks outside the window, too, are written then."""
    engine = page.Engine(12 * len(groups) + 4, 100, groups)
    prompt = list(range(41))
    alone = serve_alone(page, groups, prompt, 5)
    assert engine.serve("first", prompt, 5) == (alone, 0)
    let_stores_arrive(engine)
    assert engine.blocks.reset()
    poll = engine.worker.poll

    def poll_failing():
        output = poll()
        if output.finished_recving:
            engine.pool = page.new_pool(engine.blocks.num_blocks)
        return dataclasses.replace(
            output, finished_recving=(), failed_recving=output.finished_recving
        )

    monkeypatch.setattr(engine.worker, "poll", poll_failing)
    assert engine.serve("again", prompt, 5) == (alone, 40)
    assert engine.scheduler.stats.num_loads_failed == 1
    for keys in page.Request("?", prompt, len(groups)).block_keys_by_group:
        assert len(engine.blocks.find_prefix(keys)) == 10


def test_blocks_allocated_in_the_middle_of_a_request_are_stored(page):
    """The engine of the page had told the scheduler of the prompt's blocks only."""
    engine = page.Engine(16, 100)
    prompt = list(range(9))
    answer, _ = engine.serve("first", prompt, 30)
    let_stores_arrive(engine)
    assert engine.blocks.reset()
    # The last token of the answer was not computed.
    assert engine.serve("next turn", prompt + answer, 1)[1] == 36

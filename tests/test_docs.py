"""The Python of README and docs/ runs and prints the output shown."""

import ast
import contextlib
import functools
import io
import re
import runpy
import sys
import types
from pathlib import Path

import pytest

from jaxkv.policies import get_policy_maker, registry
from jaxkv.scheduling.protocol import Request
from jaxkv.transfer.storage.store_url import SCHEMES, StoreUrl
from tests import architecture, pages, tiers_picture
from tests.policies.test_contract import *  # noqa: F403 - on the policy of the docs

# These choose their policies by themselves.
test_jit_equals_eager = test_state_survives_an_orbax_checkpoint = None

ROOT = Path(__file__).resolve().parent.parent
publish = types.SimpleNamespace(**runpy.run_path(ROOT / "docs/.site/publish.py"))
PAGES = [str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")]
PAGES += [str(path.relative_to(ROOT)) for path in ROOT.glob("jaxkv/*/README.md")]
PAGES += ["README.md", "CONTRIBUTING.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES_A_FILE = re.compile(r"(?:tests|benchmarks|examples|jaxkv|docs)/[\w/.-]+\.\w+")
URL_OF_STORE = re.compile(
    rf"(?<![\w/])(?:{'|'.join(map(re.escape, SCHEMES))})://[^\s`\"')]+"
)
PLACEHOLDERS = {"PORT": "6379", "/DB": "/0", "BUCKET": "bucket"}
LINKS_TO = re.compile(r"\]\((?!https?://)([^)#]+)[^)]*\)")
SAYS_IT_PRINTS = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


def run_page(page):
    """Run a page's blocks as one importable module; return its output."""
    text = (ROOT / page).read_text(encoding="utf-8")
    module = types.ModuleType(re.sub(r"\W", "_", page))
    sys.modules[module.__name__] = module
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in BLOCK.finditer(text):
            # In its place, so that a traceback has the page's own line.
            above = "\n" * text.count("\n", 0, block.start(1))
            exec(compile(above + block[1], ROOT / page, "exec"), vars(module))
    return printed.getvalue().splitlines()


def test_the_urls_of_stores_are_accepted():
    num_urls = 0
    for page in PAGES:
        for url in URL_OF_STORE.findall((ROOT / page).read_text(encoding="utf-8")):
            url = url.rstrip(",.")
            for word, value in PLACEHOLDERS.items():
                url = url.replace(word, value)
            StoreUrl.parse(url)
            num_urls += 1
    assert num_urls > 10


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
    run("docs/write-a-policy.md")
    return get_policy_maker("fifo")


@pytest.mark.parametrize("page", sorted(PAGES))
def test_python_runs_and_prints_what_it_says(run, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    said = SAYS_IT_PRINTS.findall("".join(BLOCK.findall(text)))
    printed = run(page)
    assert [line for line in printed if line in said] == said


def test_every_output_and_picture_on_a_page_is_of_a_command():
    on_pages = {path.name for path in (ROOT / "docs").rglob("*.[ps][nv]g")}
    on_pages |= {page for page in PAGES if pages.has_output(page)}
    made = {name for shown in pages.SHOWN for name in (shown.picture, shown.page)}
    assert on_pages == made - {""} | pages.ELSEWHERE.keys()
    for shown in pages.SHOWN:
        assert not shown.page or pages.block_after(shown)


def test_what_the_pages_name_is_there():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        files = [ROOT / name for name in NAMES_A_FILE.findall(text)]
        files += [(ROOT / page).parent / link for link in LINKS_TO.findall(text)]
        assert [str(file) for file in files if not file.exists()] == [], page


def attributes_read(source):
    """Yield the attributes of requests that a module reads, also of `end.request`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(ast.Name("request") | ast.Attribute(_, "request"), name):
                yield name
            case ast.Call(
                ast.Name("getattr"),
                [
                    ast.Name("request") | ast.Attribute(_, "request"),
                    ast.Constant(name),
                    *_,
                ],
            ):
                yield name


def test_the_attributes_of_a_request_that_are_read_are_documented():
    have_other_requests = {"record.py", "storage_worker.py"}
    read = set()
    for room in ("scheduling", "strict"):
        for path in (ROOT / "jaxkv" / room).rglob("*.py"):
            if path.name not in have_other_requests:
                read |= set(attributes_read(path.read_text(encoding="utf-8")))
    required = {
        name for name in vars(Request) if isinstance(vars(Request)[name], property)
    }
    optional = re.findall(r"^ *\* ``(\w+)``", Request.__doc__, re.MULTILINE)
    assert read == {*required, *optional}
    assert "jaxkv.scheduling.protocol.Request\n" in (ROOT / "docs/api.md").read_text()


def test_the_page_of_the_architecture_names_files_of_the_tree():
    text = architecture.PICTURE.with_suffix(".md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w/]+\.py)`", text)
    assert len(names) > 20
    missing = [name for name in names if not any(ROOT.glob(f"jaxkv/**/{name}"))]
    assert [name for name in missing if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("picture", [architecture, tiers_picture])
def test_a_drawn_picture_is_of_this_tree(picture):
    """`python -m tests.architecture` and `tests.tiers_picture` draw them anew."""
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.draw()


def test_pages_install_jaxkv_from_where_it_is_published():
    """`python docs/.site/publish.py` rewrites them, there and back."""
    published, num_changed = publish.is_published(), 0
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert publish.rewrite(text, published) == text, page
        other = publish.rewrite(text, not published)
        assert publish.rewrite(other, published) == text, page
        if not published:
            assert not re.search(r'pip install (?!-e)"?\.', other), page
        num_changed += other != text
    assert num_changed >= 5


def test_the_policy_of_the_docs_evicts_the_tail_of_the_oldest_batch_first(make):
    policy = make(NUM_BLOCKS, 64)  # noqa: F405
    evicted = policy.evict(filled(policy), 4, free_refs(), WIDTH)  # noqa: F405
    assert evicted.block_ids.tolist() == [2, 1, 0, 5]

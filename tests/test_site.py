"""The documentation as a site: it builds, fits a phone, and its search finds things."""

import functools
import html
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxkv.tools.commands import load_usages
from tests.rigs.browser import Browser, find_browser
from tests.rigs.waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent
NEEDS = ("mkdocs", "material", "mkdocstrings")
DESKTOP, PHONE = 1280, 360

missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"the extra docs is not installed: no {', '.join(missing)}"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [
            *(sys.executable, "-m", "mkdocs", "build", "--strict"),
            *("--site-dir", str(folder)),
        ],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    """The URL of a server for the site, as its search does not work from files."""
    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium: .ci/browser installs one")
    with Browser(program) as browser:
        yield browser


def pages_of(site):
    return sorted(
        path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")
    )


def test_every_page_is_built_with_its_examples(site):
    pages = pages_of(site)
    for path in (ROOT / "docs").glob("**/*.md"):
        assert path.relative_to(ROOT / "docs").with_suffix("").as_posix() in pages
    assert {".", "CONTRIBUTING", "CHANGELOG"} < set(pages)
    examples = {"integrate": "integrate_*.py", "write-a-tier": "memory_tier.py"}
    for page, pattern in examples.items():
        shown = (site / page / "index.html").read_text(encoding="utf-8")
        text = html.unescape(re.sub("<[^>]*>", "", shown))
        for example in (ROOT / "examples").glob(pattern):
            assert example.read_text(encoding="utf-8").rstrip() in text, example.name


def test_the_page_of_commands_is_their_help(site):
    shown = (site / "commands" / "index.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub("<[^>]*>", "", shown))
    for name, usage in load_usages().items():
        assert usage.help in text, name


def test_no_page_scrolls_sideways(site, address, browser):
    sizes = [(page, PHONE) for page in pages_of(site)] + [("configuration", DESKTOP)]
    # Each page would load the search index, which does not change its width.
    search = ["*/search_index.json", "*/workers/search.*"]
    browser.call("Network.setBlockedURLs", urls=search)
    try:
        for page, width in sizes:
            browser.open(f"{address}{page}/", width)
            needed = browser.evaluate("document.documentElement.scrollWidth")
            assert needed <= width, page
    finally:
        browser.call("Network.setBlockedURLs", urls=[])


def test_light_and_dark_systems_get_their_colours(address, browser):
    shades = []
    for scheme in ("light", "dark"):
        browser.open(address, DESKTOP, scheme=scheme)
        pixels, _ = browser.screenshot(whole=False)
        shades.append(pixels[-200:].mean())
        urls = browser.requested_urls()
        assert urls
        assert all(url.startswith((address, "data:")) for url in urls)
    assert shades[0] > 200
    assert shades[1] < 80


RESULTS = """
[...document.querySelectorAll('.md-search-result__item > a')].map(
  a => new URL(a.href).pathname.split('/').filter(part => part).join('/'))
"""


def test_the_search_finds_the_right_page_first(address, browser):
    for words, page in (
        *(("security", "storage"), ("cold", "troubleshooting")),
        *(("block size", "performance"), ("hit rate", "troubleshooting")),
        ("retention", "policies"),
    ):
        browser.open(address, DESKTOP)
        browser.evaluate(
            "(input => { input.focus(); input.value = '" + words + "';"
            "input.dispatchEvent(new Event('input', {bubbles: true}));"
            "input.dispatchEvent(new Event('keyup', {bubbles: true})); })"
            "(document.querySelector('.md-search__input'))"
        )
        assert wait_for(browser.evaluate, RESULTS)[0] == page, words

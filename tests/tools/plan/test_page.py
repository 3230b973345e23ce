"""The report of a plan, as a real browser shows it."""

import itertools
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxkv._util import time_text
from jaxkv.policies import make_hazard, make_lru, policy_names
from jaxkv.scheduling.whatif.speeds import Speeds
from jaxkv.tools.pictures import spread
from jaxkv.tools.plan.model_costs import find_model_costs
from jaxkv.tools.plan.plan import Setting, Timing, make_plan
from jaxkv.tools.plan.report import render_page, to_json
from jaxkv.tools.replay.run import OPTIMUM, sweep
from jaxkv.tools.replay.synthetic import make_synthetic_trace
from tests.rigs.browser import VARIABLE, Browser, find_browser

COMMAND = "jaxkv plan 'a <b> & c.jsonl' --policy all"
SCHEMES = ("light", "dark")
WIDTHS = (360, 1280)
# The charts, and what their figures are called in JSON.
CHARTS = {"saved": "saved_mean_s", "found": "found_share"}
TABLES = CHARTS | {"p95": "saved_p95_s", "prefill": "saved_share", "link": "store_use"}
CEILING = "optimum (ceiling)"


def make_hazard_flops(num_blocks, max_batch):
    return make_hazard(num_blocks, max_batch, objective="flops")


def make_first(num_blocks, max_batch):
    return make_lru(num_blocks, max_batch)


def make_second(num_blocks, max_batch):
    return make_lru(num_blocks, max_batch)


def make_third(num_blocks, max_batch):
    return make_lru(num_blocks, max_batch)


def plan_of(trace, policies, capacities, device_blocks=None, timing=None):
    setting = Setting(trace, timing, device_blocks)
    results = sweep(trace, policies, capacities, device_blocks=device_blocks)
    sizes = [capacity * setting.block_size for capacity in capacities]
    return setting, make_plan(setting, sizes, results)


@pytest.fixture(scope="module")
def made():
    """A plan of seven policies and the optimum, behind a device, with a model."""
    trace = make_synthetic_trace(300, seed=4, max_open=40)
    unique = trace.num_unique_blocks
    made = make_hazard_flops, make_first, make_second, make_third
    policies = [*policy_names()[:3], *made, OPTIMUM]
    capacities = [unique * percent // 100 for percent in (1, 3, 5, 10, 30)]
    speeds = Speeds(64e9, 64e9, 1e-3, prefill_flops_per_s=4e14)
    sources = dict.fromkeys(vars(speeds), "given")
    timing = Timing(find_model_costs("llama-3.1-8b"), speeds, sources)
    return plan_of(trace, policies, capacities, unique // 30, timing)


@pytest.fixture(scope="module")
def figures(made):
    return json.loads(json.dumps(to_json(*made)))


@pytest.fixture(scope="module")
def page(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(*made, COMMAND), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    program = find_browser()
    if program is None:
        pytest.skip(f"no Chromium on PATH, nor named by {VARIABLE}")
    with Browser(program) as opened:
        yield opened


def values_of(figures, key):
    """Return a table's figures by row and by column, and as a page writes them."""
    rows = {}
    for row in figures["rows"]:
        value, name = row[TABLES[key]] or 0.0, row["policy"]
        text = time_text(value) if key in ("saved", "p95") else f"{100 * value:.1f}%"
        label = CEILING if name == OPTIMUM else name
        rows.setdefault(label, []).append((row["host_bytes"], value, text))
    if key == "link":
        del rows[CEILING]
    return rows


READ_TABLES = """
[...document.querySelectorAll('table')].map(table => ({
  id: table.id,
  columns: [...table.tHead.rows[0].cells].map(cell => cell.textContent),
  rows: [...table.tBodies[0].rows].map(row => [...row.cells].map(c => c.innerText)),
  scopes: [...table.querySelectorAll('th')].map(cell => cell.scope),
}))
"""


def test_the_tables_have_the_figures_of_the_json_and_mark_the_choice(
    browser, page, figures
):
    browser.open(page, 1280)
    tables = {table["id"]: table for table in browser.evaluate(READ_TABLES)}
    assert list(tables) == [f"{key}-t" for key in TABLES]
    choice = figures["recommendation"]
    assert choice["pays"]
    for key in TABLES:
        table, values = tables[f"{key}-t"], values_of(figures, key)
        assert len(table["columns"]) == 6
        assert set(table["scopes"]) == {"row", "col"}
        assert [row[0] for row in table["rows"]] == list(values)
        for label, *cells in table["rows"]:
            for cell, (size, _, text) in zip(cells, values[label], strict=True):
                chosen = (label, size) == (choice["policy"], choice["host_bytes"])
                assert cell.split("\n") == [text, *["recommended"] * chosen], key


READ_MARKS = """
[...document.querySelectorAll('.chart')].map(svg => ({
  chart: svg.closest('section').id,
  marks: [...svg.querySelectorAll('.mark')].map(mark => {
    const box = mark.getBoundingClientRect();
    return [mark.querySelector('title').textContent, box.x + box.width / 2,
            box.y + box.height / 2];
  }),
}))
"""


def test_the_marks_of_the_charts_lie_where_their_values_are(browser, page, figures):
    charts = []
    for width in WIDTHS:
        browser.open(page, width)
        charts += browser.evaluate(READ_MARKS)
    assert [chart["chart"] for chart in charts] == [*CHARTS] * len(WIDTHS)
    for chart in charts:
        by_label, values, at = values_of(figures, chart["chart"]), [], []
        drawn = iter(chart["marks"])
        for label, cells in by_label.items():
            for size, value, text in cells:
                title, x, y = next(drawn)
                assert title.startswith(f"{label}, ")
                assert title.endswith(f": {text}")
                values.append(value)
                at.append((np.log(size), x, y))
        assert next(drawn, None) is None
        logs, xs, ys = np.array(at).T
        for expected, placed in ((values, ys), (logs, xs)):
            line = np.polyfit(expected, placed, 1)
            # Within two pixels, as the corners of a triangle are not about its centre.
            assert np.abs(np.polyval(line, expected) - placed).max() < 2
        assert np.polyfit(values, ys, 1)[0] < 0


READ_LINES = """
[...document.querySelectorAll('#found .line')].map(line => {
  const mark = line.closest('g').querySelector('.mark');
  return [mark.textContent.split(',')[0], mark.getAttribute('d'),
          getComputedStyle(line).stroke];
})
"""


def test_eight_lines_differ_by_shape_and_by_colour(browser, page):
    for scheme in SCHEMES:
        browser.open(page, 1280, 900, scheme)
        names, shapes, strokes = zip(*browser.evaluate(READ_LINES), strict=True)
        assert len(set(names)) == len(set(shapes)) == len(set(strokes)) == 8, shapes
        browser.evaluate("document.querySelector('#found figure').scrollIntoView()")
        pixels, _ = browser.screenshot(whole=False)
        seen, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
        drawn = set(map(tuple, seen.tolist()))
        assert {tuple(rgb(stroke)[:3]) for stroke in strokes} <= drawn
        paper = seen[counts.argmax()].mean()
        assert paper > 240 if scheme == "light" else paper < 40


READ_TEXTS = """
(() => {
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, own = node.parentElement;
    if (!node.textContent.trim() || !own.getClientRects().length) continue;
    if (['title', 'desc'].includes(own.tagName)) continue;
    const style = getComputedStyle(own);
    const behind = [];
    for (let e = own; e; e = e.parentElement)
      behind.push(getComputedStyle(e).backgroundColor);
    found.push([node.textContent.trim(), own.closest('svg') ? style.fill : style.color,
                behind, parseFloat(style.fontSize)]);
  }
  return found;
})()
"""
READ_STROKES = """
[...document.querySelectorAll('.line, .mark, .zero')].map(
  e => getComputedStyle(e)[e.matches('.mark') ? 'fill' : 'stroke'])
"""


def rgb(text):
    """Parse a computed colour: red, green, blue from 0 to 255, and how opaque."""
    numbers = [float(n) for n in re.findall(r"[\d.]+", text)]
    return [*numbers, 1.0][:4]


def contrast(text, background):
    """The contrast of WCAG 2: from 1 to 21."""

    def light(colour):
        channels = np.array(colour[:3]) / 255
        linear = np.where(
            channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
        )
        return linear @ (0.2126, 0.7152, 0.0722)

    low, high = sorted((light(text), light(background)))
    return (high + 0.05) / (low + 0.05)


def background(colours):
    """The first opaque colour from the front on."""
    return next(c for c in map(rgb, colours) if c[3] == 1)


READ_BOXES = """
[...document.querySelectorAll('figure')].map(figure => {
  const box = e => { const b = e.getBoundingClientRect();
                     return [b.left, b.top, b.right, b.bottom]; };
  return {drawing: box(figure), texts: [...figure.querySelectorAll('text')].filter(
    t => t.getClientRects().length).map(t => [t.textContent, ...box(t)])};
})
"""


def check_contrast(browser):
    """Check that all text stands out from its background, and lines from the paper."""
    texts = browser.evaluate(READ_TEXTS)
    assert len(texts) > 200
    for text, colour, behind, size in texts:
        assert contrast(rgb(colour), background(behind)) >= 4.5, (text, colour, behind)
        assert size >= 11, text
    paper = rgb(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    for stroke in set(browser.evaluate(READ_STROKES)):
        assert contrast(rgb(stroke), paper) >= 3, stroke


def check_letters(browser):
    """Check that no letters of a chart are cut off or overlap."""
    for chart in browser.evaluate(READ_BOXES):
        left, top, right, bottom = chart["drawing"]
        for text, *box in chart["texts"]:
            assert left <= box[0] < box[2] <= right + 0.5, text
            assert top <= box[1] < box[3] <= bottom + 0.5, text
        for (first, *a), (second, *b) in itertools.combinations(chart["texts"], 2):
            # The lines of letters touch, the letters do not.
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] + 4 or b[3] <= a[1] + 4
            assert apart, (first, second)


def check_width(browser, width):
    """Check that no window scrolls sideways; what is too wide scrolls by itself."""
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.evaluate("scrollTo(500, 0)")
    assert browser.evaluate("scrollX") == 0
    wide = browser.evaluate(
        "[...document.querySelectorAll('.scroll')].map(e => ["
        "e.scrollWidth > e.clientWidth, e.tabIndex, getComputedStyle(e).overflowX])"
    )
    # It can be focused for it.
    assert all(index == 0 and overflow == "auto" for _, index, overflow in wide)
    assert any(is_wide for is_wide, *_ in wide) == (width < 1280)
    # Names are not broken into letters to make room; the captions stay readable.
    heights = "[...document.querySelectorAll('tr')].map(e => e.clientHeight)"
    assert max(browser.evaluate(heights)) < 80
    for left, right in browser.evaluate(
        "[...document.querySelectorAll('caption span')].map(e => {"
        "const b = e.getBoundingClientRect(); return [b.left, b.right]; })"
    ):
        assert 0 <= left < right <= width


COMPLAINTS = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")


def test_the_page_is_readable_in_any_window_and_fetches_nothing(browser, page):
    for scheme, width in itertools.product(SCHEMES, (320, *WIDTHS)):
        browser.open(page, width, 900, scheme)
        check_contrast(browser)
        if width in WIDTHS:
            check_letters(browser)
        check_width(browser, width)
        urls = [url for url in browser.requested_urls() if not url.startswith("data:")]
        assert urls == [page.as_uri()]
        methods = {event["method"] for event in browser.events}
        assert methods.isdisjoint(COMPLAINTS), (scheme, width)


READ_FOCUS = """
(() => {
  const e = document.activeElement, s = getComputedStyle(e);
  const b = e.getBoundingClientRect();
  return [e.outerHTML.slice(0, 60), s.outlineStyle, parseFloat(s.outlineWidth) >= 2,
          b.bottom > 0 && b.top < innerHeight && b.left >= 0];
})()
"""
CAN_HAVE_FOCUS = """
[...document.querySelectorAll('a[href], [tabindex="0"]')].map(
  e => e.outerHTML.slice(0, 60))
"""


def test_tab_goes_to_every_chart_and_table_in_order_and_is_seen(browser, page):
    browser.open(page, 1280)
    wanted = browser.evaluate(CAN_HAVE_FOCUS)
    for element in wanted:
        browser.press("Tab", 9)
        assert browser.evaluate(READ_FOCUS) == [element, "solid", True, True]
    ids = re.findall(r'<figure id="([\w-]+)"', "\n".join(wanted))
    assert ids == [f"{key}-f" for key in CHARTS]
    assert sum("scroll" in element for element in wanted) == len(TABLES)
    # The first link leads to the results.
    browser.open(page, 1280)
    browser.press("Tab", 9)
    enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    browser.call("Input.dispatchKeyEvent", type="keyDown", **enter)
    assert browser.evaluate("document.activeElement.id") == "main"


REFERENCES_ARE_UNIQUE = """
(() => {
  const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
  const asked = ['aria-labelledby', 'aria-describedby'].flatMap(
    name => [...document.querySelectorAll(`[${name}]`)].flatMap(
      e => e.getAttribute(name).split(' ')));
  return new Set(ids).size === ids.length && asked.every(id => ids.includes(id));
})()
"""


def test_what_is_read_aloud_has_names(browser, page):
    browser.open(page, 1280)
    named = {}
    for node in browser.call("Accessibility.getFullAXTree")["nodes"]:
        if not node.get("ignored"):
            role = node["role"]["value"]
            named.setdefault(role, []).append(node.get("name", {}).get("value", ""))
    for role in ("figure", "image", "region", "table", "navigation", "heading"):
        names = named.get(role) or named.get(role[:3]) or named.get("img")
        assert names and all(names), (role, sorted(named))  # noqa: PT018
    assert len(named["main"]) == 1
    headings = "[...document.querySelectorAll('h1, h2, h3')].map(e => e.tagName)"
    first, *rest = browser.evaluate(headings)
    assert (first, set(rest)) == ("H1", {"H2"})
    assert browser.evaluate("document.documentElement.lang") == "en"
    assert browser.evaluate(REFERENCES_ARE_UNIQUE)


def test_the_command_is_on_the_page_and_strange_names_stay_text(browser, tmp_path):
    trace = make_synthetic_trace(30, seed=1)
    object.__setattr__(trace, "name", "<script>document.title='x'</script>&amp;\udc80")
    path = tmp_path / "odd.html"
    odd = plan_of(trace, ["lru"], [20])
    path.write_bytes(render_page(*odd, COMMAND).encode("utf-8", "replace"))
    browser.open(path, 360)
    assert browser.evaluate("document.querySelector('pre').innerText") == COMMAND
    title = "Host memory for <script>document.title='x'</script>&amp;?"
    assert browser.evaluate("document.querySelector('h1').innerText") == title
    assert browser.evaluate("document.title") == title
    assert browser.evaluate("document.querySelectorAll('script').length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    assert "NaN" not in path.read_text()


def test_the_page_is_the_same_each_time_well_formed_and_has_no_address(made, page):
    text = page.read_text(encoding="utf-8")
    assert render_page(*made, COMMAND) == text
    closed = re.sub(r"<((?:meta|link)\b[^>]*|wbr)>", r"<\1/>", text)
    ElementTree.fromstring(closed.removeprefix("<!doctype html>").strip())
    assert not re.search(r"https?:|//|url\(|@import|<script|<img|<iframe", text)


def test_labels_are_moved_apart_and_stay_in_order():
    rng = np.random.default_rng(0)
    for _ in range(200):
        heights = rng.uniform(14, 330, rng.integers(1, 9)).tolist()
        placed = spread(heights, 18, 14, 330)
        order = np.argsort(heights, kind="stable")
        assert (np.diff(np.array(placed)[order]) >= 18 - 1e-9).all()
        assert min(placed) >= 14 - 1e-9
        assert max(placed) <= 330 + 1e-9

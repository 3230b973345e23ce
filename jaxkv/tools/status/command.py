"""``jaxkv status``: what a running engine is doing, from its metrics."""

from __future__ import annotations

import dataclasses
import textwrap
import time
from typing import NoReturn

from jaxkv._util import one_line, time_text
from jaxkv.tools.files import JSON_OPTION, check_files, write_files
from jaxkv.tools.process import at_end
from jaxkv.tools.status.figures import Status, measure
from jaxkv.tools.status.scrape import NoAnswerError, Page, full_url, read_page
from jaxkv.tools.status.screen import Line, Screen, is_terminal, status_lines
from jaxkv.tools.usage import EXIT_OK, Args, Usage, number_from

SUMMARY = "show what a running engine is doing, from its metrics"

USAGE = Usage(
    "jaxkv status",
    "Read the metrics of a running engine, and show what it does: hits by tier, speed "
    "of transfers, waits, failures. On a terminal the screen is refreshed until an "
    "interrupt; elsewhere the figures of one interval are printed. The exit status is "
    "1 if the engine does not answer.",
    f"""
  URL  address of the metrics: http://HOST:PORT/metrics, HOST:PORT, or a PORT of this
      machine

output:
  --every X  seconds between two frames, and of the interval that rates are about
  --once  print the figures of one interval and end
{JSON_OPTION}
""",
    parsers={"--every": number_from(0.1, "of at least 0.1 and below 86400", 86_400)},
    defaults={"every": 2.0},
)


def run(args: Args) -> int:
    check_files(args)
    url = full_url(args.url)
    before = read_page(url)
    is_snapshot = args.once or args.format or args.output or args.json
    if is_terminal() and not is_snapshot:
        screen = Screen()
        with at_end(screen.close):
            try:
                _watch(screen, url, before, args.every)
            finally:
                screen.close()
    time.sleep(args.every)
    status = measure(before, read_page(url))
    lines = [*_head(url, status, _clock()), *status_lines(status)]
    print("\n".join(one_line(line.text) for line in lines))
    write_files(args, lambda: {"url": url, **dataclasses.asdict(status)})
    return EXIT_OK


def _watch(screen: Screen, url: str, page: Page, every_s: float) -> NoReturn:
    """Draw a frame for each interval, until the process ends."""
    frame = [Line(f"jaxkv status  {url}", "bold"), Line("reading the first interval")]
    answered_s, figures = page.time_s, list[Line]()
    while True:
        screen.draw(frame)
        time.sleep(every_s)
        try:
            after = read_page(url)
        except NoAnswerError as error:
            age = time_text(round(time.monotonic() - answered_s))
            # What was known last stays, but does not look current.
            old = [Line(line.text, "dim") for line in figures]
            reason = [f"no answer for {age}", *textwrap.wrap(str(error), screen.width)]
            head = [Line(text, "red") for text in reason]
            frame = [frame[0], *head, Line(""), *old]
            continue
        status = measure(page, after)
        page, answered_s, figures = after, after.time_s, status_lines(status)
        frame = [*_head(url, status, _clock()), *figures]


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def _head(url: str, status: Status, clock: str) -> list[Line]:
    engines = f"engine {', '.join(status.engines)}"
    policies = f"policy {', '.join(status.policies) or 'unknown'}"
    return [
        Line(f"jaxkv status  {url}", "bold"),
        Line(f"{clock}, {engines}, {policies}", "dim"),
        Line(""),
    ]

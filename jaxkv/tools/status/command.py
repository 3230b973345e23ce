"""``jaxkv status``: what a running engine is doing, from its metrics."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import NoReturn

from jaxkv._util import one_line, time_text
from jaxkv.tools.console import print_plain
from jaxkv.tools.files import JSON_OPTION, check_files, write_files
from jaxkv.tools.process import at_end
from jaxkv.tools.status.figures import Figures, measure, status_lines
from jaxkv.tools.status.scrape import NoAnswerError, Page, full_url, read_page
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
_WIDTH = 80


def run(args: Args) -> int:
    check_files(args)
    url = full_url(args.url)
    before = read_page(url)
    is_snapshot = args.once or args.format or args.output or args.json
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    if is_terminal and os.environ.get("TERM") != "dumb" and not is_snapshot:
        _watch(url, before, args.every)
    time.sleep(args.every)
    figures = measure(before, read_page(url))
    print_plain(_lines(url, figures))
    write_files(args, lambda: {"url": url, **figures})
    return EXIT_OK


def _watch(url: str, page: Page, every_s: float) -> NoReturn:
    """Draw a frame for each interval on a screen of its own, until the process ends."""
    frame = figures = [f"jaxkv status  {url}", "reading the first interval"]

    def close() -> None:  # The last frame stays on the terminal's previous screen.
        _write("\x1b[?25h\x1b[?1049l" + "".join(f"{one_line(t)}\n" for t in frame))

    _write("\x1b[?1049h\x1b[?25l\x1b[2J")
    with at_end(close):
        while True:
            _draw(frame)
            time.sleep(every_s)
            try:
                after = read_page(url)
            except NoAnswerError as error:
                age = time_text(round(time.monotonic() - page.time_s))
                why = textwrap.wrap(one_line(str(error)), _WIDTH)
                frame = [frame[0], f"! no answer for {age}", *why, "", *figures[2:]]
                continue
            frame = figures = _lines(url, measure(page, after))
            page = after


def _draw(lines: Sequence[str]) -> None:
    """Draw a frame in place, cut to the terminal's size, by one write."""
    columns, rows = shutil.get_terminal_size()
    texts = [one_line(line)[:columns] for line in lines[:rows]]
    texts[0] = f"\x1b[1m{texts[0]}\x1b[0m"
    red = [f"\x1b[31m{t}\x1b[0m" if t[:1] == "!" else t for t in texts]
    _write("\x1b[H" + "\x1b[K\n".join(red) + "\x1b[K\x1b[J")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _lines(url: str, figures: Figures) -> list[str]:
    about = [time.strftime("%H:%M:%S")]
    about += [f"engine {name}" for name in figures["engines"]]
    about += [f"policy {name}" for name in figures["policies"]]
    head = textwrap.wrap(", ".join(about), _WIDTH)[:2]
    return [f"jaxkv status  {url}", *head, "", *status_lines(figures)]

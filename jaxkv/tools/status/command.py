"""``jaxkv status``: what running engines are doing, from their metrics."""

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
from jaxkv.tools.files import OUTPUT_OPTIONS, check_files, write_files
from jaxkv.tools.process import at_end
from jaxkv.tools.status.figures import Figures, measure, status_lines
from jaxkv.tools.status.scrape import NoAnswerError, Page, full_url, read_page
from jaxkv.tools.usage import EXIT_FAILED, EXIT_OK, Args, Usage, number_from

USAGE = Usage(
    "jaxkv status",
    "Read the metrics of running engines, and show what each does: hits by tier, speed "
    "of transfers, waits, failures. On a terminal the screen is refreshed until an "
    "interrupt; elsewhere the figures of one interval are printed. The exit status is "
    "1 if an engine does not answer.",
    f"""
  URL...  addresses of metrics: http://HOST:PORT/metrics, HOST:PORT, or a PORT of this
      machine

output:
  --every X  seconds between two frames, and of the interval that rates are about
  --once  print the figures of one interval and end
{OUTPUT_OPTIONS}

examples:
  jaxkv status 8000
  jaxkv status host-a:8000 host-b:8000 --once --json status.json
""",
    parsers={"--every": number_from(0.1, "of at least 0.1 and below 86400", 86_400)},
    defaults={"every": 2.0},
)
_WIDTH = 80


class _Engine:
    """An engine: its last page of metrics, and the figures since the one before."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.figures: Figures | None = None
        self.lines = [f"jaxkv status  {url}", "reading the first interval"]
        self._page: Page | None = None
        self._seen_s = time.monotonic()
        self._last: list[str] = []

    def read(self) -> NoAnswerError | None:
        before, head = self._page, self.lines[0]
        try:
            self._page = read_page(self.url)
        except NoAnswerError as error:
            age = time_text(round(time.monotonic() - self._seen_s))
            why = textwrap.wrap(one_line(str(error)), _WIDTH)
            self.lines = [head, f"! no answer for {age}", *why, "", *self._last]
            return error
        self._seen_s = time.monotonic()
        if before is not None:
            figures = self.figures = measure(before, self._page)
            about = [time.strftime("%H:%M:%S")]
            about += [f"engine {name}" for name in figures["engines"]]
            about += [f"policy {name}" for name in figures["policies"]]
            named = textwrap.wrap(", ".join(about), _WIDTH)[:2]
            self._last = ["", *status_lines(figures)]
            self.lines = [head, *named, *self._last]
        return None


def run(args: Args) -> int:
    check_files(args)
    engines = [_Engine(full_url(text)) for text in args.url]
    errors = [engine.read() for engine in engines]
    if all(errors) and errors[0]:
        raise errors[0]
    is_snapshot = args.once or args.format or args.output or args.json
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    if is_terminal and os.environ.get("TERM") != "dumb" and not is_snapshot:
        _watch(engines, args.every)
    time.sleep(args.every)
    errors = [engine.read() for engine in engines]
    if all(errors) and errors[0]:
        raise errors[0]
    print_plain(_lines(engines))
    rows = [{"url": engine.url, **(engine.figures or {})} for engine in engines]
    write_files(args, lambda: rows[0] if len(rows) == 1 else {"rows": rows})
    return EXIT_FAILED if any(errors) else EXIT_OK


def _lines(engines: Sequence[_Engine]) -> list[str]:
    return "\n\n".join("\n".join(engine.lines) for engine in engines).split("\n")


def _watch(engines: Sequence[_Engine], every_s: float) -> NoReturn:
    """Draw a frame for each interval on a screen of its own, until the process ends."""

    def close() -> None:  # The last frame stays on the terminal's previous screen.
        text = "".join(f"{one_line(line)}\n" for line in _lines(engines))
        _write(f"\x1b[?25h\x1b[?1049l{text}")

    _write("\x1b[?1049h\x1b[?25l\x1b[2J")
    with at_end(close):
        while True:
            _draw(_lines(engines))
            time.sleep(every_s)
            for engine in engines:
                engine.read()


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

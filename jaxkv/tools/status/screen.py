"""The figures of an engine as lines, and a screen that shows the newest ones."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from jaxkv._util import one_line, rounded_size, three_digits, time_text
from jaxkv.tools.status.figures import Status, Times, Transfers

Style: TypeAlias = Literal["", "bold", "dim", "red"]

_CODES: dict[Style, str] = {"bold": "\x1b[1m", "dim": "\x1b[2m", "red": "\x1b[31m"}
WIDTH = 80
_BAR_CELLS = 24
_LABEL_CELLS = 22
_UNKNOWN = "-"


class Line(NamedTuple):
    """A line of the screen."""

    text: str
    style: Style = ""


def is_terminal() -> bool:
    """Whether the output is a terminal that can be redrawn; it may be closed."""
    is_tty = sys.stdout is not None and sys.stdout.isatty()
    return is_tty and os.environ.get("TERM") != "dumb"


def status_lines(status: Status) -> list[Line]:
    """Write an engine's figures, at most `WIDTH` characters a line."""
    recent = f"last {status.interval_s:.1f} s"
    if status.has_restarted:
        recent = "since restart"
    new, total = status.tokens, status.tokens_since_start
    lines = [Line(_row("tokens of new requests", recent, "since start"), "bold")]
    for name, share, share_of_all in (
        ("on the device", new.device_share, total.device_share),
        ("from the host", new.host_share, total.host_share),
        ("computed", new.computed_share, total.computed_share),
    ):
        text = f"{_bar(share)} {_percent(share):>6}"
        lines.append(Line(_row(f"  {name}", text, _percent(share_of_all))))
    rate = f"{_number(new.num / status.interval_s)}/s"
    lines += [Line(_row("  tokens", rate, _number(total.num))), Line("")]

    lines.append(Line(_row("transfers", "stores", "loads"), "bold"))
    for name, *texts in zip(
        ("  speed", "  blocks", "  in flight", "  blocks waiting"),
        _transfer_texts(status.stores),
        _transfer_texts(status.loads),
        strict=True,
    ):
        if texts != [_UNKNOWN, _UNKNOWN] or "wait" not in name:
            lines.append(Line(_row(name, *texts)))
    lines.append(Line(""))

    lines += _host_lines(status)
    for name, times in (
        ("a load waits", status.load_waits),
        ("a deferred lookup", status.deferrals),
    ):
        text = _times(times)
        if times.num:
            text += f", {_per_second(times.num / status.interval_s)}"
        lines.append(Line(_fact(name, text)))
    cost = _times(status.lookups)
    if status.lookups.num:
        share = status.lookups.total_s / status.interval_s
        cost += f", {_percent(share)} of the time"
    lines += [Line(_fact("step cost: a lookup", cost)), *_store_lines(status)]
    return [*lines, *_failure_lines(status)]


def _row(name: str, middle: str, last: str) -> str:
    return f"{name:<{_LABEL_CELLS}}{middle:>{_BAR_CELLS + 7}}{last:>20}"


def _fact(name: str, text: str) -> str:
    return f"{name:<{_LABEL_CELLS}}{text}"


def _bar(share: float | None) -> str:
    """Draw a share from 0 to 1."""
    encoding = getattr(sys.stdout, "encoding", None) or ""
    full, empty = "█░" if "utf" in encoding.lower() else "#."
    num = 0 if share is None else round(_BAR_CELLS * min(share, 1.0))
    return full * num + empty * (_BAR_CELLS - num)


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{100 * share:.1f}%"


def _number(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,.0f}" if value == int(value) else three_digits(value)


def _per_second(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{_number(value)}/s"


def _transfer_texts(transfers: Transfers) -> list[str]:
    speed = transfers.bytes_per_s
    return [
        _UNKNOWN if speed is None else f"{rounded_size(speed)}/s",
        _per_second(transfers.blocks_per_s),
        _number(transfers.num_in_flight),
        _number(transfers.num_blocks_waiting),
    ]


def _times(times: Times) -> str:
    if times.mean_s is None:
        return "none"
    p95 = "5% off the scale"
    if times.p95_s is not None:
        p95 = f"95% within {time_text(times.p95_s)}"
    return f"mean {time_text(times.mean_s)}, {p95}"


def _host_lines(status: Status) -> list[Line]:
    held, num_blocks = status.host_blocks_held, status.host_blocks
    if held is None or not num_blocks:
        return [Line(_fact("host tier", "in another process"))]
    text = f"{_bar(held / num_blocks)} {_percent(held / num_blocks):>6}"
    if status.host_bytes is not None:
        text += f" of {rounded_size(status.host_bytes)}"
    blocks = f"{_number(held)} of {_number(num_blocks)}"
    blocks += f", {_per_second(status.host_blocks_evicted_per_s)} evicted"
    return [Line(_fact("host tier", text)), Line(_fact("  blocks", blocks))]


def _store_lines(status: Status) -> list[Line]:
    store = status.store
    if store is None:
        return []
    phrases = [{True: "up", False: "DOWN", None: "unknown"}[store.is_up]]
    if store.num_blocks and store.num_blocks_held is not None:
        phrases.append(f"{_percent(store.num_blocks_held / store.num_blocks)} full")
    phrases += [
        f"{_per_second(store.blocks_written_per_s)} written",
        f"{_per_second(store.blocks_fetched_per_s)} fetched",
    ]
    style: Style = "red" if store.is_up is False else ""
    return [Line(_fact("store", ", ".join(phrases)), style)]


def _failure_lines(status: Status) -> list[Line]:
    phrases = []
    for what, failures in status.failures.items():
        if failures.since_start or what == "loads":
            new = f" (+{_number(failures.new)})" if failures.new else ""
            phrases.append(f"{what} {_number(failures.since_start)}{new}")
    has_new = any(failures.new for failures in status.failures.values())
    style: Style = "red" if has_new else ""
    texts = textwrap.wrap(", ".join(phrases) or _UNKNOWN, WIDTH - _LABEL_CELLS)
    names = ["failures", *[""] * (len(texts) - 1)]
    return [
        Line(_fact(name, text), style) for name, text in zip(names, texts, strict=True)
    ]


class Screen:
    """A whole terminal, redrawn in place by one write for each frame."""

    def __init__(self) -> None:
        self._lines: Sequence[Line] = ()
        self._write("\x1b[?1049h\x1b[?25l\x1b[2J")  # Another screen, without cursor.
        self._is_open = True

    @property
    def width(self) -> int:
        """The characters of a line to write."""
        return min(WIDTH, shutil.get_terminal_size().columns)

    def draw(self, lines: Sequence[Line]) -> None:
        """Draw a frame, cut to the terminal's size."""
        self._lines = lines
        columns, rows = shutil.get_terminal_size()
        texts = [_coloured(Line(text[:columns], style)) for text, style in lines[:rows]]
        self._write("\x1b[H" + "\x1b[K\n".join(texts) + "\x1b[K\x1b[J")

    def close(self) -> None:
        """Return to the terminal's previous screen, and leave the last frame there."""
        if self._is_open:
            self._is_open = False
            texts = map(_coloured, self._lines)
            self._write("\x1b[?25h\x1b[?1049l" + "".join(f"{t}\n" for t in texts))

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _coloured(line: Line) -> str:
    text = one_line(line.text)  # Without escape sequences of the engine's labels.
    return f"{_CODES[line.style]}{text}\x1b[0m" if line.style else text

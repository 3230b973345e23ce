"""A real headless browser, driven over Chromium's own protocol by two pipes.

Any Chromium will do: one that JAXKV_TEST_BROWSER names, one on PATH, or what
`playwright install chromium` has put into the user's cache folder.
"""

import base64
import io
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np

VARIABLE = "JAXKV_TEST_BROWSER"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
NAMES += ("google-chrome", "google-chrome-stable")
CACHED = (
    "chromium_headless_shell-*/*/headless_shell",
    "chromium_headless_shell-*/*/chrome-headless-shell",
    "chromium-*/*/chrome",
)
# The browser reads from 3 and writes to 4, which either pipe may have.
LAUNCH = (
    "import os, sys; from fcntl import F_DUPFD_CLOEXEC as UP, fcntl;"
    "r, w = (fcntl(int(fd), UP, 5) for fd in sys.argv[1:3]);"
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
# It waits for disks, GPUs and other machines as little as can be.
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--force-color-profile=srgb"),
    "--hide-scrollbars",
)


def find_browser():
    if program := os.environ.get(VARIABLE):
        return program
    for name in NAMES:
        if program := shutil.which(name):
            return program
    folder = os.environ.get("PLAYWRIGHT_BROWSERS_PATH", "~/.cache/ms-playwright")
    cache = pathlib.Path(folder).expanduser()
    for pattern in CACHED:
        for program in sorted(cache.glob(pattern)):
            return str(program)
    return None


class Browser:
    """A browser with one page, to be used in a `with`."""

    def __init__(self, program, timeout_s=60):
        self._program = program
        self._timeout_s = timeout_s
        self._buffer = b""
        self._number = 0
        self._session = None
        self.events = []

    def __enter__(self):
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", LAUNCH, str(to_read), str(to_write)),
                *(self._program, *FLAGS, f"--user-data-dir={self._home.name}"),
            ],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "Accessibility"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._home.cleanup()

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def open(self, path, width, height=900, scheme="light"):
        """Open a file or an address in a window, with a light or dark system."""
        self.events.clear()
        self.resize(width, height)
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        is_address = isinstance(path, str) and "://" in path
        url = path if is_address else pathlib.Path(path).resolve().as_uri()
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + self._timeout_s
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            assert time.monotonic() < deadline, "the page was not loaded"
            self.events.append(self._receive())

    def requested_urls(self):
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def resize(self, width, height=900):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, expression):
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key, code):
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
            )

    def screenshot(self, whole=True):
        """Return the page as u8[height, width, 3] and as a PNG."""
        data = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )["data"]
        # Slow to import.
        import matplotlib.image

        png = base64.b64decode(data)
        pixels = matplotlib.image.imread(io.BytesIO(png))
        return np.round(255 * pixels[..., :3]).astype(np.uint8), png

    def _receive(self):
        deadline = time.monotonic() + self._timeout_s
        while b"\0" not in self._buffer:
            left = max(deadline - time.monotonic(), 0)
            assert select.select([self._in], [], [], left)[0], "no answer in time"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

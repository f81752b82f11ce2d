"""A page in Chromium, driven through two pipes by its own protocol: no library is needed.

    with Browser() as browser:
        page = browser.open("docs/live.html#lang=zh", 390, 844)
        page.run("document.title")
"""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--remote-debugging-pipe", "about:blank",
]  # fmt: skip
PROBLEMS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """Chromium reads orders from its file 3, and writes replies and events to its file 4."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        orders, self.orders = os.pipe()
        replies, written = os.pipe()
        self.replies = os.fdopen(replies, "rb")

        pipes = f'exec "$@" 10<&{orders} 11>&{written} 3<&10 4>&11'
        chromium = [CHROMIUM, f"--user-data-dir={self.folder.name}", *FLAGS]
        self.process = subprocess.Popen(
            ["bash", "-c", pipes, "bash", *chromium], pass_fds=(orders, written),
            stderr=subprocess.DEVNULL)
        os.close(orders)
        os.close(written)
        self.numbers = itertools.count(1)
        self.events = []
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.orders)
        self.replies.close()
        self.folder.cleanup()

    def ask(self, method, session=None, **params):
        """Sends an order and returns its reply. What happened in between is in `events`."""
        number = next(self.numbers)
        order = {"id": number, "method": method, "params": params}
        if session:
            order["sessionId"] = session
        os.write(self.orders, json.dumps(order).encode() + b"\0")
        while True:
            message = self.read()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def read(self):
        text = bytearray()
        while (byte := self.replies.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            text += byte
        return json.loads(text)

    def problems(self):
        """All that its pages have thrown or written to the console."""
        return [event for event in self.events if event["method"] in PROBLEMS]

    def open(self, address, width, height):
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, address, width, height)


class Page:
    """A page from a file://. Its address may end with # and settings."""

    def __init__(self, browser, session, address, width, height):
        self.browser, self.session = browser, session
        for part in ("Page", "Runtime", "Log"):
            self.ask(f"{part}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        path, _, settings = address.partition("#")
        self.ask("Page.navigate", url=f"{Path(path).resolve().as_uri()}#{settings}")
        self.wait("document.readyState === 'complete'", 20)

    def ask(self, method, **params):
        return self.browser.ask(method, self.session, **params)

    def run(self, code):
        """The value of an expression in the page, as JSON can hold it."""
        reply = self.ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, code, seconds):
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({code})"):
            assert time.monotonic() < end, f"not within {seconds} s: {code}"
            time.sleep(0.1)

    def click(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

"""A real browser without a window, driven over its own debugging pipe; needs nothing but it."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FOUND = next((path for path in map(shutil.which, NAMES) if path), None)
"""The browser of this machine, or None."""
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
# The browser reads commands from 3 and writes to 4; both ends may have these numbers already.
HAND_OVER = (
    "import fcntl, os, sys\n"
    "ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]\n"
    "os.dup2(ends[0], 3), os.dup2(ends[1], 4)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)


class Browser:
    """One page of a browser of its own."""

    def __init__(self, folder, width=1200, height=800):
        root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        theirs, self._write = os.pipe()
        self._read, out = os.pipe()
        command = [FOUND, *FLAGS, *root, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", HAND_OVER, str(theirs), str(out), *command],
            pass_fds=(theirs, out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs), os.close(out)
        self._count, self._rest, self._session = 0, b"", None
        self.events = []
        """(method, params) of everything that the page told."""
        (page,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def call(self, method, seconds=20.0, **params):
        """The result of a command of the protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + seconds
        while True:
            for answer in self._messages(end - time.monotonic()):
                if answer.get("id") == self._count:
                    assert "error" not in answer, (method, answer["error"])
                    return answer["result"]

    def _messages(self, seconds):
        ready, _, _ = select.select([self._read], [], [], max(0.0, seconds))
        assert ready, "the browser does not answer"
        data = os.read(self._read, 1 << 16)
        assert data, "the browser has gone"
        *whole, self._rest = (self._rest + data).split(b"\0")
        found = [json.loads(one) for one in whole]
        self.events += [(one["method"], one["params"]) for one in found if "method" in one]
        return [one for one in found if "id" in one]

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in result, (script, result["exceptionDetails"])
        return result["result"].get("value")

    def until(self, script, seconds=20.0):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"it did not happen: {script}"
            time.sleep(0.02)

    def open(self, url):
        """Load a page whose scripts are deferred."""
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def type(self, where, text):
        """Put a text into a field."""
        self.run(f"document.querySelector({json.dumps(where)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key, **more):
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    def at(self, where):
        """The middle of an element's first line, after scrolling there."""
        return self.run(
            f"(() => {{ const e = {where}; e.scrollIntoView({{ block: 'center' }});"
            " const r = e.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )

    def point(self, x, y):
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, where):
        """Click an element, given as an expression."""
        x, y = self.at(where)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def size(self, width, height):
        """Show so much of the page, in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def dark(self, on):
        """Prefer dark colours, or light ones."""
        value = "dark" if on else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def shoot(self, path):
        """Save what is seen as a picture."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self):
        """Errors and warnings of the page so far."""
        out = []
        for method, params in self.events:
            if method == "Runtime.exceptionThrown":
                out.append(params["exceptionDetails"].get("exception", {}).get("description", "?"))
            if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                out.append(params["entry"]["text"])
            if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                out.append(str(params["args"]))
        return out

    def requests(self):
        """Addresses that the page asked for."""
        return [
            params["request"]["url"]
            for method, params in self.events
            if method == "Network.requestWillBeSent"
        ]

    def close(self):
        """End the browser."""
        self._session = None
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close", seconds=5)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write), os.close(self._read)

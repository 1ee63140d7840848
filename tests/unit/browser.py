"""A real Chromium without a window, driven over a pipe (the DevTools protocol)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BINARY = next(
    (
        path
        for name in ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)

_TIMEOUT_S = 60.0


class Page:
    """One page of a browser of its own.

    ``complaints`` are uncaught errors and what the console was told as a warning or an error;
    ``requests`` are the addresses that were asked for.
    """

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None
        read_end, to_browser = os.pipe()
        from_browser, write_end = os.pipe()

        def ends() -> None:  # the protocol's pipes are file descriptors 3 and 4
            kept = os.dup(read_end), os.dup(write_end)
            for fd, own in zip((3, 4), kept, strict=True):
                os.dup2(own, fd)

        self._process = subprocess.Popen(
            [
                BINARY,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                "--remote-debugging-pipe",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=ends,
            close_fds=False,
        )
        os.close(read_end)
        os.close(write_end)
        self._to, self._from, self._buffer, self._count = to_browser, from_browser, b"", 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and give its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        own = self._count
        found = self._read(lambda m: m.get("id") == own)
        assert "error" not in found, found["error"]
        result: dict[str, Any] = found["result"]
        return result

    def _read(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end = time.monotonic() + _TIMEOUT_S
        while True:
            while b"\0" not in self._buffer:
                ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
                assert ready, "the browser does not answer"
                self._buffer += os.read(self._from, 1 << 16)
            text, _, self._buffer = self._buffer.partition(b"\0")
            message: dict[str, Any] = json.loads(text)
            self._note(message.get("method", ""), message.get("params", {}))
            if wanted(message):
                return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", str(details)))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error"):
            self.complaints.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def size(self, width: int, height: int) -> None:
        """Set the size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, path: Path, width: int = 1280, height: int = 900) -> None:
        """Load a file and wait until it is complete."""
        self.size(width, height)
        self.requests.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._read(lambda m: m.get("method") == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of the last expression of a script in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, replMode=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression holds in the page: what it draws follows events."""
        end = time.monotonic() + 5.0
        while not self.run(condition):
            assert time.monotonic() < end, f"never: {condition}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def dark(self, on: bool) -> None:
        """Prefer dark or light colours, as a system does."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save what is to be seen, or the whole page, as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(data["data"]))

    def paper(self, path: Path) -> None:
        """Save the printed page as PDF."""
        data = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        path.write_bytes(base64.b64decode(data["data"]))

"""A headless Chromium driven over a pipe by the DevTools protocol: no port, no library."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    """Return the browser's path, if one is installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((p for p in map(shutil.which, names) if p), None)


class Chromium:
    """One browser; ``page`` opens a file in it."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # The protocol wants descriptors 3 and 4.
        wrapper = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", wrapper, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._next = 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, params: dict[str, Any] | None = None, session: str = "") -> Any:
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(60)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def drain(self, seconds: float) -> None:
        """Collect what the browser says within a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                self.events.append(self._receive(left))
            except TimeoutError:
                return

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser has gone")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(line))

    def page(
        self,
        path: Path,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        fragment: str = "",
    ) -> Page:
        address = path.resolve().as_uri() + (f"#{fragment}" if fragment else "")
        return Page(self, address, width, height, dark)

    def open(self, address: str, *, width: int = 1280, height: int = 900) -> Page:
        return Page(self, address, width, height, dark=False)


class Page:
    """An address opened in a tab, with everything it logged and asked for."""

    def __init__(
        self, browser: Chromium, address: str, width: int, height: int, dark: bool
    ) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._target = target
        attached = browser.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Security"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        started = time.monotonic()
        self.call("Page.navigate", {"url": address})
        while not self.evaluate("window.fragdoctor?.ready === true"):
            if time.monotonic() - started > 60:
                raise TimeoutError("the page does not become ready")
            time.sleep(0.02)
        self.settle()

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        return self._browser.call(method, params, self._session)

    def evaluate(self, expression: str) -> Any:
        result = self.call(
            "Runtime.evaluate",
            {"expression": expression, "returnByValue": True, "awaitPromise": True},
        )
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:2000])
        return result["result"].get("value")

    def settle(self) -> None:
        """Wait until two frames are drawn."""
        self.evaluate(
            "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))"
        )

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + 20
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}")
            self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        left = {"button": "left", "clickCount": 1}
        self.mouse("mousePressed", *start, **left)
        for i in range(1, 6):
            x, y = (a + (b - a) * i / 5 for a, b in zip(start, stop, strict=True))
            self.mouse("mouseMoved", x, y, button="left", buttons=1)
        self.mouse("mouseReleased", *stop, **left)
        self.settle()

    def key(self, key: str, code: str = "") -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", {"type": kind, "key": key, "code": code or key, **text}
            )
        self.settle()

    def box(self, selector: str) -> dict[str, float]:
        """Return the place of an element in the window, scrolled into view."""
        found = json.dumps(selector)
        return dict(
            self.evaluate(
                f"(() => {{ const e = document.querySelector({found}); "
                "document.documentElement.style.scrollBehavior = 'auto'; "
                "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
                "return {x: r.x, y: r.y, width: r.width, height: r.height}; })()"
            )
        )

    def _events(self, method: str) -> list[dict[str, Any]]:
        self._browser.drain(0.1)
        return [
            e["params"]
            for e in self._browser.events
            if e.get("method") == method and e.get("sessionId") == self._session
        ]

    def complaints(self) -> list[str]:
        """Return console errors and warnings, uncaught exceptions, policy violations."""
        logged = [e["entry"] for e in self._events("Log.entryAdded")]
        said = self._events("Runtime.consoleAPICalled")
        return [
            *(f"{e['level']}: {e['text']}" for e in logged),
            *(json.dumps(e["args"]) for e in said if e["type"] in {"error", "warning", "assert"}),
            *(json.dumps(e["exceptionDetails"]) for e in self._events("Runtime.exceptionThrown")),
        ]

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for, itself excluded."""
        asked = [e["request"]["url"] for e in self._events("Network.requestWillBeSent")]
        return [u for u in asked if not u.startswith("data:")][1:]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", {"targetId": self._target})

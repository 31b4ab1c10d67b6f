"""A small client of Chromium: the DevTools protocol over its pipe, as much as the tests need."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0


class Browser:
    """One Chromium without a window, with one tab. What its console says is in `messages`."""

    def __init__(self, path: str) -> None:
        self._home = tempfile.mkdtemp(prefix="replaylake-chromium-")
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()

        def connect_pipes() -> None:
            # Chromium reads commands from descriptor 3 and writes answers to 4.
            source, sink = (
                fcntl.fcntl(to_child, fcntl.F_DUPFD, 10),
                fcntl.fcntl(from_child, fcntl.F_DUPFD, 10),
            )
            os.dup2(source, 3)
            os.dup2(sink, 4)

        self._process = subprocess.Popen(
            [
                path,
                "--headless=new",
                "--remote-debugging-pipe",
                f"--user-data-dir={self._home}",
                "--no-sandbox",  # tests may run as root, and open pages of ours alone
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--hide-scrollbars",
                "--no-first-run",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home},
            preexec_fn=connect_pipes,
            close_fds=False,
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.messages: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the process and remove its files."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._home, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        message = self._exchange(method, parameters)
        assert "error" not in message, (method, message)
        result: dict[str, Any] = message["result"]
        return result

    def _exchange(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Send a command and return the answer to it, which may be an error."""
        self._number += 1
        number = self._number
        body: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None and not method.startswith("Target."):
            body["sessionId"] = self._session
        os.write(self._write, json.dumps(body).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            message = self._receive(deadline)
            if message.get("id") == number:
                return message
            self._events.append(message)

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window in CSS pixels, and the color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        # Without motion: in the middle of a transition, colors are those of neither state.
        values = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce",
        }
        features = [{"name": name, "value": value} for name, value in values.items()]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Open an address and wait until all of it is loaded."""
        self._take_events()
        self.call("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")
        # The script runs before the load event; what it draws, in the frame after.
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")

    def wait_for_frames(self) -> None:
        """Wait until what has changed is drawn, and what is drawn in the frame after that."""
        two = "requestAnimationFrame(() => requestAnimationFrame(done))"
        self.run(f"new Promise(done => {two})")

    def run(self, script: str) -> Any:
        """Evaluate JavaScript and return its value; a promise is waited for."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_until(self, script: str, seconds: float = 60.0) -> None:
        """Wait until JavaScript is true.

        While a page takes the place of another, there may be nothing that it could be asked of.
        """
        parameters = {"expression": f"Boolean({script})", "returnByValue": True}
        deadline = time.monotonic() + seconds
        while True:
            message = self._exchange("Runtime.evaluate", parameters)
            result = message.get("result", {})
            if "exceptionDetails" not in result and result.get("result", {}).get("value"):
                return
            assert time.monotonic() < deadline, f"not after {seconds} s: {script}: {message}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click the first element of a selector, as a pointer would: in its middle."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=place[0],
                y=place[1],
                button="left",
                clickCount=1,
            )

    def follow(self, selector: str) -> None:
        """Click what leads to another page, and wait until that is loaded."""
        self._take_events()
        self.click(selector)
        self._wait_for("Page.loadEventFired")
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")

    def type_text(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key, by its name in KeyboardEvent.key; modifiers: 2 is Ctrl."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowDown": 40, "ArrowRight": 39}
        code = codes.get(key, ord(key.upper()[0]))
        text = "\r" if key == "Enter" and not modifiers else ""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
                modifiers=modifiers,
            )

    def save_picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of what the window shows; `whole` of the whole page."""
        size = {}
        if whole:
            box = self.call("Page.getLayoutMetrics")["cssContentSize"]
            size = {"clip": {**box, "x": 0, "y": 0, "scale": 1}, "captureBeyondViewport": True}
        data = self.call("Page.captureScreenshot", format="png", **size)["data"]
        path.write_bytes(base64.b64decode(data))

    def take_messages(self) -> list[str]:
        """Return errors and warnings of the console since the last call, with refused requests."""
        self.run("0")
        self._take_events()
        taken, self.messages = self.messages, []
        return taken

    def _wait_for(self, method: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            for event in self._take_events():
                if event.get("method") == method:
                    return
            self._events.append(self._receive(deadline))

    def _take_events(self) -> list[dict[str, Any]]:
        taken, self._events = self._events, []
        for event in taken:
            self._note(event)
        return taken

    def _note(self, event: dict[str, Any]) -> None:
        method, body = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(body["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and body["type"] in ("error", "warning"):
            self.messages.append(json.dumps(body["args"])[:500])
        elif method == "Log.entryAdded" and body["entry"]["level"] in ("error", "warning"):
            self.messages.append(f"{body['entry']['text']} {body['entry'].get('url', '')}")

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"Chromium said nothing for {_TIMEOUT_S} s"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

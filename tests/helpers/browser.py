"""Drive a headless Chromium through chromedriver: WebDriver is JSON over HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

BINARY, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = (
    "chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
ELEMENT = (
    "element-6066-11e4-a52e-4f735466cecf"  # the protocol's own name for a reference to an element
)


class BrowserError(Exception):
    """An error that chromedriver returned."""


class Browser:
    """One browser window, which must be closed."""

    def __init__(
        self, profile: Path, width: int = 1280, height: int = 1000, flags: tuple[str, ...] = ()
    ) -> None:
        self.driver = subprocess.Popen(
            [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.session = ""
        try:
            self.address = f"http://127.0.0.1:{self._port()}"
            options = {
                "binary": BINARY,
                "args": [
                    *FLAGS,
                    *flags,
                    f"--user-data-dir={profile}",
                    f"--window-size={width},{height}",
                ],
            }
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self.session = f"/session/{answer['sessionId']}"
        except BaseException:
            self.close()
            raise

    def _port(self) -> int:
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            if "started successfully on port" in line:
                return int(line.rstrip(". \n").rsplit(" ", 1)[1])
        raise BrowserError("chromedriver did not start")

    def _ask(self, verb: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + self.session + path,
            content,
            {"Content-Type": "application/json"},
            method=verb,
        )
        # ignore proxies of the environment
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            answer = json.load(error)["value"]
            raise BrowserError(f"{answer['error']}: {answer['message']}") from None

    def open(self, page: Path) -> None:
        self._ask("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the value of the body of a JavaScript function."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def command(self, name: str, **parameters: Any) -> Any:
        """Run a command of Chromium's DevTools protocol, e.g. emulated media."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def find(self, selector: str) -> Any:
        return self._ask("POST", "/element", {"using": "css selector", "value": selector})

    def click(self, selector: str) -> None:
        self._ask("POST", f"/element/{self.find(selector)[ELEMENT]}/click", {})

    def text(self, selector: str) -> str:
        return str(self._ask("GET", f"/element/{self.find(selector)[ELEMENT]}/text"))

    def keys(self, *keys: str) -> None:
        """Press and release keys on the focused element."""
        presses = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask(
            "POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": presses}]}
        )

    def pointer(self, *moves: tuple[str, float, float] | str) -> None:
        """Run pointer actions in order: ("move", x, y), "down" or "up"."""
        acts: list[dict[str, Any]] = []
        for move in moves:
            if move == "down" or move == "up":
                acts.append({"type": f"pointer{str(move).title()}", "button": 0})
            else:
                acts.append(
                    {
                        "type": "pointerMove",
                        "x": round(float(move[1])),
                        "y": round(float(move[2])),
                        "duration": 0,
                    }
                )
        mouse = {
            "type": "pointer",
            "id": "mouse",
            "parameters": {"pointerType": "mouse"},
            "actions": acts,
        }
        self._ask("POST", "/actions", {"actions": [mouse]})

    def wheel(self, x: float, y: float, down: int) -> None:
        act = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": down}
        self._ask(
            "POST", "/actions", {"actions": [{"type": "wheel", "id": "wheel", "actions": [act]}]}
        )

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console since the last call."""
        return [
            entry["message"]
            for entry in self._ask("POST", "/se/log", {"type": "browser"})
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def paper(self) -> bytes:
        """Return the page as PDF."""
        return base64.b64decode(
            self._ask(
                "POST", "/print", {"background": True, "page": {"width": 21.0, "height": 29.7}}
            )
        )

    def close(self) -> None:
        if self.session:
            with suppress(BrowserError, OSError):
                self._ask("DELETE", "")
        self.driver.terminate()
        try:
            self.driver.wait(10)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            self.driver.wait()

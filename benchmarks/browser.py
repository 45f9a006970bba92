"""Controls headless Chromium over its DevTools protocol, for the measurements of the live page."""

import asyncio
import base64
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome-headless-shell")
_START_S = 60.0
_ANSWER_S = 60.0
_END_S = 10.0
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowRight": (39, "")}


def find_chromium(given: str = "") -> str | None:
    """The browser: the given one, that of `$CHROMIUM`, or one of its usual names; None: there is none."""
    wanted = given or os.environ.get("CHROMIUM", "")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, NAMES)), None)


class BrowserPage:
    """One page of a browser.

    Attributes:
        errors: exceptions of its scripts, and errors of its console and of the browser.
        requests: addresses that it has requested.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def open(self, address: str, *, width: int = 1280, height: int = 1000) -> None:
        """Open an address; returns when its scripts have run."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.ask(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.ask("Emulation.setDeviceMetricsOverride", **size)
        await self.ask("Page.navigate", url=address)
        await self.wait_for(f"document.readyState === 'complete' && location.href === {json.dumps(address)}")

    async def ask(self, method: str, **params: object) -> dict[str, Any]:
        """Send a command, and return its result. Raises `RuntimeError` if the browser refuses it."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, _ANSWER_S)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        result: dict[str, Any] = said["result"]
        return result

    async def look(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        said = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in said:
            raise RuntimeError(f"{expression}: {said['exceptionDetails']}")
        return said["result"].get("value")

    async def wait_for(self, expression: str, *, within: float = 120.0, every: float = 0.02) -> Any:
        """Wait until an expression is true, and return its value. Raises `TimeoutError`."""
        deadline = time.monotonic() + within
        while not (value := await self.look(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} did not become true within {within:g} s")
            await asyncio.sleep(every)
        return value

    async def press(self, *keys: str) -> None:
        """Press and release these keys, one after the other."""
        for key in keys:
            code, text = _KEYS[key]
            about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            await self.ask("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
            await self.ask("Input.dispatchKeyEvent", type="keyUp", **about)

    async def write(self, text: str) -> None:
        """Type into the focused field."""
        await self.ask("Input.insertText", text=text)

    async def use_scheme(self, scheme: str) -> None:
        """Set the color scheme: `light` or `dark`."""
        await self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, path: Path) -> None:
        """Write a picture of the page as a PNG."""
        path.write_bytes(base64.b64decode((await self.ask("Page.captureScreenshot", format="png"))["data"]))

    async def close(self) -> None:
        """Stop listening to the browser."""
        await self._socket.close()
        await self._reading

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            params = said.get("params", {})
            match said.get("method"):
                case None:
                    self._waiting.pop(said["id"]).set_result(said)
                case "Runtime.exceptionThrown":
                    details = params["exceptionDetails"]
                    self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    self.errors.append(str(params["entry"]["text"]))
                case "Network.requestWillBeSent":
                    self.requests.append(str(params["request"]["url"]))
                case _:
                    pass
        for answer in self._waiting.values():
            answer.set_exception(ConnectionError("the browser has gone"))


@asynccontextmanager
async def chromium(program: str) -> AsyncIterator[BrowserPage]:
    """A browser with one empty page; the browser and its profile are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="regrow-browser-", ignore_cleanup_errors=True) as profile:
        words = ["--headless", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run"]
        words += ["--disable-gpu", "--hide-scrollbars", "--disable-background-networking", "about:blank"]
        if os.geteuid() == 0:
            words.append("--no-sandbox")  # its sandbox refuses root
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(program, *words, stdout=nothing, stderr=pipe)
        try:
            address = await asyncio.wait_for(_listening(process), _START_S)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{address}/json/list") as answer:
                    page = next(each for each in await answer.json(content_type=None) if each["type"] == "page")
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    opened = BrowserPage(socket)
                    yield opened
                    await opened.close()
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.communicate(), _END_S)
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def _listening(process: asyncio.subprocess.Process) -> str:
    """`HOST:PORT` of its DevTools."""
    said = b""
    while process.stderr is not None and (line := await process.stderr.readline()):
        said += line
        if found := re.search(rb"DevTools listening on ws://([^/]+)/", line):
            return found[1].decode()
    raise RuntimeError(f"the browser did not start: {said.decode(errors='replace')[-2000:]}")

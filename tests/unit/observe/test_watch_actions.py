"""The live page acts only for who has the job's token, and only where a page of its own asks."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources

import aiohttp
import pytest
from aiohttp import web

from regrow.core.net import same_secret
from regrow.observe.watch import acting
from regrow.observe.watch.acting import PageActions
from regrow.observe.watch.site import WatchSite

TOKEN = "job-secret-0123456789"
WITH = {"Authorization": f"Bearer {TOKEN}"}


class ActingPage:
    """A site whose actions are only written down."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.origin = ""

    async def _drain(self, request: web.Request) -> web.Response:
        self.done.append(await request.json())
        return web.json_response({"accepted": True, "reason": "it leaves"})

    @asynccontextmanager
    async def open(self) -> AsyncIterator[aiohttp.ClientSession]:
        actions = PageActions(TOKEN, {"drain": self._drain})
        async with WatchSite("127.0.0.1", 0, say=lambda _: None, actions=actions) as site:
            self.origin = site.address.rstrip("/")
            async with aiohttp.ClientSession(self.origin, timeout=aiohttp.ClientTimeout(total=30)) as session:
                yield session


@pytest.mark.parametrize("path", ["/act", "/act/drain"])
@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({}, ""),
        ({"Authorization": "Bearer "}, ""),
        ({"Authorization": "Bearer job-secret-012345678"}, ""),
        ({"Authorization": TOKEN}, ""),
        ({"Cookie": f"token={TOKEN}"}, f"?token={TOKEN}"),
    ],
    ids=["none", "empty", "cut short", "no scheme", "elsewhere"],
)
async def test_without_the_token_every_action_is_refused(path: str, headers: dict[str, str], query: str) -> None:
    page = ActingPage()
    async with page.open() as session, session.post(path + query, headers=headers, json={"node": "node1"}) as answer:
        assert (answer.status, (await answer.json())["error"]) == (401, "the token is not this job's")
    assert page.done == []


async def test_with_the_token_it_acts_and_says_what_there_is() -> None:
    page = ActingPage()
    async with page.open() as session:
        async with session.post("/act", headers=WITH, json={}) as answer:
            assert await answer.json() == {"actions": ["drain"]}
        async with session.post("/act/drain", headers=WITH | {"Origin": page.origin}, json={"node": "n1"}) as answer:
            assert (answer.status, (await answer.json())["reason"]) == (200, "it leaves")
        async with session.post("/act/kill", headers=WITH, json={}) as answer:
            assert answer.status == 404
    assert page.done == [{"node": "n1"}]


async def test_a_page_of_somebody_else_cannot_act_even_with_the_token() -> None:
    page = ActingPage()
    async with page.open() as session:
        for origin in ("http://evil.example", "null", page.origin.replace("http", "https") + "1"):
            async with session.post("/act/drain", headers=WITH | {"Origin": origin}, json={}) as answer:
                assert answer.status == 403, origin
        # What a form of others could send: no preflight asks whether it may.
        async with session.post("/act/drain", headers=WITH, data={"node": "n1"}) as answer:
            assert answer.status == 415
        # What a script of others must ask first is not answered with yes.
        async with session.options("/act/drain", headers={"Origin": "http://evil.example"}) as answer:
            assert "Access-Control-Allow-Origin" not in answer.headers
            assert answer.status == 405
    assert page.done == []


async def test_actions_are_posted_and_the_token_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    page = ActingPage()
    with caplog.at_level(logging.DEBUG):
        async with page.open() as session:
            async with session.get("/act/drain", headers=WITH) as answer:
                assert answer.status == 405
            async with session.post("/act/drain", headers=WITH, json={}) as answer:
                assert answer.status == 200
    assert TOKEN not in caplog.text


async def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(given: bytes, token: bytes) -> bool:
        compared.append(given)
        return same_secret(given, token)

    monkeypatch.setattr(acting, "same_secret", compare)
    async with ActingPage().open() as session, session.post("/act", headers=WITH, json={}):
        pass
    assert compared == [f"Bearer {TOKEN}".encode()]


async def test_a_site_without_actions_has_none() -> None:
    async with (
        WatchSite("127.0.0.1", 0, say=lambda _: None) as site,
        aiohttp.ClientSession(site.address) as session,
        session.post("act/drain", headers=WITH, json={}) as answer,
    ):
        assert answer.status == 404


def test_the_page_comes_without_buttons_and_keeps_no_token() -> None:
    page = resources.files("regrow.observe.watch").joinpath("page.html").read_text()
    body = page[page.index("<body>") :]
    assert "<button" not in body
    assert "<select" not in body
    script = resources.files("regrow.observe.watch").joinpath("watch.js").read_text()
    assert "localStorage" not in script
    assert "sessionStorage" not in script
    assert "document.cookie" not in script


async def test_no_other_page_may_show_it_in_a_frame() -> None:
    async with ActingPage().open() as session, session.get("/") as answer:
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]

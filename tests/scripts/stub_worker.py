"""Servers that speak OpenAI's API and misbehave in one way each, which is drawn by a seed where it has a choice.

`python stub_worker.py KIND... [--seed N] [--heard FILE]`: one server for each kind, in one process, on ports of their
own; it prints their addresses on a line when all listen. Every sound server refuses a prompt that begins with `bad`.
"""

import argparse
import asyncio
import gzip
import json
import os
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

MODEL = "tiny"
LONG = 200
"""Characters: a prompt that servers of a short context refuse."""


class Gone(Exception):
    """The connection is to be cut."""


def said(prompt: str) -> str:
    """Answer of a sound server."""
    return f"answer to {prompt}"


def whole(prompt: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": said(prompt)}, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    } | more


def named(request: web.Request) -> str:
    """An answer's id, as vLLM makes it: of the name that the request has."""
    return f"chatcmpl-{request.headers.get('X-Request-Id', '1')}"


def error(status: int, message: str, **headers: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status, headers=headers)


class Stub:
    """One server. `kind`: which misbehaviour."""

    def __init__(self, kind: str, seed: int, heard: int | None) -> None:
        self.kind, self.heard = kind, heard
        self.random = random.Random(f"{kind} {seed}")
        self.count = 0
        self.up = True
        self.dead, self.seen_dead = asyncio.Event(), asyncio.Event()
        self.back: asyncio.Future[None] | None = None
        self.before: dict[str, Any] | None = None
        """Its last answer."""

    async def health(self, request: web.Request) -> web.Response:
        if self.kind == "no health page":
            return web.Response(status=404)
        if not self.up:
            self.seen_dead.set()
        if self.kind == "never well" or not self.up:
            return web.Response(status=503)
        if self.kind == "health in HTML":
            return web.Response(text="<html>sign in</html>", content_type="text/html")
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        if self.kind in ("no list of models", "other model, unlisted", "LoRA not loaded, unlisted"):
            return web.Response(status=404)
        if self.kind == "list of models in HTML":
            return web.Response(text="<html>no</html>", content_type="text/html")
        listed = ["other"] if self.kind in ("other model", "silently another model") else [MODEL]
        data = [{"id": name, "max_model_len": 64 if self.kind == "short context" else 4096} for name in listed]
        return web.json_response({"object": "list", "data": data})

    async def post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["messages"][0]["content"]
        self.count += 1
        if self.heard is not None:
            os.write(self.heard, json.dumps([self.kind, prompt]).encode() + b"\n")
        special = KINDS[self.kind]
        if special is not None:
            answer = await special(self, request, prompt)
            if answer is not None:
                return answer
        return await self.sound(request, prompt)

    async def sound(self, request: web.Request, prompt: str) -> web.StreamResponse:
        if prompt.startswith("bad"):
            return error(400, "temperature must be non-negative")
        await asyncio.sleep(0.002)
        return web.json_response(whole(prompt, id=named(request)))

    async def cut(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        raise Gone


Special = Callable[[Stub, web.Request, str], Awaitable[web.StreamResponse | None]]


def always(make: Callable[[str], web.StreamResponse]) -> Special:
    async def answer(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
        return make(prompt)

    return answer


def sometimes(special: Special, share: float = 0.3) -> Special:
    async def answer(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
        return await special(stub, request, prompt) if stub.random.random() < share else None

    return answer


def after(rows: int, special: Special) -> Special:
    async def answer(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
        return await special(stub, request, prompt) if stub.count > rows else None

    return answer


def where(applies: Callable[[str], bool], special: Special) -> Special:
    async def answer(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
        return await special(stub, request, prompt) if applies(prompt) else None

    return answer


async def cut(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
    return await stub.cut(request)


async def hang(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
    await asyncio.sleep(3600)
    return None


async def half(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
    text = json.dumps(whole(prompt)).encode()
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(text))})
    await response.prepare(request)
    await response.write(text[: len(text) // 2])
    return await stub.cut(request)


async def twice(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
    """Answer, and a while later the same again, on a connection that may have another request by then."""
    body = json.dumps(whole(prompt, id=named(request))).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    transport = request.transport
    if transport is not None:
        later = asyncio.get_running_loop().call_later
        later(0.01, lambda: None if transport.is_closing() else transport.write(head.encode() + body))
    return web.Response(body=body, content_type="application/json")


async def another(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
    """The answer to the request before."""
    answer = whole(prompt, id=named(request))
    before, stub.before = stub.before or answer, answer
    return web.json_response(before)


async def packed(stub: Stub, request: web.Request, prompt: str, share: float = 1.0) -> web.StreamResponse | None:
    body = gzip.compress(json.dumps(whole(prompt)).encode())
    return web.Response(
        body=body[: int(len(body) * share)],
        headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
    )


async def packed_in_part(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
    return await packed(stub, request, prompt, 0.5)


async def reset_later(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
    """The connection is cut when the whole answer has come, maybe while it has another request already."""
    if request.transport is not None:
        asyncio.get_running_loop().call_later(0.005, request.transport.abort)
    return web.json_response(whole(prompt))


def also(field: bytes) -> Callable[[str], web.StreamResponse]:
    """A sound answer with one more field."""

    def make(prompt: str) -> web.StreamResponse:
        return web.Response(body=b"{" + field + b", " + json.dumps(whole(prompt)).encode()[1:])

    return make


async def come_back(stub: Stub) -> None:
    """Up again after a while, once it was asked for its health: a slow machine must not miss that it was down."""
    await stub.seen_dead.wait()
    await asyncio.sleep(1.0)
    stub.up, stub.dead, stub.seen_dead = True, asyncio.Event(), asyncio.Event()


async def poisoned(stub: Stub, request: web.Request, prompt: str) -> web.StreamResponse | None:
    """A row that begins with `poison` ends the engine, which takes all that it has with it, and comes back."""
    if not stub.up:
        return error(500, "EngineDeadError")
    if prompt.startswith("poison"):
        if stub.heard is not None:
            os.write(stub.heard, json.dumps(["death", prompt]).encode() + b"\n")
        await asyncio.sleep(0.05)
        stub.up = False
        stub.dead.set()
        stub.back = asyncio.ensure_future(come_back(stub))
        return error(500, "EngineDeadError")
    dead = stub.dead
    waits = [asyncio.ensure_future(asyncio.sleep(0.1)), asyncio.ensure_future(dead.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
    return error(500, "EngineDeadError") if dead.is_set() else None


def no_model(prompt: str) -> web.Response:
    return error(404, f"The model `{MODEL}` does not exist. Valid aliases: other.")


def message(**fields: Any) -> Callable[[str], web.StreamResponse]:
    """An answer whose message has these fields alone."""

    def make(prompt: str) -> web.StreamResponse:
        choice = {"index": 0, "message": {"role": "assistant", "content": None} | fields, "finish_reason": "stop"}
        return web.json_response(whole(prompt, choices=[choice]))

    return make


def text(content: str, kind: str, status: int = 200) -> Callable[[str], web.StreamResponse]:
    return lambda prompt: web.Response(text=content, content_type=kind, status=status)


KINDS: dict[str, Special | None] = {
    "sound": None,
    "no health page": None,
    "no list of models": None,
    "list of models in HTML": None,
    "never well": None,
    "health in HTML": None,
    "other model": always(no_model),
    "other model, unlisted": always(no_model),
    "LoRA not loaded, unlisted": after(4, always(no_model)),
    "silently another model": always(lambda prompt: web.json_response(whole(prompt, model="other"))),
    "short context": where(
        lambda prompt: len(prompt) > LONG, always(lambda _: error(400, "maximum context length is 64 tokens"))
    ),
    "no such route": always(lambda _: error(404, "Not Found")),
    "method not allowed": always(lambda _: web.Response(status=405, text="Method Not Allowed")),
    "refuses everything": always(lambda _: error(400, "unknown field `messages`")),
    "refuses some": sometimes(always(lambda _: error(422, "unprocessable"))),
    "refuses after a while": after(6, always(lambda _: error(400, "adapter was removed"))),
    "wants a key": always(lambda _: error(401, "no key")),
    "forbids": always(lambda _: error(403, "no access")),
    "leads elsewhere": always(lambda _: web.Response(status=302, headers={"Location": "/login"})),
    "HTML": always(text("<html>sign in</html>", "text/html")),
    "sometimes HTML": sometimes(always(text("<html>sign in</html>", "text/html"))),
    "torn JSON": sometimes(always(text('{"id": "chatcmpl-1", "choices": [', "application/json"))),
    "not JSON": always(text("fine.", "text/plain")),
    "a list": always(text("[]", "application/json")),
    "error in 200": always(lambda _: web.json_response({"error": {"message": "out of memory", "code": 500}})),
    "refusal in 200": always(lambda _: web.json_response({"error": {"message": "no such field", "code": 400}})),
    "old error in 200": always(lambda _: web.json_response({"object": "error", "message": "no", "code": 50001})),
    "no choices": always(lambda prompt: web.json_response(whole(prompt, choices=[]))),
    "choices are null": sometimes(always(lambda prompt: web.json_response(whole(prompt, choices=None)))),
    "empty": always(message(content="")),
    "sometimes empty": sometimes(always(message(content=""))),
    "null content": always(message()),
    "aborts": sometimes(
        always(lambda prompt: web.json_response(whole(prompt, choices=[{"index": 0, "finish_reason": "abort"}])))
    ),
    "busy": sometimes(always(lambda _: error(429, "busy", **{"Retry-After": "0.05"})), 0.5),
    "500": sometimes(always(lambda _: error(500, "oh"))),
    "always 500": always(lambda _: error(500, "oh")),
    "502 of a proxy": sometimes(always(text("<html>Bad Gateway</html>", "text/html", 502))),
    "503": sometimes(always(lambda _: error(503, "overloaded", **{"Retry-After": "0.05"}))),
    "cuts": sometimes(cut),
    "always cuts": always(lambda _: web.Response()),
    "half an answer": sometimes(half),
    "answers twice": sometimes(twice),
    "answers as to another row": sometimes(another),
    "no UTF-8": sometimes(always(also(b'"more": "\xff"'))),
    "deep JSON": sometimes(always(also(b'"more": ' + b"[" * 100_000 + b"]" * 100_000))),
    "large": sometimes(always(also(b'"more": "' + b"x" * (1 << 20) + b'"'))),
    "gzip": packed,
    "torn gzip": sometimes(packed_in_part),
    "resets after an answer": sometimes(reset_later),
    "too large": where(lambda prompt: len(prompt) > LONG, always(lambda _: error(413, "Request Entity Too Large"))),
    "forbidden by law": where(lambda prompt: prompt[-1] == "7", always(lambda _: error(451, "not in this country"))),
    "hangs": where(lambda prompt: prompt[-1] in "13579", hang),
    "engine that dies of a row": poisoned,
}
KINDS["always cuts"] = cut


@web.middleware
async def quiet(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Gone:
        return web.Response()


async def serve(kind: str, seed: int, heard: int | None) -> str:
    stub = Stub(kind, seed, heard)
    app = web.Application(middlewares=[quiet])
    app.router.add_get("/health", stub.health)
    app.router.add_get("/v1/models", stub.models)
    app.router.add_post("/v1/chat/completions", stub.post)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heard", default="")
    words = parser.parse_args()
    heard = os.open(words.heard, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if words.heard else None
    print(*[await serve(kind, words.seed, heard) for kind in words.kinds], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(0)

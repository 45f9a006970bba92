"""An OpenAI-compatible server that infers nothing: it answers late, wrongly, in part, or never, as it is told to.

`python fake_worker.py PORT [--latency S] [--faults SHARE] [--how KIND,...] [--seed N] [--heard FILE] [--key KEY]`
Port 0: any. It prints its address when it listens. Answers repeat the prompt; a prompt that begins with `loop` is
answered with a loop, which the server itself ends where `repetition_detection` is asked for. `--hold N:FILE`: after N
answers it waits until the file is there. `--penalty`: it has the LZ penalty, and refuses strengths that are no numbers.
FILE of `--heard` is there from the first row on: held for it, one worker leaves rows to another.
"""

import argparse
import asyncio
import json
import os
import random
import sys
from typing import Any

from aiohttp import web

KINDS = ("429", "500", "hang", "torn", "cut", "html")
LOOP = ["round ", "and "] * 600


class FakeWorker:
    def __init__(self, words: argparse.Namespace) -> None:
        self.words = words
        self.random = random.Random(words.seed)
        self.kinds = words.how.split(",")
        self.answered = 0
        self.heard: int | None = None

    def hear(self, *what: Any) -> None:
        if self.heard is None and self.words.heard:
            self.heard = os.open(self.words.heard, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if self.heard is not None:
            os.write(self.heard, json.dumps(what).encode() + b"\n")

    async def models(self, request: web.Request) -> web.Response:
        # `m` is what rows of tests ask for: a model that is not listed would be tried with one row first.
        return web.json_response(
            {"object": "list", "data": [{"id": name, "object": "model"} for name in ("fake", "m")]}
        )

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        prompt = str(body["messages"][0]["content"] if "messages" in body else body["prompt"])
        if self.words.key and request.headers.get("Authorization") != f"Bearer {self.words.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        self.hear(prompt, request.path, body.get("model"))
        if self.random.random() < self.words.faults:
            return await self.fault(request, self.random.choice(self.kinds), prompt)
        strength = (body.get("vllm_xargs") or {}).get("lz_strength", 0.0)
        if self.words.penalty and not isinstance(strength, float):
            return web.json_response({"error": {"message": "lz_strength is no number"}}, status=400)
        if prompt.startswith("refuse"):
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        self.answered += 1
        if self.words.hold:
            # So a test finds the batch where it waits for it to be.
            most, _, file = self.words.hold.partition(":")
            while self.answered > int(most) and not os.path.exists(file):
                await asyncio.sleep(0.02)
        if self.words.latency:
            await asyncio.sleep(self.words.latency * (0.5 + self.random.random()))
        if body.get("stream"):
            return await self.stream(request, prompt)
        if not prompt.startswith("loop"):
            return web.json_response(self.whole(prompt, "stop"))
        ended = bool(body.get("repetition_detection"))
        return web.json_response(
            self.whole("".join(LOOP[: 40 if ended else None]), "repetition" if ended else "length")
        )

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.random.getrandbits(64):x}",
            "object": "chat.completion",
            "created": 0,
            "model": "fake",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12},
        }

    async def stream(self, request: web.Request, prompt: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        told = LOOP if prompt.startswith("loop") else [f"{word} " for word in prompt.split()]
        events: list[dict[str, Any]] = [{"delta": {"content": text}} for text in told]
        events.append({"delta": {}, "finish_reason": "length" if told is LOOP else "stop"})
        sent = 0
        try:
            for event in events:
                part = {"id": "chatcmpl-1", "model": "fake", "created": 0, "choices": [{"index": 0, **event}]}
                await response.write(f"data: {json.dumps(part)}\n\n".encode())
                sent += 1
                await asyncio.sleep(0)
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            self.hear("hung up on", sent, len(events))
        return response

    async def fault(self, request: web.Request, kind: str, prompt: str) -> web.StreamResponse:
        if kind == "429":
            return web.Response(status=429, text="busy", headers={"Retry-After": "0.1"})
        if kind == "500":
            return web.Response(status=500, text="broken")
        if kind == "html":
            return web.Response(text="<html>sign in</html>", content_type="text/html")
        if kind == "hang":
            await asyncio.sleep(3600)
        whole = json.dumps(self.whole(prompt, "stop")).encode()
        if kind == "torn":
            return web.Response(body=whole[: len(whole) // 2], content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(whole))})
        await response.prepare(request)
        await response.write(whole[: len(whole) // 2])
        if request.transport is not None:
            request.transport.abort()
        return response


async def main(words: argparse.Namespace) -> None:
    worker = FakeWorker(words)
    app = web.Application(client_max_size=1 << 26)
    if "no-models" not in words.how:
        app.router.add_get("/v1/models", worker.models)
    app.router.add_post("/v1/chat/completions", worker.answer)
    app.router.add_post("/v1/completions", worker.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", words.port).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def read_words() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--faults", type=float, default=0.0)
    parser.add_argument("--how", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heard", default="")
    parser.add_argument("--key", default="")
    parser.add_argument("--hold", default="")
    parser.add_argument("--penalty", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        asyncio.run(main(read_words()))
    except KeyboardInterrupt:
        sys.exit(0)

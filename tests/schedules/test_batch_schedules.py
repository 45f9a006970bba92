"""A batch over workers of any kinds, in any order: each row once, and an error row is never its own fault by mistake.

Hundreds of batches a minute, as time is the loop's own: it passes where nothing is left to be done.
"""

import asyncio
import json
import os
import random
import selectors
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from regrow_batch.head import BatchHead, HeadPolicy
from regrow_batch.journal import Journal
from regrow_batch.places import BatchStopped
from regrow_batch.pool import Pool, PoolPolicy
from regrow_batch.retries import Answered, RetryPolicy, Unanswered
from regrow_batch.rows import BatchRow, RowReading
from regrow_batch.scanning import Feed, scan
from regrow_batch.sending import ProbeAnswer
from regrow_batch.tally import Tally

Outcome = Answered | Unanswered
TIMEOUT, PATIENCE = 60.0, 600.0
FIRST = 1000 * int(os.environ.get("REGROW_SOAK_SEED", "1"))
LONG = 100
"""Characters of a prompt that servers of a short context refuse."""


class Selector(selectors.SelectSelector):
    """Lets time pass instead of waiting."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing is due"
            self.now += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def chat(text: str, model: str = "tiny", **fields: Any) -> Answered:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"} | fields
    return Answered(200, json.dumps({"id": "c", "model": model, "choices": [choice]}).encode())


def error(status: int, message: str) -> Answered:
    return Answered(status, json.dumps({"error": {"message": message, "code": status}}).encode(), "application/json")


def said(prompt: str) -> str:
    return f"answer to {prompt}"


ALWAYS: Mapping[str, Callable[[], Outcome]] = {
    "other model, unlisted": lambda: error(404, "no such model"),
    "wants a key": lambda: error(401, "no key"),
    "HTML": lambda: Answered(200, b"<html>", "text/html"),
    "error in 200": lambda: Answered(200, b'{"error": {"message": "no", "code": 500}}'),
    "refusal in 200": lambda: Answered(200, b'{"error": {"message": "no", "code": 400}}'),
    "empty": lambda: chat(""),
    "500": lambda: error(500, "oh"),
    "cuts": lambda: Unanswered("is cut"),
    "other model": lambda: chat("wrong", "other"),
}
SOMETIMES: Mapping[str, Callable[[], Outcome]] = {
    "refuses some": lambda: error(422, "unprocessable"),
    "sometimes HTML": ALWAYS["HTML"],
    "sometimes empty": ALWAYS["empty"],
    "aborts": lambda: chat("x", finish_reason="abort"),
    "busy": lambda: Answered(429, b"", retry_after="0.05"),
    "sometimes 500": ALWAYS["500"],
    "sometimes cuts": ALWAYS["cuts"],
    "strays": lambda: Unanswered("answered another row", strayed=True),
}
OTHERS = ("short", "refuses after a while", "hangs", "crashes", "dies of a row", "slow", "sound")
KINDS = (*ALWAYS, *SOMETIMES, *OTHERS)
CANNOT_TELL = {"refuses some", "sometimes empty", "empty"}
"""Without a sound one nobody can say whether these are right."""


class Server:
    def __init__(self, kind: str, drawn: random.Random) -> None:
        self.kind, self._drawn = kind, drawn
        self._count = 0
        self._dead: asyncio.Event | None = None
        self._living = asyncio.Event()

    def _die(self, seconds: float) -> Outcome:
        """Take all rows with it, and come back."""
        self._dead, living = asyncio.Event(), self._living
        self._living = asyncio.Event()
        living.set()

        def come_back() -> None:
            self._dead = None

        asyncio.get_running_loop().call_later(seconds, come_back)
        return Unanswered("is gone")

    async def answer(self, prompt: str) -> Outcome:
        self._count += 1
        if self._dead is not None:
            return Unanswered("is down")
        if self.kind == "hangs" and prompt[-1] in "13579":
            await asyncio.sleep(TIMEOUT)
            return Unanswered("is silent", hung=True)
        takes = 5.0 if self.kind == "slow" else self._drawn.choice([0.001, 0.01, 0.05, 0.3])
        try:
            await asyncio.wait_for(self._living.wait(), takes)
        except TimeoutError:
            return self._says(prompt)
        return Unanswered("is reset")

    def _says(self, prompt: str) -> Outcome:
        chance = self._drawn.random()
        if self._dead is not None:
            return Unanswered("is down")
        if self.kind == "dies of a row" and prompt == "poison":
            return self._die(1.0)
        if self.kind == "crashes" and chance < 0.1:
            return self._die(2.0)
        if self.kind in ALWAYS:
            return ALWAYS[self.kind]()
        if self.kind in SOMETIMES and chance < 0.3:
            return SOMETIMES[self.kind]()
        if self.kind == "refuses after a while" and self._count > 6:
            return error(400, "the adapter was removed")
        if prompt.startswith("bad") or (self.kind == "short" and len(prompt) > LONG):
            return error(400, "this cannot be answered")
        return chat(said(prompt))

    async def probe(self) -> ProbeAnswer:
        await asyncio.sleep(0.003)
        if self._dead is not None:
            return ProbeAnswer("is down")
        listed = frozenset({"other" if self.kind == "other model" else "tiny"})
        return ProbeAnswer("", listed, 64 if self.kind == "short" else 4096)


class Servers:
    def __init__(self, servers: Mapping[str, Server]) -> None:
        self._servers = servers

    async def send(self, url: str, row: BatchRow) -> Outcome:
        return await self._servers[url].answer(json.loads(row.body)["messages"][0]["content"])

    async def probe(self, url: str) -> ProbeAnswer:
        return await self._servers[url].probe()


def prompts_of(drawn: random.Random, kinds: list[str]) -> list[str]:
    found = [f"row {number}" for number in range(drawn.choice([1, 3, 20, 40]))]
    found += ["bad row"] * drawn.choice([0, 1, 5])
    found += ["row " + "x" * 2 * LONG] * drawn.choice([0, 1])
    found += ["poison"] * (drawn.random() < 0.3 and "dies of a row" in kinds)
    drawn.shuffle(found)
    return found


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[str], prompts: list[str], drawn: random.Random
) -> dict[int, Any] | None:
    """Result of each row; None: the batch has stopped, as it says when nobody answers."""
    source = folder / "in.jsonl"
    rows = (
        {"custom_id": str(number), "url": "/v1/chat/completions", "body": {"model": "tiny", "messages": [message]}}
        for number, message in enumerate({"role": "user", "content": prompt} for prompt in prompts)
    )
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, pool = scan(str(source)), Pool(PoolPolicy(cap=drawn.choice([1, 4, 32])))
    journal = Journal.open(folder / "journal", {})
    loop = Loop()

    async def in_turn(work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    async def go() -> None:
        servers = {
            f"http://{number}:1": Server(kind, random.Random(drawn.random())) for number, kind in enumerate(kinds)
        }
        for url in servers:
            pool.join(url, loop.time())
        head = BatchHead(
            Feed(found, RowReading()),
            found.states,
            pool=pool,
            sender=Servers(servers),
            journal=journal,
            tally=Tally(len(prompts), began=loop.time()),
            policy=HeadPolicy(RetryPolicy(), patience=PATIENCE, timeout=TIMEOUT),
        )
        await asyncio.wait_for(head.run(), 4 * (PATIENCE + TIMEOUT))

    monkeypatch.setattr(time, "monotonic", loop.time)
    monkeypatch.setattr(asyncio, "to_thread", in_turn)
    monkeypatch.setattr(random, "random", drawn.random)
    try:
        loop.run_until_complete(go())
    except BatchStopped:
        return None
    finally:
        monkeypatch.undo()
        loop.close()
        results = [(number, json.loads(result)) for number, _, result in journal.rows()]
        journal.close()
    assert sorted(number for number, _ in results) == list(range(len(prompts))), "each row once"
    return dict(results)


def text_of(result: Any) -> str:
    return str(result["response"]["body"]["choices"][0]["message"]["content"])


def drawn_kinds(drawn: random.Random) -> list[str]:
    return [drawn.choice(KINDS) for _ in range(drawn.choice([1, 2, 2, 3, 4]))]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 40))
def test_beside_a_sound_worker_each_row_is_answered_or_refused_for_its_own_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    drawn = random.Random(seed)
    kinds = [*drawn_kinds(drawn), "sound"]
    prompts = prompts_of(drawn, kinds)
    results = run(tmp_path, monkeypatch, kinds, prompts, drawn)
    assert results is not None, kinds
    for number, prompt in enumerate(prompts):
        row = results[number]
        if prompt == "poison":
            assert row["error"] is None or row["error"]["fault"] == "unknown", (kinds, row)
        elif prompt.startswith("bad"):
            assert row["error"] is not None and row["error"]["fault"] == "row", (kinds, row)
        else:
            assert row["error"] is None, (kinds, prompt, row)
            assert text_of(row) == said(prompt), (kinds, prompt, row)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 30))
def test_without_a_sound_worker_no_row_is_at_fault_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    drawn = random.Random(seed)
    kinds = [kind for kind in drawn_kinds(drawn) if kind not in CANNOT_TELL] or ["short"]
    prompts = prompts_of(drawn, kinds)
    results = run(tmp_path, monkeypatch, kinds, prompts, drawn)
    for number, row in (results or {}).items():
        prompt = prompts[number]
        if row["error"] is None:
            right = text_of(row) == said(prompt) or (text_of(row) == "wrong" and "other model" in kinds)
            assert right, (kinds, prompt, row)
        elif row["error"]["fault"] == "row":
            may = prompt.startswith("bad") or ("short" in kinds and len(prompt) > LONG)
            assert may, (kinds, prompt, row)

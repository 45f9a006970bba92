"""Servers that misbehave in fifty ways, alone and beside a sound one: each row once, and 0 only where that is right."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.process.batch import SetUpNotes, desk
from tests.scripts.stub_worker import KINDS, LONG, MODEL, said

STUBS = str(Path(__file__).parents[1] / "scripts" / "stub_worker.py")
SEED = int(os.environ.get("REGROW_SOAK_SEED", "1"))
PROMPTS = (*(f"row {number}" for number in range(20)), "bad row", "row " + "x" * LONG, "another bad row")

HARMLESS = (
    "sound",
    "no health page",
    "no list of models",
    "list of models in HTML",
    "silently another model",
    "short context",
    "sometimes HTML",
    "torn JSON",
    "choices are null",
    "aborts",
    "busy",
    "500",
    "502 of a proxy",
    "503",
    "cuts",
    "half an answer",
    "sometimes empty",
    "engine that dies of a row",
    "answers twice",
    "answers as to another row",
    "no UTF-8",
    "deep JSON",
    "large",
    "gzip",
    "torn gzip",
    "resets after an answer",
    "too large",
)
"""Alone, each row is answered in the end, or refused rightly as far as anybody can tell."""
CANNOT_TELL = ("refuses some", "forbidden by law")
"""Alone, nobody else can say whether it refuses rightly."""
PATIENT = ("--patience", "120s", "--attempts", "20")
"""A server that fails three answers of ten fails eight of the same row about once in six hundred batches."""
HOPELESS = tuple(kind for kind in KINDS if kind not in (*HARMLESS, *CANNOT_TELL))

SHARP_ALONE = (
    "answers as to another row",
    "answers twice",
    "no UTF-8",
    "deep JSON",
    "other model, unlisted",
    "refuses after a while",
    "empty",
    "error in 200",
    "short context",
    "cuts",
)
SHARP_BESIDE = (
    "other model",
    "LoRA not loaded, unlisted",
    "silently another model",
    "short context",
    "refuses after a while",
    "sometimes empty",
    "no choices",
    "hangs",
)


@contextmanager
def stubs(*kinds: str, heard: str = "") -> Iterator[list[str]]:
    """Addresses of servers of these kinds."""
    words = ["--heard", heard] if heard else []
    command = [sys.executable, STUBS, *kinds, "--seed", str(SEED), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def pool() -> Iterator[dict[str, str]]:
    """A server of each kind alone, one of each beside a sound one, and that one: all in one process."""
    names = [*(f"{kind}, alone" for kind in KINDS), *(f"{kind}, beside" for kind in KINDS)]
    with stubs(*KINDS, *KINDS) as urls:
        assert len(urls) == len(names)
        yield dict(zip(names, urls, strict=True))


@pytest.fixture
def at(tmp_path: Path) -> Iterator[SetUpNotes]:
    with desk(tmp_path) as made:
        yield made


def looked_at(at: SetUpNotes, code: int, told: str) -> dict[str, Any]:
    """The results, by prompts, of a batch whose code tells the truth; none where it says to run it again."""
    assert code in (0, 75, 77), told
    if code == 75:
        assert not (at.folder / "out.jsonl").exists(), told
        return {}
    rows = [json.loads(line) for line in (at.folder / "out.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"id-{number}" for number in range(len(PROMPTS))], told
    doubtful = [row for row in rows if row["error"] is not None and row["error"]["fault"] != "row"]
    assert (code == 77) == bool(doubtful), told
    return dict(zip(PROMPTS, rows, strict=True))


def text_of(row: dict[str, Any]) -> str:
    return str(row["response"]["body"]["choices"][0]["message"]["content"])


def run(at: SetUpNotes, *urls: str, words: tuple[str, ...] = ()) -> tuple[int, str]:
    at.rows(*PROMPTS, model=MODEL)
    return at.run_here("--workers", ",".join(urls), "--per-worker", "4", "--quiet", *words)


def check_alone(at: SetUpNotes, pool: dict[str, str], kind: str) -> None:
    hopeless = kind in HOPELESS
    words = ("--patience", "1s", "--timeout", "1s", "--attempts", "2") if hopeless else PATIENT
    code, told = run(at, pool[f"{kind}, alone"], words=words)
    found = looked_at(at, code, told)
    if hopeless:
        assert code != 0, told
    elif kind in HARMLESS:
        assert code == 0, told
        refused = {prompt for prompt, row in found.items() if row["error"] is not None}
        assert refused <= {"bad row", "another bad row", PROMPTS[-2]}, told
        if kind.startswith("answers"):
            texts = {prompt: text_of(row) for prompt, row in found.items() if row["error"] is None}
            assert texts == {prompt: said(prompt) for prompt in texts}, told


def check_beside(at: SetUpNotes, pool: dict[str, str], kind: str) -> None:
    urls = [pool[f"{kind}, beside"], pool["sound, beside"]]
    code, told = run(at, *urls, words=("--patience", "120s", "--timeout", "300s"))
    found = looked_at(at, code, told)
    assert code == 0, told
    for prompt, row in found.items():
        if "bad" in prompt:
            assert row["error"] is None or row["error"]["code"] in ("http_400", "http_422"), row
        else:
            assert row["error"] is None, (told, row)
            assert text_of(row) == said(prompt) and row["served"]["model"] == MODEL, row


@pytest.mark.parametrize("kind", SHARP_ALONE)
def test_alone(at: SetUpNotes, pool: dict[str, str], kind: str) -> None:
    check_alone(at, pool, kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SHARP_ALONE])
def test_others_alone(at: SetUpNotes, pool: dict[str, str], kind: str) -> None:
    check_alone(at, pool, kind)


@pytest.mark.parametrize("kind", SHARP_BESIDE)
def test_beside_a_sound_one(at: SetUpNotes, pool: dict[str, str], kind: str) -> None:
    check_beside(at, pool, kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SHARP_BESIDE])
def test_others_beside_a_sound_one(at: SetUpNotes, pool: dict[str, str], kind: str) -> None:
    check_beside(at, pool, kind)


def pairs(count: int) -> list[tuple[str, str]]:
    drawn = random.Random(SEED)
    return [(drawn.choice([*KINDS]), drawn.choice([*KINDS])) for _ in range(count)]


@pytest.mark.soak
@pytest.mark.parametrize(("one", "other"), pairs(60))
def test_in_pairs(at: SetUpNotes, one: str, other: str) -> None:
    with ExitStack() as stack:
        urls = stack.enter_context(stubs(one, other))
        code, told = run(at, *urls, words=("--patience", "3s", "--timeout", "3s", "--attempts", "4"))
        looked_at(at, code, told)
        if one in HOPELESS and other in HOPELESS:
            assert code != 0, told

"""Real servers (`transformers serve`, offline, with a tiny model) answer a batch while one dies and another comes."""

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import held_port
from tests.process.batch import SetUpNotes, desk, until
from tests.process.launching import warm
from tests.process.warm_client import WarmProcess

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
SERVE = "transformers.cli.transformers"
IMPORTS = (SERVE, "transformers.cli.serving.server", "transformers.models.llama.modeling_llama")
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    made = warm(IMPORTS).start(
        "tests.scripts.tiny_model", [str(folder)], cwd=str(folder), env=OFFLINE, streams=(0, 1, 2)
    )
    assert made.wait(180) == 0
    return str(folder)


@pytest.fixture
def servers(model: str, tmp_path: Path) -> Iterator[dict[str, WarmProcess]]:
    """Three of them, by address; ended at the end."""
    started: dict[str, WarmProcess] = {}
    try:
        with open(os.devnull) as nothing, (tmp_path / "servers").open("wb") as output:
            streams = (nothing.fileno(), output.fileno(), output.fileno())
            for _ in range(3):
                port = held_port()
                words = ["serve", model, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
                process = warm(IMPORTS).start(SERVE, words, cwd=str(tmp_path), env=OFFLINE, streams=streams)
                started[f"http://127.0.0.1:{port}"] = process
        yield started
    finally:
        for server in started.values():
            server.kill()
            server.wait(10)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[SetUpNotes]:
    with desk(tmp_path) as made:
        yield made


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.parametrize("words", [(), ("--end-loops",)], ids=["whole", "streamed"])
def test_two_hundred_rows_while_one_server_is_killed_and_one_is_added(
    at: SetUpNotes, servers: dict[str, WarmProcess], model: str, words: tuple[str, ...]
) -> None:
    rows = 200
    at.rows(*(f"Number {number}: " for number in range(rows)), max_tokens=24)
    first, second, third = servers
    pool = at.folder / "pool.txt"
    pool.write_text(f"{first}\n{second}\n")
    until(lambda: all(is_up(url) for url in servers))
    head = at.start("--workers-file", "pool.txt", "--per-worker", "2", "--model", model, *words)
    until(lambda: at.journaled() >= 40)
    servers[first].kill()
    pool.write_text(f"{first}\n{second}\n{third}\n")
    head.send_signal(signal.SIGHUP)  # it reads the list at once, while there are rows left
    code, said = at.end(head)
    assert code == 0, said
    assert set(at.answers()) == {f"id-{number}" for number in range(rows)}
    shares = {worker["url"]: worker["rows"] for worker in at.summary()["workers"]}
    assert all(shares[url] for url in servers), shares
    assert sum(shares.values()) == rows
    assert at.summary()["tokens"] > 0

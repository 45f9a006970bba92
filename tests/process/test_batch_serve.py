"""Real servers (`transformers serve`, offline, with a tiny model) answer a batch while one dies and another comes."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import held_port
from tests.process.batch import Desk, desk, until

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
SCRIPTS = Path(__file__).parents[1] / "scripts"
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, str(SCRIPTS / "tiny_model.py"), str(folder)], check=True, env=OFFLINE)
    return str(folder)


@pytest.fixture
def servers(model: str, tmp_path: Path) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """Three of them, by address; ended at the end."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    with (tmp_path / "servers").open("wb") as output:
        for _ in range(3):
            port = held_port()
            command = [str(Path(sys.executable).with_name("transformers")), "serve", model]
            command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
            url = f"http://127.0.0.1:{port}"
            started[url] = subprocess.Popen(command, env=OFFLINE, stdout=output, stderr=output)
    try:
        yield started
    finally:
        for server in started.values():
            server.kill()
            server.wait()


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Desk]:
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
    at: Desk, servers: dict[str, "subprocess.Popen[bytes]"], model: str, words: tuple[str, ...]
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

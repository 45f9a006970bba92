"""A job that runs is scraped and looked at while one of its ranks is killed."""

import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
from tests.process.launching import PATIENCE, Running, site
from tests.process.training import SCRIPTS

from regrow.observe.watch.frames import WatchSnapshot


def scrape(address: str) -> dict[str, float]:
    """Series with their labels to their values."""
    with urllib.request.urlopen(f"{address}metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def act(address: str, name: str, body: dict[str, object], *, token: str) -> int:
    """The status with which an action is answered."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}act/{name}", msgspec.json.encode(body), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def scrape_until(address: str, job: Running, name: str, least: float) -> dict[str, float]:
    deadline = time.monotonic() + PATIENCE
    while (found := scrape(address)).get(name, 0.0) < least:
        job.drain()
        assert time.monotonic() < deadline, (found, job.output)
        time.sleep(0.1)
    return found


def test_a_running_job_is_scraped_before_and_after_a_kill(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        asked = ["--watch", "0", "--node-metrics", "0"]
        words = ["run", "--job", "seen", "--nproc-per-node", "2", *asked, str(SCRIPTS / "train_small.py")]
        with here.start(*words, "--steps", "40", "--pace", "0.3") as job:
            job.wait_for("live view")
            job.wait_for("node0: metrics")
            (node,) = re.findall(r"node0: metrics (http://127\.0\.0\.1:\d+/)metrics", job.output)
            (address,) = re.findall(r"live view (http://127\.0\.0\.1:\d+/), metrics", job.output)
            before = scrape_until(address, job, "regrow_steps", 3)
            assert before['regrow_world_ranks{count="present"}'] == before['regrow_world_ranks{count="wanted"}'] == 2
            assert before['regrow_logged{name="loss"}'] > 0
            assert "regrow_incidents_total" not in {name.partition("{")[0] for name in before}

            fault = {"fault": "asked-1", "rank": 1}
            assert act(address, "kill", fault, token="guessed") == 401
            token = here.regrow("token", "seen").stdout.strip()
            assert act(address, "kill", fault, token=token) == 202
            assert token not in job.output
            after = scrape_until(address, job, 'regrow_incident_stage_seconds_total{stage="regroup"}', 1e-6)
            assert after['regrow_incidents_total{kind="exit"}'] == 1
            assert after["regrow_generation"] > before["regrow_generation"]
            total = {name for name in after if name.startswith("regrow_rank_seconds_total")}
            assert sum(after[name] for name in total) > sum(before[name] for name in total) > 0

            of_node = scrape_until(node, job, 'regrow_hydrated_bytes_total{node="node0"}', 1)
            assert of_node['regrow_generation{node="node0"}'] == after["regrow_generation"]
            assert of_node['regrow_memory_bytes{node="node0",of="workers"}'] > 1e6
            assert time.time() - of_node['regrow_newest_timestamp_seconds{node="node0",of="commit"}'] < PATIENCE
            scrape_until(node, job, 'regrow_workers{node="node0",state="training"}', 2)

            with urllib.request.urlopen(f"{address}snapshot", timeout=PATIENCE) as answer:
                seen = msgspec.json.decode(answer.read(), type=WatchSnapshot)
            assert (seen.job, seen.ranks, seen.nodes) == ("seen", [0, 1], ["node0"])
            assert [(each.kind, each.ranks) for each in seen.incidents] == [("exit", [1])]
            with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
                assert b"<script src=" in answer.read()

            Path(here.folder / "hurry").touch()
            with here.start("top", "seen") as top:
                assert job.wait() == 0, job.output
                assert top.wait() == 0, top.output
            assert "2 ranks on 1 node" in top.output
            assert "mended by fork" in top.output
            assert "job ended with code 0" in top.output
        here.assert_nothing_left()


def test_a_port_that_is_taken_costs_the_view_and_not_the_job(tmp_path: Path) -> None:
    with site(tmp_path) as here, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = ["--watch", str(port), "--node-metrics", str(port)]
        done = here.regrow("run", *asked, str(SCRIPTS / "train_small.py"), "--steps", "2")
        assert done.returncode == 0, done.stderr
        assert f"node0: --node-metrics cannot listen on 127.0.0.1:{port}" in done.stderr
        assert f"--watch cannot listen on 127.0.0.1:{port}" in done.stderr

"""`regrow run` with real processes: what scripts see, what users see, what is left."""

import json
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import held_port
from tests.process.launching import Site, site

WAITING = """
import os, time
print("restart", os.environ["TORCHELASTIC_RESTART_COUNT"], "of rank", os.environ["RANK"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made


def test_a_script_that_ends_well(here: Site) -> None:
    script = here.script("import os, sys; print('I am', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv)")
    done = here.regrow("run", "--nproc-per-node", "2", "--job", "well", script, "--lr", "--help")
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"regrow: job well has ended well in [0-9.:]+ (ms|s|min) \(exit code 0\)", last), done.stderr
    for rank in (0, 1):
        assert re.search(rf"\b{rank}\b.*I am {rank} of 2 \['train.py', '--lr', '--help'\]", done.stdout)
        assert f"I am {rank} of 2" in (here.home / "jobs" / "well" / "logs" / f"rank{rank}.log").read_text()
        assert f"I am {rank} of 2" in here.regrow("logs", "--rank", str(rank)).stdout
    entry = json.loads((here.home / "jobs" / "well" / "job.json").read_text())
    assert (entry["code"], entry["token"]) == (0, "")
    events = [json.loads(line) for line in (here.home / "jobs" / "well" / "events.jsonl").read_text().splitlines()]
    assert events[-1]["type"] == "JobEnded"
    assert "ended (0)" in here.regrow("jobs").stdout
    here.assert_nothing_left()


def test_a_scripts_own_error_is_shown_once_with_its_rank_and_no_stack_of_ours(here: Site) -> None:
    script = here.script(
        "import os\ndef load():\n    raise ValueError('bad batch')\nif os.environ['RANK'] == '1': load()"
    )
    done = here.regrow("run", "--nproc-per-node", "2", "--max-restarts", "0", script)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert said.count("ValueError: bad batch") == 1, said
    assert "rank 1 failed" in done.stderr
    assert "line 3, in load" in said
    assert "regrow/" not in re.sub(r"records and logs in \S+", "", said)
    here.assert_nothing_left()


def test_a_script_that_exits_with_a_code_fails_the_job(here: Site) -> None:
    done = here.regrow("run", "--max-restarts", "0", here.script("raise SystemExit(3)"))
    assert done.returncode == 1
    assert "code 3" in done.stderr
    here.assert_nothing_left()


@pytest.mark.parametrize(
    "words", [["--nprocs", "2", "train.py"], ["nothere.py"], ["--nproc-per-node", "0", "train.py"]]
)
def test_a_wrong_command_line_starts_nothing(here: Site, words: list[str]) -> None:
    here.script("print('ran')")
    done = here.regrow("run", *words)
    assert done.returncode == 2
    assert "ran" not in done.stdout
    assert "Traceback" not in done.stderr
    here.assert_nothing_left()


def test_a_port_in_use_is_said_and_leaves_nothing(here: Site) -> None:
    script = here.script("print('ran')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        endpoint = here.regrow("run", f"--rdzv-endpoint=127.0.0.1:{port}", script)
        master = here.regrow("run", f"--master-port={port}", script)
    assert (endpoint.returncode, master.returncode) == (2, 2)
    assert f"regrow: cannot listen on 127.0.0.1:{port}: Address already in use" in endpoint.stderr
    assert f"regrow: --master-port {port} cannot be used: Address already in use" in master.stderr
    assert list((here.home / "jobs").iterdir()) == []
    here.assert_nothing_left()


def test_an_operator_sees_kills_and_stops_a_job(here: Site) -> None:
    with here.start("run", "--nproc-per-node", "2", "--job", "mine", here.script(WAITING)) as job:
        job.wait_for("restart 0", times=2)
        assert stat.S_IMODE((here.home / "jobs" / "mine" / "job.json").stat().st_mode) == 0o600
        status = here.regrow("status")
        assert "job mine: building" in status.stdout, status.stderr
        table = status.stdout.partition("RANK")[2]
        assert [line.split()[0] for line in table.splitlines()[1:]] == ["0", "1"]
        assert "running" in here.regrow("jobs").stdout
        assert here.regrow("kill", "--rank", "2").returncode == 2
        killed = here.regrow("kill", "mine", "--rank", "1")
        assert killed.stdout == "job mine: rank 1 will suffer sigkill\n", killed.stderr
        job.wait_for("restart 1", times=2)
        assert here.regrow("stop").returncode == 0
        assert job.wait() == 75, job.output
        assert "asked to by regrow stop" in job.output
        assert "it can be run again, from step 0: without --checkpoint-dir nothing was saved" in job.output
    here.assert_nothing_left()


def test_two_nodes_find_each_other_on_loopback(here: Site) -> None:
    script = here.script(
        "import os; e = os.environ\n"
        "print('rank', e['RANK'], 'of', e['WORLD_SIZE'], 'on', e['GROUP_RANK'], 'at', e['MASTER_ADDR'], flush=True)"
    )
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{held_port()}", script]
    with here.start("run", "--node-rank", "1", *words, REGROW_TOKEN="both know") as one:
        one.wait_for("waiting for node 0")
        with here.start("run", "--node-rank", "0", *words, REGROW_TOKEN="both know") as zero:
            assert (zero.wait(), one.wait()) == (0, 0), zero.output + one.output
            assert "rank 0 of 2 on 0 at 127.0.0.1" in zero.output
            assert "rank 1 of 2 on 1 at 127.0.0.1" in one.output
    here.assert_nothing_left()


def test_a_node_with_another_token_is_refused(here: Site) -> None:
    words = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{held_port()}", here.script("")]
    with here.start("run", "--node-rank", "0", *words, REGROW_TOKEN="one") as zero:
        zero.wait_for("records and logs in")
        refused = here.regrow("run", "--node-rank", "1", *words, REGROW_TOKEN="another")
        assert refused.returncode == 2
        assert "refused the token" in refused.stderr
        zero.signal(2)
        assert zero.wait() == 75
    here.assert_nothing_left()

"""All nodes restarted in turns: the order, the progress, and what stops it, against a job that is played."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from regrow.agent.workers.processes import all_processes
from regrow.core.errors import CoordinatorGone, DeadlineExceeded, RegrowError, UsageError
from regrow.core.ids import Generation, NodeId, Rank, StepNo, WorkerId
from regrow.launch.maintenance import rolling_restart
from regrow.launch.maintenance.rolling_restart import RollingRestart, alone, commanded
from regrow.membership.orders import AnswerScale
from regrow.membership.server.requests import MoveRequest
from regrow.membership.view import JobView, NodeView, WorkerView


class PlayedJob:
    """Two nodes of a rank each and a spare; a move happens at once, a restarted node is away for a look."""

    def __init__(self) -> None:
        self.home = {0: "n0", 1: "n1"}
        self.nodes = ["n0", "n1", "n2"]
        self.away: dict[str, int] = {}
        self.delay: dict[str, int] = {}
        """Looks until a restarted node is seen away."""
        self.agents: dict[str, str] = {}
        self.restarted: list[str] = []
        self.said: list[str] = []
        self.refusals = 0
        self.gone = 0
        self.fails: dict[str, int] = {}
        self.looks = 0

    def status(self) -> JobView:
        if self.gone:
            self.gone -= 1
            raise CoordinatorGone("nobody answers")
        self.looks += 1
        self.away = {node: looks - 1 for node, looks in self.away.items() if looks}
        for node in [node for node, looks in self.delay.items() if looks == 0]:
            self.away[node] = 2
            self.delay.pop(node)
        self.delay = {node: looks - 1 for node, looks in self.delay.items()}
        ranks = [
            WorkerView(WorkerId(f"{node}.{rank}"), NodeId(node), Rank(rank), 1, "member", StepNo(1))
            for rank, node in self.home.items()
        ]
        nodes = [self._node(node) for node in self.nodes]
        return JobView("j", "training", Generation(1), StepNo(1), 0, 0, ranks, [], nodes)

    def _node(self, node: str) -> NodeView:
        agent = self.agents.get(node, f"first of {node}")
        return NodeView(NodeId(node), f"host of {node}", "", node in self.away, agent=agent)

    def move(self, scaling: MoveRequest) -> AnswerScale:
        if self.refusals:
            self.refusals -= 1
            return AnswerScale(False, "other nodes have room for 0")
        free = next(node for node in self.nodes if node not in self.home.values())
        self.home = {rank: free if node == scaling.node else node for rank, node in self.home.items()}
        return AnswerScale(True, "ranks will leave")

    def restart(self, node: NodeView) -> int:
        assert node.node not in self.home.values(), "a node with ranks is restarted"
        self.restarted.append(node.node)
        self.away[node.node] = 2
        return self.fails.pop(node.node, 0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling_restart, "_LOOK_S", 0.0)
    monkeypatch.setattr(rolling_restart, "_SETTLE_S", 0.0)


def rolling(job: PlayedJob, folder: Path, patience: float = 60.0) -> RollingRestart:
    file = folder / "rolling-restart.json"
    return RollingRestart(lambda: job, file, restart=job.restart, say=job.said.append, patience=patience)


def test_all_nodes_are_restarted_while_no_rank_is_on_them_the_spare_first(tmp_path: Path) -> None:
    job = PlayedJob()
    job.gone, job.refusals = 0, 1
    assert rolling(job, tmp_path).run() == 0
    assert job.restarted == ["n2", "n0", "n1"]
    assert job.said[-1] == "all 3 nodes are restarted" and any("2 of 3: n0 is back" in line for line in job.said)
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    job = PlayedJob()
    job.fails = {"n0": 3}
    assert rolling(job, tmp_path).run() == 1
    assert job.said[-1] == "n0: the command ended with 3; stopped, run it again to go on here"
    assert json.loads((tmp_path / "rolling-restart.json").read_text()) == {"done": ["n2"], "wanted": []}
    assert rolling(job, tmp_path).run() == 0
    assert job.restarted == ["n2", "n0", "n0", "n1"] and "goes on: n2 done before" in job.said
    job.fails = {"n0": 3}
    rolling(job, tmp_path).run([NodeId("n1"), NodeId("n0")])
    assert rolling(job, tmp_path).run([NodeId("n1"), NodeId("n0")], again=True) == 0
    assert job.restarted[4:] == ["n1", "n0", "n1", "n0"]


def test_it_waits_for_another_coordinator_and_for_a_slot(tmp_path: Path) -> None:
    job = PlayedJob()
    restart = rolling(job, tmp_path)
    job.refusals = 3
    assert restart.run([NodeId("n1")]) == 0
    job.gone = 0

    def elected(node: NodeView) -> int:
        job.gone = 5
        return job.restart(node)

    again = RollingRestart(lambda: job, tmp_path / "f", restart=elected, say=job.said.append, patience=60.0)
    assert again.run([NodeId("n0")]) == 0


def test_the_reason_of_a_refusal_is_said_while_it_is_waited_for_and_once(tmp_path: Path) -> None:
    job = PlayedJob()
    job.refusals = 3
    assert rolling(job, tmp_path).run([NodeId("n1")]) == 0
    assert job.said.count("n1: waits, 60 s at most: other nodes have room for 0") == 1


def test_ctrl_c_says_that_it_goes_on_there_and_nothing_is_forgotten(tmp_path: Path) -> None:
    job = PlayedJob()

    def interrupted(node: NodeView) -> int:
        if node.node == "n0":
            raise KeyboardInterrupt
        return job.restart(node)

    file = tmp_path / "f"
    stopped = RollingRestart(lambda: job, file, restart=interrupted, say=job.said.append, patience=60.0)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert job.said[-1] == "n0: stopped, run it again to go on here"
    again = RollingRestart(lambda: job, file, restart=job.restart, say=job.said.append, patience=60.0)
    assert again.run() == 0
    assert job.restarted == ["n2", "n0", "n1"]
    assert any(line.startswith("2 of 3: n0 is back") for line in job.said), "the numbers go on"


def test_nodes_that_are_named_are_restarted_though_another_restart_had_done_them(tmp_path: Path) -> None:
    job = PlayedJob()
    job.fails = {"n0": 3}
    assert rolling(job, tmp_path).run() == 1
    assert rolling(job, tmp_path).run([NodeId("n2")]) == 0
    assert job.restarted == ["n2", "n0", "n2"]


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    refused = pytest.raises(UsageError, match="another rolling restart of this job is under way")
    with alone(tmp_path), refused, alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


@pytest.mark.parametrize("error", [CoordinatorGone, DeadlineExceeded])
def test_it_waits_for_a_coordinator_that_is_gone_or_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[RegrowError]
) -> None:
    job, restarted, late = PlayedJob(), list[str](), list[RegrowError]()
    status, move = job.status, job.move

    def slow_status() -> JobView:
        if restarted and len(late) < 5:
            late.append(error("no answer"))
            raise late[-1]
        return status()

    def slow_move(request: MoveRequest) -> AnswerScale:
        if len(late) < 7:
            late.append(error("no answer"))
            raise late[-1]
        return move(request)

    def restart(node: NodeView) -> int:
        restarted.append(node.node)
        return job.restart(node)

    monkeypatch.setattr(job, "status", slow_status)
    monkeypatch.setattr(job, "move", slow_move)
    waits = RollingRestart(lambda: job, tmp_path / "f", restart=restart, say=job.said.append, patience=60.0)
    assert waits.run() == 0
    assert len(late) == 7


def test_an_election_as_a_node_gets_empty_is_waited_for(tmp_path: Path) -> None:
    """The job does not answer right after the look that showed the node without ranks."""
    job = PlayedJob()
    status = job.status

    def status_once() -> JobView:
        view = status()
        job.gone = 0 if job.restarted else 1
        return view

    job.status = status_once  # type: ignore[method-assign]
    assert rolling(job, tmp_path).run([NodeId("n2")]) == 0
    assert job.restarted == ["n2"]


def test_a_node_that_was_given_back_meanwhile_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = PlayedJob()
    node = job._node

    def left(name: str) -> NodeView:
        gone = name == "n0" and "n2" in job.restarted
        return msgspec.structs.replace(node(name), away=gone or name in job.away, left=gone)

    monkeypatch.setattr(job, "_node", left)
    job.home = {1: "n1"}
    assert rolling(job, tmp_path).run([NodeId("n2"), NodeId("n0")]) == 1
    assert job.restarted == ["n2"] and job.said[-1].startswith("n0: it has left the job; stopped")


class PlayedClock:
    """Time that goes on by a second at each sleep only."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PlayedClock:
    played = PlayedClock()
    monkeypatch.setattr(rolling_restart, "time", played)
    return played


@pytest.mark.usefixtures("clock")
def test_a_node_that_stays_full_or_away_stops_it(tmp_path: Path) -> None:
    job = PlayedJob()
    job.refusals = 10**9
    assert rolling(job, tmp_path, patience=30.0).run([NodeId("n0")]) == 1
    assert "other nodes have room for 0" in job.said[-1] and job.restarted == []
    job.refusals = 0

    def never(node: NodeView) -> int:
        job.away[node.node] = 10**9
        return 0

    lost = RollingRestart(lambda: job, tmp_path / "f", restart=never, say=job.said.append, patience=30.0)
    assert lost.run([NodeId("n0")]) == 1
    assert "n0: it was not back within 30 s" in job.said[-1]
    with pytest.raises(UsageError, match="no node n9"):
        rolling(job, tmp_path).run([NodeId("n9")])


def test_a_node_whose_command_returns_at_once_is_back_only_when_it_has_gone(
    tmp_path: Path, clock: PlayedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rolling_restart, "_SETTLE_S", 2.0)
    job = PlayedJob()

    def reboots(node: NodeView) -> int:
        assert not job.away and not job.delay, "a node is restarted while another is away"
        job.restarted.append(node.node)
        job.delay[node.node] = 20
        return 0

    restart = RollingRestart(lambda: job, tmp_path / "f", restart=reboots, say=job.said.append, patience=600.0)
    assert restart.run() == 0
    assert job.restarted == ["n2", "n0", "n1"] and not job.delay and clock.now > 3 * 20


@pytest.mark.usefixtures("clock")
def test_a_node_that_never_goes_is_not_taken_for_restarted_and_another_agent_is(tmp_path: Path) -> None:
    job = PlayedJob()
    stays = RollingRestart(lambda: job, tmp_path / "f", restart=lambda node: 0, say=job.said.append, patience=30.0)
    assert stays.run() == 1
    assert "n2: the command has ended with 0, but within 30 s the node neither left the job" in job.said[-1]
    assert not (tmp_path / "f").exists(), "it is not noted as done"

    def at_once(node: NodeView) -> int:
        job.agents[node.node] = f"second of {node.node}"
        return 0

    quick = RollingRestart(lambda: job, tmp_path / "f", restart=at_once, say=job.said.append, patience=30.0)
    assert quick.run() == 0


def test_a_command_finds_its_node(tmp_path: Path) -> None:
    node = NodeView(NodeId("n1"), "ten.example", "", False)
    told = commanded(f'echo "$REGROW_NODE $REGROW_HOST" > {tmp_path}/told; exit 4', dict(os.environ), within=60.0)
    assert told(node) == 4
    assert (tmp_path / "told").read_text() == "n1 ten.example\n"


def test_a_command_that_takes_too_long_is_ended_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"

    class Slow(subprocess.Popen[bytes]):
        """The time that it is given is over as soon as it has started what is to be ended."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            until = time.monotonic() + 60.0
            while not (pid.exists() and pid.read_text().endswith("\n")):
                assert time.monotonic() < until, "the command does not begin"
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    stuck = commanded(f"sleep 600 & echo $! > {pid}; wait", dict(os.environ), within=60.0)
    assert stuck(NodeView(NodeId("n1"), "ten.example", "", False)) == 124
    until = time.monotonic() + 60.0
    while _runs(int(pid.read_text())):
        assert time.monotonic() < until, "what the command has started is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_ends_with_the_rolling_restart_however_that_ends(tmp_path: Path, number: int) -> None:
    script = (
        "import os, sys\n"
        "from regrow.core.ids import NodeId\n"
        "from regrow.launch.maintenance.rolling_restart import commanded\n"
        "from regrow.membership.view import NodeView\n"
        "commanded(sys.argv[1], dict(os.environ), within=600.0)(NodeView(NodeId('n1'), 'ten.example', '', False))\n"
    )
    pids = tmp_path / "pids"
    command = f"sleep 600 & echo $$ $! > {pids}; wait"
    with subprocess.Popen([sys.executable, "-c", script, command], stderr=subprocess.DEVNULL) as client:
        _until(lambda: pids.exists() and pids.read_text().endswith("\n"), "the command begins")
        client.send_signal(number)
    leader, started = map(int, pids.read_text().split())
    _until(lambda: not _runs(leader) and not _runs(started) and not _group(leader), "all that it started has ended")


def test_a_daemon_that_a_command_leaves_runs_on_and_nothing_of_ours_does(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    ended = commanded(f"sleep 600 & echo $$ $! > {pids}; exit 3", dict(os.environ), within=60.0)
    assert ended(NodeView(NodeId("n1"), "ten.example", "", False)) == 3
    leader, daemon = map(int, pids.read_text().split())
    try:
        _until(lambda: _group(leader) == [daemon], "the daemon alone is there")
    finally:
        os.kill(daemon, signal.SIGKILL)


def _until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < until, f"not seen: {what}"
        time.sleep(0.01)


def _group(leader: int) -> list[int]:
    """The living processes of a process group."""
    return [stat.pid for stat in all_processes() if stat.group == leader and stat.state not in "ZX"]


def _runs(pid: int) -> bool:
    """False also for a process that has ended and that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

"""A real Slurm on this machine: one controller and some nodes, each in namespaces of its own. Removed at the end.

Needs root, and Slurm: from the distribution's packages where they can be installed; else the test is skipped, and
says why. A node is a network, a name, a process tree and a mount table of its own, so it dies as a machine does: all at
once, without a word. Its link can be cut instead.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from tests.process.launching import PATIENCE, SOURCE, warm
from tests.process.network import Network, network
from tests.process.warm_client import WarmServer
from tests.slurm.relay import DOOR

PACKAGES = ("slurm-wlm", "munge")
NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "unshare", "nsenter", "setpriv", "ip")
GRACE_S = 60
_APT_S = 240.0
_START_S = 120.0
_CONTROLLER = 0
"""Number of the controller's host in the network; node0 is the next one."""
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
_RELAY = Path(__file__).with_name("relay.py")
Found = TypeVar("Found")

_CONFIG = """\
ClusterName=test
SlurmctldHost={here}({controller})
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=10
KillWait=5
MessageTimeout=5
InactiveLimit=0
ReturnToService=2
SlurmdParameters=config_overrides
TopologyPlugin=topology/tree
"""
_PARTITIONS = """\
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=100 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
"""


class SlurmCluster:
    """Nodes `node0`, `node1` and so on, and Slurm's commands.

    Args:
        net: of the controller and the nodes.
        home: for all that Slurm writes.
        proctrack: the plugin that knows a task's processes. `pgid` signals tasks alone, as cgroups do, which are not
            to be had everywhere.
        partitions: lines of slurm.conf.
        woven: the two switches have every second node, not each a half.
        cold: what runs on nodes is started by Python itself, not forked from a process that has torch imported.
    """

    def __init__(self, net: Network, home: Path, proctrack: str, partitions: str, *, woven: bool, cold: bool) -> None:
        self._net, self.home = net, home
        self._proctrack, self._partitions, self._woven = proctrack, partitions, woven
        self._cold = cold
        self._inits: dict[str, subprocess.Popen[bytes]] = {}
        self._warm: dict[str, WarmServer] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.nodes = [f"node{index}" for index in range(len(net.hosts) - 1)]

    def open(self) -> None:
        """Start it, and wait until all nodes are idle."""
        for folder in ("munge", "state", "spool"):
            (self.home / folder).mkdir(mode=0o755)
        self._write_config()
        key = self.home / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        words = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.home}/munge/socket"]
        for name in ("pid", "seed", "log"):
            words.append(f"--{name}-file={self.home}/munge/{name}")
        self._daemons.append(self._start(words, self.home / "munged.out"))
        self.until(lambda: (self.home / "munge" / "socket").exists() or None, "munged listens")
        self._daemons.append(
            self._start([*self._at(_CONTROLLER), "slurmctld", "-D", "-c"], self.home / "slurmctld.out")
        )
        self.restore()

    def restore(self) -> None:
        """Start the nodes that do not run, and wait until all can be had, but for those that are drained."""
        for node in self.nodes:
            if node not in self._inits:
                self.boot(node)
        ready = {"idle", "drained"}
        self.until(
            lambda: (len(states := self.states()) == len(self.nodes) and {*states.values()} <= ready) or None,
            "all nodes are idle",
            _START_S,
        )

    def boot(self, node: str) -> None:
        """Start a node, for the first time or again."""
        (self.home / "spool" / node).mkdir(exist_ok=True)
        inside = f"hostname {node}; slurmd -D -N {node} & wait; sleep infinity"
        unshare = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        self._inits[node] = self._start(
            [*self._at(self._host(node)), *unshare, "sh", "-c", inside], self.home / f"{node}.out"
        )
        if not self._cold:
            pid = self._inits[node].pid
            ours, theirs = (f"/proc/{each}/ns/pid_for_children" for each in ("self", pid))
            # That of a node can be read as soon as it has its first process.
            self.until(lambda: _target(theirs) not in (None, _target(ours)) or None, f"{node} is there")
            self._warm[node] = warm().on_node(pid, self.home / "spool" / node / DOOR)

    def command(self) -> list[str]:
        """Command with which nodes start regrow; empty: as in `regrow slurm submit`."""
        return [] if self._cold else [sys.executable, "-S", str(_RELAY), str(self.home / "spool")]

    def kill(self, node: str) -> None:
        """All that runs there ends at once, and nobody sees another's end."""
        self._leave(node)
        self._inits.pop(node).kill()
        self.until(lambda: not self._net.processes(self._host(node)) or None, f"{node} has ended")

    def cut(self, node: str) -> None:
        """Nothing comes to it or from it any more."""
        self._net.cut(self._host(node))

    def join(self, node: str) -> None:
        """Its link is as before."""
        self._net.join(self._host(node))

    def processes(self, node: str) -> list[str]:
        """The command lines of what runs there."""
        found = []
        for pid in self._net.processes(self._host(node)):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
        return found

    def run(self, *words: str, cwd: Path | None = None, **more: str) -> "subprocess.CompletedProcess[str]":
        """A command on the controller's host, as from a login node."""
        return subprocess.run(
            [*self._at(_CONTROLLER), *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=self.environment() | more,
            cwd=cwd,
            check=False,
        )

    def ask(self, *words: str) -> str:
        """Output of a Slurm command."""
        done = self.run(*words)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """Node to state; empty while the controller does not answer."""
        done = self.run("sinfo", "-h", "-N", "-o", "%N|%T")
        pairs = (line.partition("|") for line in done.stdout.split())
        return {node: state for node, _, state in pairs}

    def queue(self) -> dict[str, str]:
        """Name to state, of all jobs that wait or run."""
        lines = self.ask("squeue", "-h", "-o", "%j|%T").splitlines()
        return {name: state for name, _, state in (line.partition("|") for line in lines)}

    def environment(self) -> dict[str, str]:
        """For Slurm's commands, and what they start."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "REGROW_"))}
        path = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        ours = {"SLURM_CONF": f"{self.home}/slurm.conf", "PATH": _PATH, "PYTHONPATH": path, "USER": "root"}
        return kept | ours | {"OMP_NUM_THREADS": "1", "REGROW_NO_HEALTH": "1"}

    def until(self, look: Callable[[], Found | None], what: str, patience: float = PATIENCE) -> Found:
        """Look until there is something. Slurm tells nobody, so it is asked."""
        deadline = time.monotonic() + patience
        while (found := look()) is None:
            assert time.monotonic() < deadline, f"not within {patience:g} s: {what}; {self.tell()}"
            time.sleep(0.1)
        return found

    def address(self, node: str) -> str:
        """Of a node's host."""
        return self._net.address(self._host(node))

    def tell(self) -> str:
        """Slurm's state, for a test that fails."""
        queue = self.run("squeue", "-t", "all", "-o", "%i %j %T %r %N %k").stdout
        return f"{self.states()}\n{queue}"

    def close(self) -> None:
        """End what was started, process by process, and wait until all of it has ended."""
        for node in self.nodes:
            self._leave(node)
        for init in self._inits.values():
            init.kill()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for process in (*self._inits.values(), *self._daemons):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def _write_config(self) -> None:
        names = {"here": socket.gethostname().partition(".")[0], "controller": self._net.address(_CONTROLLER)}
        text = _CONFIG.format(home=self.home, proctrack=self._proctrack, **names)
        for node in self.nodes:
            address = self.address(node)
            text += (
                f"NodeName={node} NodeAddr={address} Port=17000 CPUs=4 CoresPerSocket=4 RealMemory=1000 State=UNKNOWN\n"
            )
        (self.home / "slurm.conf").write_text(text + self._partitions)
        half = (len(self.nodes) + 1) // 2
        halves = (self.nodes[::2], self.nodes[1::2]) if self._woven else (self.nodes[:half], self.nodes[half:])
        leaves = [each for each in halves if each]
        lines = [f"SwitchName=leaf{number} Nodes={','.join(nodes)}" for number, nodes in enumerate(leaves)]
        lines.append(f"SwitchName=spine Switches={','.join(f'leaf{number}' for number in range(len(leaves)))}")
        (self.home / "topology.conf").write_text("\n".join(lines) + "\n")

    def _leave(self, node: str) -> None:
        if (server := self._warm.pop(node, None)) is not None:
            server.close()

    def _host(self, node: str) -> int:
        return self.nodes.index(node) + 1

    def _at(self, host: int) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._net.name(host)}", "--"]

    def _start(self, words: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
        with output.open("ab") as file:
            return subprocess.Popen(
                [*_ENDS_WITH_US, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environment(),
                start_new_session=True,
            )


def _target(link: str) -> str | None:
    try:
        return os.readlink(link)
    except OSError:
        return None


def need_slurm() -> None:
    """Skips the test where Slurm is not there; who sets `REGROW_TEST_INSTALL=1` has it installed, as root."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons and their namespaces need root")
    asked = os.environ.get("REGROW_TEST_INSTALL", "") == "1"
    if _missing() and asked and shutil.which("apt-get") is not None:
        _install()
    if missing := _missing():
        how = "could not be installed by apt-get" if asked else "are installed with REGROW_TEST_INSTALL=1"
        pytest.skip(f"{', '.join(missing)} not found; {' and '.join(PACKAGES)} {how}")


def _install() -> None:
    """With apt-get, of which only one works at a time: other test processes wait, and find that it is done."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    with open(Path(tempfile.gettempdir()) / "regrow-tests-install.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _missing():
            return
        for words in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *PACKAGES]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["apt-get", *words], env=environment, capture_output=True, timeout=_APT_S, check=False)


def _missing() -> list[str]:
    return [name for name in NEEDED if shutil.which(name, path=_PATH) is None]


@contextmanager
def slurm_cluster(
    nodes: int, *, proctrack: str = "pgid", partitions: str = "", woven: bool = False, cold: bool = False
) -> Iterator[SlurmCluster]:
    """A Slurm with `nodes` idle nodes. `partitions`: lines of slurm.conf, in place of the tests' own."""
    partitions = partitions or _PARTITIONS.format(grace=GRACE_S)
    need_slurm()
    home = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    home.chmod(0o755)
    try:
        with network(nodes + 1) as net:
            made = SlurmCluster(net, home, proctrack, partitions, woven=woven, cold=cold)
            try:
                made.open()
                yield made
            finally:
                made.close()
    finally:
        shutil.rmtree(home, ignore_errors=True)

"""The only module that runs Slurm's commands. Each has a deadline, and errors contain Slurm's own message."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from regrow.core.errors import RegrowError, UsageError
from regrow.core.ids import Seconds
from regrow_clusters.slurm.job_file import SlurmJobSpec
from regrow_clusters.slurm.reading import (
    NODES_FORMAT,
    QUEUE_FORMAT,
    JobNote,
    NodeState,
    SlurmJob,
    node_address,
    note_text,
    read_node_count,
    read_nodes,
    read_note,
    read_queue,
    read_topology,
    submitted,
)

_DEADLINE_S: Final[Seconds] = 60.0
_TOPOLOGY_S: Final[Seconds] = 10.0
_KEPT: Final = ("SLURM_CONF", "SLURM_CONF_SERVER")
_CURES: Final = {
    "Invalid partition": "sinfo lists the partitions; name one in [gang] or [elastic]",
    "Invalid account": "name your account in options, --account=NAME",
    "Invalid qos": "sacctmgr show qos lists them; leave --qos out, or name another",
    "not permitted to use this partition": "ask for the right to use it, or name another one; scontrol show partition",
    "Invalid generic resource": "sinfo -o '%P %G' lists what the partitions' nodes have",
    "Invalid feature specification": "sinfo -o '%P %f' lists the features that --constraint can name",
    "Invalid node name": "sinfo -N lists the nodes",
    "reservation is invalid": "scontrol show reservation lists those that you may use",
    "unrecognized option": "sbatch --help lists its options; each is one word, --name=value",
    "Requested node configuration is not available": (
        "no node of the partition has what options ask for, or it has fewer nodes than the gang with its spares"
    ),
    "More processors requested": "ask for fewer cores, or fewer nodes",
    "Node count specification invalid": "the partition has fewer nodes than the gang with its spares",
    "Unable to contact slurm controller": "is this a machine of the cluster, and slurmctld up?",
    "establish a configuration source": "is this a machine of the cluster? SLURM_CONF says where slurm.conf is",
    "Access/permission denied": "it is another user's, or an operator's right is needed",
    "Invalid user id": "it is another user's, or an operator's right is needed",
}


class SlurmFailure(RegrowError):
    """A command of Slurm failed, or did not end in time. `cause` contains its message."""


class SlurmClient:
    """Slurm's commands, run as the user of this process.

    Args:
        environment: of the commands; Slurm's variables about this task's own job are removed.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {
            name: value
            for name, value in environment.items()
            if not name.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "REGROW_SLURM_")) or name in _KEPT
        }
        self._user = environment.get("SLURM_JOB_USER") or environment.get("USER") or ""

    def submit(self, script: str) -> int:
        """Submit a batch script; returns the Slurm job's id. Raises `SlurmFailure`."""
        answer = self._run(["sbatch", "--parsable", "--export=ALL"], stdin=script)
        number = submitted(answer)
        if number is None:
            raise SlurmFailure(f"sbatch did not print the id of its job: {answer.strip()!r}")
        return number

    def check(self, script: str) -> None:
        """Check that Slurm would accept a batch script, without submitting it. Raises `SlurmFailure`."""
        self._run(["sbatch", "--test-only"], stdin=script)

    def batch_script(self, job_id: int) -> str:
        """Batch script of a Slurm job. Raises `SlurmFailure`."""
        return self._run(["scontrol", "write", "batch_script", str(job_id), "-"])

    def queue(self, name: str) -> list[SlurmJob]:
        """The Slurm jobs of a job, recently ended ones included. Raises `SlurmFailure`."""
        who = ["-u", self._user] if self._user else ["--me"]
        return read_queue(self._run(["squeue", "-h", "-t", "all", *who, "-o", QUEUE_FORMAT]), name)

    def names(self) -> list[str]:
        """Names of this user's Slurm jobs in the queue, without those of replicas. Raises `SlurmFailure`."""
        who = ["-u", self._user] if self._user else ["--me"]
        return sorted({name for name in self._run(["squeue", "-h", *who, "-o", "%j"]).split() if "+" not in name})

    def nodes(self, hosts: Sequence[str]) -> list[NodeState]:
        """States of these nodes. Raises `SlurmFailure`."""
        return read_nodes(self._run(["sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", NODES_FORMAT]))

    def node_count(self) -> tuple[int, int]:
        """Number of all nodes of the cluster, and of those that are drained or down. Raises `SlurmFailure`."""
        return read_node_count(self._run(["sinfo", "-h", "-N", "-o", NODES_FORMAT]))

    def address(self, host: str) -> str:
        """Address at which Slurm reaches a node. Raises `SlurmFailure`."""
        return node_address(self._run(["scontrol", "-o", "show", "node", host])) or host

    def topology(self) -> dict[str, list[str]]:
        """The switches above each host; empty if the cluster does not configure them. Raises `SlurmFailure`."""
        return read_topology(self._run(["scontrol", "show", "topology"], within=_TOPOLOGY_S))

    def cancel(self, job_id: int, *, pending: bool = False) -> None:
        """End a Slurm job: SIGTERM, and after KillWait SIGKILL. `pending`: only while it waits."""
        self._run(["scancel", *(["--state=PENDING"] if pending else []), str(job_id)])

    def leave(self, job_id: int) -> None:
        """Ask a running Slurm job to leave: SIGTERM to its steps, and no SIGKILL after it."""
        self._run(["scancel", "--signal=TERM", str(job_id)])

    def drain_node(self, host: str, reason: str) -> None:
        """Drain a node, so that it takes no new jobs; needs an operator's rights. Raises `SlurmFailure`."""
        self._run(["scontrol", "update", f"nodename={host}", "state=drain", f"reason={reason}"])

    def on_host(self, job_id: int, host: str, arguments: Sequence[str], *, within: Seconds = 30.0) -> str:
        """Run a command on a node of a job, beside its tasks; returns its output. Raises `SlurmFailure`."""
        step = ["srun", f"--jobid={job_id}", "--overlap", "-N1", "-n1", "-w", host, "--quiet"]
        return self._run([*step, *arguments], within=within)

    def note(self, spec_dir: str, name: str, job: SlurmJob | None) -> JobNote:
        """Read a job's note, from the comment of its gang, or from a file in the shared folder."""
        if spec_dir:
            try:
                return read_note((Path(spec_dir) / f"{name}.regrow").read_text(encoding="utf-8"))
            except OSError:
                return JobNote()
        return read_note(job.comment if job is not None else "")

    def write_note(self, spec: SlurmJobSpec, job_id: int, note: JobNote) -> None:
        """Write a job's note. Raises `SlurmFailure`."""
        if not spec.rendezvous_dir:
            self._run(["scontrol", "update", f"jobid={job_id}", f"comment={note_text(note)}"])
            return
        place = Path(spec.rendezvous_dir) / f"{spec.name}.regrow"
        new = place.with_name(f"{place.name}.{job_id}.new")
        try:
            new.write_text(note_text(note) + "\n", encoding="utf-8")
            new.replace(place)
        except OSError as error:
            hint = "rendezvousDir must be a folder that all nodes share and you may write to"
            raise SlurmFailure(f"{place} cannot be written: {error.strerror or error}", hint=hint) from error

    def _run(self, arguments: list[str], *, stdin: str = "", within: Seconds = _DEADLINE_S) -> str:
        try:
            done = subprocess.run(
                arguments,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=within,
                env=self._environment,
                check=False,
            )
        except FileNotFoundError as error:
            raise UsageError(f"there is no {arguments[0]} here", hint="run this where Slurm's commands are") from error
        except subprocess.TimeoutExpired as error:
            raise SlurmFailure(f"{arguments[0]} did not end within {within:g} s") from error
        if done.returncode:
            said = " ".join(line.strip() for line in done.stderr.splitlines()[-3:]) or f"exit code {done.returncode}"
            raise SlurmFailure(
                f"{arguments[0]}: {said}", hint=next((cure for text, cure in _CURES.items() if text in said), "")
            )
        return done.stdout

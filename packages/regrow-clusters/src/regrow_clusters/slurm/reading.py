"""Parsers for the answers of Slurm's commands. Pure; the formats are set, and the same from 22.05 on."""

import re
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from regrow.core.ids import Instant

QUEUE_FORMAT: Final = "%i|%j|%T|%r|%B|%N|%x|%k"
NODES_FORMAT: Final = "%N|%T|%E"
_DONE: Final = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
)
_RUNS: Final = frozenset({"SIGNALING", "RESIZING"})
"""Slurm's brief states of a running job that was sent a signal or has lost a node."""
_RANGES: Final = re.compile(r"([^,\[\]]*)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")


class SlurmJob(msgspec.Struct, frozen=True):
    """A line of squeue. `place`: of a replica beyond the gang; None: it is a gang. `excluded`: its excluded nodes."""

    job_id: int
    name: str
    place: int | None
    state: str
    reason: str = ""
    batch_host: str = ""
    nodes: tuple[str, ...] = ()
    comment: str = ""
    excluded: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """True if it has ended for good."""
        return self.state in _DONE


class NodeState(msgspec.Struct, frozen=True):
    """A line of sinfo. `reason`: why the node is drained or down; empty if none was given."""

    node: str
    state: str
    reason: str


class JobNote(msgspec.Struct, frozen=True):
    """Note by which others find a gang: its coordinator's address, `host:port`, and the folder of its records."""

    at: str = ""
    home: str = ""


class JobRequests(msgspec.Struct, frozen=True, omit_defaults=True):
    """Users' requests to a running job; a file on the gang's first node.

    `replicas`: the wanted number; None: as in the job's file. `avoid`: nodes to exclude, and until when, in seconds
    since the epoch. `over`: the job must end, and no replica or gang is started again.
    """

    replicas: int | None = None
    avoid: dict[str, Instant] = {}
    over: bool = False

    def avoided(self, wall: Instant) -> dict[str, Instant]:
        """The nodes that are still to be excluded. `wall`: time now, in seconds since the epoch."""
        return {node: until for node, until in self.avoid.items() if until > wall}

    def on_clock(self, now: Instant, wall: Instant) -> "JobRequests":
        """The same requests with times of another clock, which shows `now` at `wall`."""
        return msgspec.structs.replace(self, avoid={node: now + at - wall for node, at in self.avoided(wall).items()})


def read_queue(text: str, name: str) -> list[SlurmJob]:
    """Parse squeue's lines in `QUEUE_FORMAT`: the Slurm jobs of the job of this name, the oldest first."""
    found = []
    for line in text.splitlines():
        fields = line.split("|", 7)
        if len(fields) < 8 or not fields[0].isdigit():
            continue
        number, called, state, reason, host, nodes, excluded, comment = fields
        place = _place(called, name)
        if called != name and place is None:
            continue
        found.append(
            SlurmJob(
                int(number),
                called,
                place,
                "RUNNING" if state in _RUNS else state,
                "" if reason == "None" else reason,
                "" if host == "n/a" else host,
                host_list(nodes),
                "" if comment == "(null)" else comment,
                () if excluded in ("(null)", "n/a") else host_list(excluded),
            )
        )
    return sorted(found, key=lambda job: job.job_id)


def _place(called: str, name: str) -> int | None:
    stem, plus, place = called.rpartition("+")
    return int(place) if plus and stem == name and place.isdigit() and place.isascii() else None


def host_list(text: str) -> tuple[str, ...]:
    """Expand Slurm's short form of hosts, in its order: `gpu[01-03,7],login1`."""
    found: list[str] = []
    for before, ranges, after in _RANGES.findall(text):
        if not ranges:
            if before + after:
                found.append(before + after)
            continue
        for span in ranges.split(","):
            low, dash, high = span.partition("-")
            numbers = range(int(low), int(high if dash else low) + 1)
            found.extend(f"{before}{str(number).zfill(len(low))}{after}" for number in numbers)
    return tuple(found)


def read_nodes(text: str) -> list[NodeState]:
    """Parse sinfo's lines in `NODES_FORMAT`, each node once; marks are removed: `*` in `draining*` means no answer."""
    found: dict[str, NodeState] = {}
    for line in text.splitlines():
        node, _, rest = line.partition("|")
        state, bar, reason = rest.partition("|")
        if node and bar:
            found[node] = NodeState(node, state.rstrip("*~#!%$@^-+").lower(), "" if reason == "none" else reason)
    return list(found.values())


def read_node_count(text: str) -> tuple[int, int]:
    """Number of all nodes, and of those that are drained or down, from the input of `read_nodes`."""
    found = read_nodes(text)
    return len(found), sum(each.state.startswith(("drain", "down", "fail")) for each in found)


def node_address(text: str) -> str:
    """Slurm's own address of a node, from `scontrol -o show node`; empty: it has none."""
    match = re.search(r"\bNodeAddr=(\S+)", text)
    return match.group(1) if match else ""


def submitted(text: str) -> int | None:
    """The job's id in the output of `sbatch --parsable`, `17` or `17;cluster`; None: there is none."""
    fields = text.strip().splitlines()
    number = fields[-1].partition(";")[0] if fields else ""
    return int(number) if number.isdigit() else None


def read_note(text: str) -> JobNote:
    """Parse a Slurm comment. A comment that is not regrow's gives an empty note."""
    mark, *fields = text.split() or [""]
    said = dict(word.partition("=")[::2] for word in fields) if mark == "regrow" else {}
    return JobNote(said.get("at", ""), unquote(said.get("home", "")))


def note_text(note: JobNote) -> str:
    """Text of a note for `read_note`; without quotes or bars, which Slurm's output could not show."""
    return f"regrow at={note.at} home={quote(note.home)}"


def read_topology(text: str) -> dict[str, list[str]]:
    """Switches or blocks above each host, from the root down, parsed from `scontrol show topology`."""
    found: list[tuple[int, str, tuple[str, ...]]] = []
    for line in text.splitlines():
        said = dict(word.partition("=")[::2] for word in line.split())
        name = said.get("SwitchName") or said.get("BlockName")
        level = said.get("Level", "0")
        if name and level.isdigit():
            found.append((int(level), name, host_list(said.get("Nodes", ""))))
    paths: dict[str, list[str]] = {}
    for _, name, hosts in sorted(found, key=lambda each: -each[0]):
        for host in hosts:
            paths.setdefault(host, []).append(name)
    return paths


def failure_domain(address: str, pattern: str) -> str:
    """Failure domain of a node, from `SLURM_TOPOLOGY_ADDR` and its pattern: its switch; empty: unknown."""
    path, kinds = address.split("."), pattern.split(".")
    if len(path) < 2 or len(path) != len(kinds) or kinds[-1] != "node":
        return ""
    return re.sub(r"[^A-Za-z0-9_-]", "_", path[-2])

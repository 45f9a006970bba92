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
"""Slurm's states, for a moment, of a job that runs and was sent a signal, or has lost a node."""
_RANGES: Final = re.compile(r"([^,\[\]]*)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")


class SlurmJob(msgspec.Struct, frozen=True):
    """A line of squeue. `place`: of a replica beyond the gang; None: it is a gang. `excluded`: where it may not run."""

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
        """Nothing of it runs, and nothing will."""
        return self.state in _DONE


class NodeState(msgspec.Struct, frozen=True):
    """A line of sinfo. `reason`: why it is drained or down; empty where nobody said."""

    node: str
    state: str
    reason: str


class JobNote(msgspec.Struct, frozen=True):
    """Note of a gang for all who look for it: its coordinator, `host:port`, and the folder of its records."""

    at: str = ""
    home: str = ""


class JobRequests(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests of users to a running job; a file of the gang's first node.

    `replicas`: their wanted number; None: as the job says. `avoid`: nodes to keep away from, and until when, in seconds
    since the epoch. `over`: it is to end, and nothing is to be started again.
    """

    replicas: int | None = None
    avoid: dict[str, Instant] = {}
    over: bool = False

    def avoided(self, wall: Instant) -> dict[str, Instant]:
        """The nodes whose time is not over. `wall`: seconds since the epoch."""
        return {node: until for node, until in self.avoid.items() if until > wall}

    def on_clock(self, now: Instant, wall: Instant) -> "JobRequests":
        """The same with the times of another clock, which says `now` at `wall`."""
        return msgspec.structs.replace(self, avoid={node: now + at - wall for node, at in self.avoided(wall).items()})


def read_queue(text: str, name: str) -> list[SlurmJob]:
    """The Slurm jobs that belong to the job of this name, the oldest first, of squeue's lines in `QUEUE_FORMAT`."""
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
    """The hosts in Slurm's short form, in its order: `gpu[01-03,7],login1`."""
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
    """Of sinfo's lines in `NODES_FORMAT`, a node once; `draining*` is `draining`: the mark says that it is silent."""
    found: dict[str, NodeState] = {}
    for line in text.splitlines():
        node, _, rest = line.partition("|")
        state, bar, reason = rest.partition("|")
        if node and bar:
            found[node] = NodeState(node, state.rstrip("*~#!%$@^-+").lower(), "" if reason == "none" else reason)
    return list(found.values())


def read_node_count(text: str) -> tuple[int, int]:
    """All nodes, and those that are drained or down, of what `read_nodes` reads."""
    found = read_nodes(text)
    return len(found), sum(each.state.startswith(("drain", "down", "fail")) for each in found)


def node_address(text: str) -> str:
    """Slurm's own address of a node, from `scontrol -o show node`; empty: it has none."""
    match = re.search(r"\bNodeAddr=(\S+)", text)
    return match.group(1) if match else ""


def submitted(text: str) -> int | None:
    """The number of the job, of what `sbatch --parsable` says: `17` or `17;cluster`."""
    fields = text.strip().splitlines()
    number = fields[-1].partition(";")[0] if fields else ""
    return int(number) if number.isdigit() else None


def read_note(text: str) -> JobNote:
    """Of a comment. One that is not ours is an empty note."""
    mark, *fields = text.split() or [""]
    said = dict(word.partition("=")[::2] for word in fields) if mark == "regrow" else {}
    return JobNote(said.get("at", ""), unquote(said.get("home", "")))


def note_text(note: JobNote) -> str:
    """As `read_note` reads it; without quotes or bars, which Slurm's own output could not show."""
    return f"regrow at={note.at} home={quote(note.home)}"


def read_topology(text: str) -> dict[str, list[str]]:
    """Switches, or blocks, above each host, from the root down, from `scontrol show topology`."""
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
    """Failure domain of a node, from `SLURM_TOPOLOGY_ADDR` and its pattern: the switch that it is on."""
    path, kinds = address.split("."), pattern.split(".")
    if len(path) < 2 or len(path) != len(kinds) or kinds[-1] != "node":
        return ""
    return re.sub(r"[^A-Za-z0-9_-]", "_", path[-2])

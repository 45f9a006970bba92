"""The file that describes a job for Slurm: parses TOML into a checked specification. Pure."""

import difflib
import re
import tomllib
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds
from regrow_clusters.cluster.sizes import MOST_REPLICAS, ElasticSpec, SizeProblem, problems

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", re.ASCII)
MOST_NAME: Final = 40
_FEWEST_VOTERS: Final = 3
_SHORTEST_LEASE_S: Final[Seconds] = 30.0
_OURS: Final = (
    "job-name",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "no-kill",
    "kill-on-bad-exit",
    "requeue",
    "no-requeue",
    "array",
    "signal",
    "output",
    "exclude",
    "partition",
    "comment",
    "parsable",
    "wrap",
)
"""Options of sbatch that regrow sets itself, or that have a key of their own in the file."""
_SHORT: Final = {"J": "job-name", "N": "nodes", "n": "ntasks", "a": "array", "o": "output", "x": "exclude"}
_SHORT_MORE: Final = {"k": "no-kill", "p": "partition"}

Count = Annotated[int, Meta(ge=1, le=MOST_REPLICAS)]
Time = Annotated[float, Meta(ge=0)]


class PartSpec(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    """Submission of one kind of Slurm job: the gang, or a replica beyond it.

    `options`: options of sbatch, one word each (`--account=ml`). `script`: the user's own batch script for replicas
    beyond the gang, made from the one that `regrow slurm script` prints.
    """

    partition: str = ""
    options: list[str] = []
    script: str = ""


class SlurmJobSpec(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    """Specification of a job. Keys about sizes are the same as in Kubernetes' `TrainingJob`."""

    name: str
    script: Annotated[list[str], Meta(min_length=1)]
    """The training script and its arguments, as for `regrow run`."""
    replica_count: Count = 1
    """Size of the gang: it starts whole, and the job never shrinks below it by its own choice."""
    max_replica_count: Count | None = None
    replicas: Count | None = None
    """Replicas wanted at first; `regrow slurm scale` requests another number."""
    replica_increment_step: Count = 1
    replica_discrete_values: list[Count] = []
    max_pending_replicas: Count = 1
    nodes_per_replica: Annotated[int, Meta(ge=1, le=1024)] = 1
    ranks_per_node: Annotated[int, Meta(ge=1, le=1024)] = 1
    spares: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Additional nodes in the gang's allocation, which take over a lost node's ranks at once."""
    graceful_shutdown_timeout_in_seconds: Time = 30.0
    """Time for a node to leave; Slurm's own GraceTime must not be shorter."""
    scaling_timeout_in_seconds: Time = 300.0
    scale_up_snooze_time_in_seconds: Time = 30.0
    bad_node_time_in_seconds: Time = 3600.0
    """Time for which a node that lost a replica is excluded."""
    lease_in_seconds: Annotated[float, Meta(ge=1)] = 60.0
    """Time without the coordinator after which a node ends its processes."""
    poll_in_seconds: Annotated[float, Meta(ge=0.2)] = 10.0
    """Interval of requests to Slurm; events inside the job are known at once."""
    signal_before_end_in_seconds: Annotated[int, Meta(ge=0, le=65535)] = 60
    """Time before its limit at which a Slurm job is asked to leave."""
    max_restarts: Annotated[int, Meta(ge=0)] = 3
    """Most resubmissions of a gang whose first node was lost or whose time was up."""
    checkpoint_dir: str = ""
    run_flags: list[str] = []
    """Further flags of `regrow run`, for example `--buddy-every=20`."""
    command: list[str] = []
    """Command that starts regrow on a node; empty: the Python that submitted the job."""
    setup: str = ""
    """Lines that the batch scripts run first: modules, `ulimit`, variables."""
    output: str = ""
    """As sbatch's `--output`; `%j` is the Slurm job's id."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the coordinator; 0: a port derived from the Slurm job's id."""
    rendezvous_dir: str = ""
    """A folder that all nodes share, for the coordinator's address; empty: it is in the Slurm job's comment."""
    elect: bool = False
    """True if another node takes over after the loss of the first; all nodes must share the folder of records."""
    leave_states: tuple[str, ...] = ("draining", "drained", "failing", "fail")
    """States of a node, as `sinfo` prints them, in which the job leaves it. Empty: node states are not queried."""
    drain_bad_nodes: bool = False
    """True if lost nodes are drained in Slurm, which needs an operator's rights; at most a tenth of the cluster's."""
    gang: PartSpec = PartSpec()
    elastic: PartSpec = PartSpec()

    @property
    def most(self) -> int:
        """Largest number of replicas."""
        return self.replica_count if self.max_replica_count is None else self.max_replica_count

    @property
    def gang_nodes(self) -> int:
        """Nodes of the gang's allocation, its spares included."""
        return self.replica_count * self.nodes_per_replica + self.spares

    @property
    def grace(self) -> Seconds:
        """Time that a node gets to leave."""
        return self.graceful_shutdown_timeout_in_seconds

    def elastic_spec(self, *, replicas: int | None = None) -> ElasticSpec:
        """The sizes, for the planner. `replicas`: number wanted now; it is limited to the allowed range."""
        asked = self.replicas if replicas is None else replicas
        return ElasticSpec(
            replica_count=self.replica_count,
            max_replica_count=self.most,
            replicas=None if asked is None else max(min(asked, self.most), self.replica_count),
            replica_increment_step=self.replica_increment_step,
            replica_discrete_values=tuple(self.replica_discrete_values),
            max_pending_replicas=self.max_pending_replicas,
            graceful_shutdown_timeout_in_seconds=self.grace,
            scaling_timeout_in_seconds=self.scaling_timeout_in_seconds,
            scale_up_snooze_time_in_seconds=self.scale_up_snooze_time_in_seconds,
        )


def read_job_file(text: str, *, place: str) -> SlurmJobSpec:
    """Parse a job's TOML text. Raises `UsageError`, which names the key and a correction."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{place} is no TOML: {error}") from error
    _check_keys(table, SlurmJobSpec, place)
    for part in ("gang", "elastic"):
        if isinstance(table.get(part), dict):
            _check_keys(table[part], PartSpec, f"{place} [{part}]")
    try:
        spec = msgspec.convert(table, SlurmJobSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"{place}: {error}", hint="docs/slurm.md has all keys") from error
    wrong = spec_problems(spec)
    if wrong:
        raise UsageError(f"{place}: " + "; ".join(f"{each.field} {each.message}" for each in wrong))
    return spec


def spec_problems(spec: SlurmJobSpec) -> list[SizeProblem]:
    """Contradictions in a job, and settings that Slurm would refuse or misunderstand."""
    found = problems(spec.elastic_spec())
    if spec.replicas is not None and not spec.replica_count <= spec.replicas <= spec.most:
        text = f"is {spec.replicas}: give a number from replicaCount ({spec.replica_count}) to {spec.most}"
        found.append(SizeProblem("replicas", text))
    if spec.elect and (spec.gang_nodes < _FEWEST_VOTERS or spec.most == spec.replica_count):
        text = (
            f"needs a gang of {_FEWEST_VOTERS} nodes or more, spares included, and maxReplicaCount above replicaCount"
        )
        found.append(SizeProblem("elect", f"{text}: add spares = 1, for example, or leave it out"))
    if spec.elect and spec.lease_in_seconds < _SHORTEST_LEASE_S:
        text = (
            f"is {spec.lease_in_seconds:g}: with elect give {_SHORTEST_LEASE_S:g} or more, for an election takes time"
        )
        found.append(SizeProblem("leaseInSeconds", text))
    if _NAME.fullmatch(spec.name) is None:
        text = f"{spec.name!r} cannot name a job: use at most {MOST_NAME} letters, digits, '.', '_' and '-'"
        found.append(SizeProblem("name", text))
    for part, given in (("gang", spec.gang), ("elastic", spec.elastic)):
        for option in given.options:
            if trouble := _option_trouble(option):
                found.append(SizeProblem(f"{part}.options", f"has {option!r}: {trouble}"))
        if part == "gang" and given.script:
            found.append(SizeProblem("gang.script", "has no meaning: submit that script yourself, with sbatch"))
        if given.partition and not re.fullmatch(r"[\w.,-]+", given.partition, re.ASCII):
            found.append(SizeProblem(f"{part}.partition", f"{given.partition!r} is no name of a partition"))
    if "\n" in spec.output:
        found.append(SizeProblem("output", "has a line break: give one path"))
    return found


def _option_trouble(option: str) -> str:
    if "\n" in option:
        return "it has a line break; give one option a word"
    if not option.startswith("-"):
        return "it is no option; write it as one word, --name=value"
    long = option[2:].partition("=")[0] if option.startswith("--") else (_SHORT | _SHORT_MORE).get(option[1:2], "")
    if long in _OURS:
        return f"--{long} is regrow's own, or has a key of its own in the file; leave it out"
    return ""


def _check_keys(table: dict[str, Any], kind: type[msgspec.Struct], place: str) -> None:
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"{place}: {key} is no key of a job for Slurm", hint=hint)

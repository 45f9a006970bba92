"""Scenario of a simulation: a job, its hardware, its faults, and the policies that are compared. Pure."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from regrow.core.ids import Seconds


class Span(float):
    """A time in seconds; in files a number, or a text such as `30d`, `10min` or `500ms`."""


Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(ge=0)]
Part = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Recovers = Literal["checkpoint-restart", "process-restart", "in-process", "regrow"]


class JobTable(msgspec.Struct, frozen=True):
    """`[job]`: what is trained. `nodes` follows from the hardware."""

    work: Span
    """Time of the job if nothing ever went wrong and nothing stood still."""
    step: Span
    """One step of the whole world."""
    ranks_per_node: Positive = 8
    replica_nodes: Positive = 1
    """Nodes that together hold one copy of the state."""
    overhead: Part = 0.0
    """Part of the time of an undisturbed training that is in no step."""
    limit: Span = Span(0.0)
    """Time at which the simulation is given up; 0: after ten times the work."""

    @property
    def until(self) -> Seconds:
        """Time at which the simulation is given up."""
        return self.limit or 10.0 * self.work


class FaultTable(msgspec.Struct, frozen=True):
    """`[[hardware.faults]]`: one kind of fault."""

    kind: str
    per_node_hour: Rate = 0.0
    """Rate for each node, in an hour. Times between faults are exponentially distributed."""
    every: list[Span] = []
    """In its place: least and most time between two faults of all these nodes together, uniformly distributed."""
    takes: Literal["worker", "hang", "node", "job"] = "worker"
    """A process dies; one stands still; nodes are lost; all of the job's processes die at once."""
    nodes: Positive = 1
    """Number of neighbouring nodes lost at once."""
    repair: Span = Span(4 * 3600.0)
    """Mean time until a lost node is back, or another in its place."""


class HardwareTable(msgspec.Struct, frozen=True):
    """`[[hardware]]`: nodes that are alike."""

    nodes: Positive
    name: str = "nodes"
    price: Rate = 0.0
    """Of a node, an hour."""
    faults: list[FaultTable] = []


class CapacityTable(msgspec.Struct, frozen=True):
    """`[capacity]`: how many nodes there are. Those of the job and its spares where nothing is said."""

    kind: Literal["always", "wave", "spot", "trace"] = "always"
    least: Count = 0
    """Of a wave: at its lowest."""
    most: Count = 0
    """Of a wave: at its highest; 0: as many as the job wants."""
    period: Span = Span(86400.0)
    """Of a wave, or after which a trace begins again."""
    reclaims_per_node_hour: Rate = 0.0
    """Of spot nodes."""
    away: Span = Span(3600.0)
    """Mean time until a reclaimed spot node, or another, is there."""
    notice: Span = Span(120.0)
    """Notice that a node gives before it goes."""
    points: list[tuple[Span, Count]] = []
    """Of a trace: from when on there are how many nodes."""


class CostRow(msgspec.Struct, frozen=True):
    """`[[costs]]`: what it takes to mend an incident in one way, in a world of `ranks`.

    Either the stages of `core.records.IncidentClosed`, or `total` where their shares are not known, which then counts
    as regrouping. `redo`: what the first step takes longer than another; the lost work itself is not in it.
    """

    of: str
    """The name of a set of costs."""
    rung: str = ""
    """Of regrow: `standby`, `fork`, `node`, `shrink`, `grow`, `retry`, `restart`. `start`: to the first step. Empty:
    all that have no row of their own."""
    ranks: Positive = 1
    detect: Span = Span(0.0)
    abort: Span = Span(0.0)
    regroup: Span = Span(0.0)
    hydrate: Span = Span(0.0)
    redo: Span = Span(0.0)
    total: Span = Span(0.0)
    source: str = ""


class PolicyTable(msgspec.Struct, frozen=True):
    """`[[policy]]`: one way to deal with all that."""

    name: str
    recovers: Recovers
    costs: str = ""
    """A set of costs; empty: the one that is called as `recovers`."""
    state: Literal["", "checkpoint", "peers"] = ""
    """Source of lost state; empty: peers under regrow, else the last checkpoint."""
    spares: Count = 0
    standbys: Count = 0
    """Of regrow: warm workers a node, which take the rank of a worker that dies."""
    elastic: bool = False
    """True if the job goes on with fewer replicas when nodes are missing."""
    least_nodes: Positive = 1
    """With fewer an elastic job waits."""
    checkpoint_every: Span = Span(0.0)
    """Training between two durable checkpoints; 0: none are written, and what needs one begins anew."""
    checkpoint_stall: Span = Span(0.0)
    """Standstill of the training for one."""
    hang: Span = Span(600.0)
    """After how long a worker that stands still is known to."""
    buddy_every: Count = 0
    """Of regrow: steps between two copies of each node's state on another node; 0: none."""

    @property
    def set_of_costs(self) -> str:
        """The name of its costs."""
        return self.costs or self.recovers

    @property
    def from_peers(self) -> bool:
        """True if state comes from living peers while there are any."""
        return self.state == "peers" or (not self.state and self.recovers == "regrow")


class PublishedFigure(msgspec.Struct, frozen=True):
    """`[[published]]`: a result that somebody has published, beside which the forecast is shown.

    `wall` is a time, `goodput` a part of 1, `incidents` their number.
    """

    policy: str
    figure: Literal["wall", "goodput", "incidents"]
    value: Span
    source: str
    missing: str = ""
    """Inputs that nobody has published, without which a forecast would be a guess; empty: none are."""


class FleetScenario(msgspec.Struct, frozen=True):
    """All of a file."""

    job: JobTable
    hardware: list[HardwareTable]
    policy: list[PolicyTable]
    costs: list[CostRow] = []
    capacity: CapacityTable = CapacityTable()
    title: str = ""
    assumptions: list[str] = []
    """Assumptions behind the figures, shown with them."""
    published: list[PublishedFigure] = []
    """Results of others, which are compared with the forecast."""
    costs_from: list[str] = []
    """Further files with `[[costs]]`, as `regrow sim calibrate` writes them; beside this one."""
    seeds: Positive = 20
    sizes: list[Positive] = []
    """Numbers of nodes that are compared, where there is one kind of hardware; empty: as it says."""

    @property
    def nodes(self) -> int:
        """Of the job, without spares."""
        return sum(each.nodes for each in self.hardware)

    @property
    def ranks(self) -> int:
        """Of the whole world."""
        return self.nodes * self.job.ranks_per_node

    @property
    def price(self) -> float:
        """Of a node, an hour, at the mean."""
        return sum(each.nodes * each.price for each in self.hardware) / self.nodes

    def in_sizes(self) -> "Iterator[FleetScenario]":
        """The same with each number of nodes."""
        for nodes in self.sizes or [self.nodes]:
            first, *others = self.hardware
            of_size = first if others else msgspec.structs.replace(first, nodes=nodes)
            yield msgspec.structs.replace(self, hardware=[of_size, *others], sizes=[])


def contradictions(scenario: FleetScenario) -> Iterator[str]:
    """Contradictions in a scenario, a sentence each, with its cure."""
    job = scenario.job
    for name, value in (("work", job.work), ("step", job.step)):
        if value <= 0:
            yield f"job.{name} = {value:g} s is no time at all: give more than 0 seconds"
    if not scenario.hardware:
        yield "there is no hardware: add [[hardware]] with its nodes"
    elif len(scenario.hardware) > 1 and scenario.sizes:
        yield "sizes are for one kind of hardware, and there are more: leave sizes out"
    else:
        for nodes in scenario.sizes or [scenario.nodes]:
            if nodes % job.replica_nodes:
                yield f"job.replica_nodes = {job.replica_nodes} does not divide {nodes} nodes: give whole replicas"
    if not scenario.policy:
        yield "there is no policy to simulate: add [[policy]] with a name and what it recovers by"
    yield from _of_faults(scenario)
    yield from _of_policies(scenario)
    yield from _of_capacity(scenario.capacity)
    names = {policy.name for policy in scenario.policy}
    if scenario.published and scenario.sizes:
        yield "published is for one number of nodes, and there are sizes: leave sizes out"
    for number, each in enumerate(scenario.published, 1):
        if each.value <= 0:
            yield f"published[{number}].value = {each.value:g} cannot be compared with: give more than 0"
        if each.policy not in names:
            yield f'published[{number}].policy = "{each.policy}" is no policy: name one of {", ".join(sorted(names))}'


def _of_faults(scenario: FleetScenario) -> Iterator[str]:
    for number, hardware in enumerate(scenario.hardware, 1):
        for place, fault in enumerate(hardware.faults, 1):
            name = f"hardware[{number}].faults[{place}]"
            if fault.every and fault.per_node_hour:
                yield f"{name} has per_node_hour and every: leave one out"
            if fault.every and not (len(fault.every) == 2 and 0 < fault.every[0] <= fault.every[1]):
                yield f'{name}.every is no least and most time: give two, as in ["45min", "75min"]'


def _of_policies(scenario: FleetScenario) -> Iterator[str]:
    names = [each.name for each in scenario.policy]
    for twice in sorted({name for name in names if names.count(name) > 1}):
        yield f'two policies are called "{twice}": give each a name of its own'
    known = {row.of for row in scenario.costs}
    for number, policy in enumerate(scenario.policy, 1):
        place = f"policy[{number}]"
        if policy.set_of_costs not in known:
            sets = ", ".join(sorted(known)) or "none"
            yield (
                f'{place}.costs: nothing says what "{policy.set_of_costs}" costs: add [[costs]] of = '
                f'"{policy.set_of_costs}", or name one of those that are there ({sets})'
            )
        if policy.checkpoint_stall and not policy.checkpoint_every:
            yield f"{place}.checkpoint_stall is given without checkpoint_every: say how often, or leave it out"
        if policy.buddy_every and policy.recovers != "regrow":
            yield f'{place}.buddy_every is regrow\'s: leave it out, or recovers = "regrow"'


def _of_capacity(capacity: CapacityTable) -> Iterator[str]:
    if capacity.kind == "trace" and not capacity.points:
        yield 'capacity.kind = "trace" has no points: give points = [["0h", 100], ["5h", 60]]'
    if capacity.kind == "wave" and capacity.period <= 0:
        yield "capacity.period = 0 s is no time at all: give more than 0 seconds"
    if any(later[0] <= earlier[0] for earlier, later in pairwise(capacity.points)):
        yield "capacity.points are not in order of time: sort them"

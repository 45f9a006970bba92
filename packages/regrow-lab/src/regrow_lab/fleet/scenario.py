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
    """`[job]`: the training. The number of nodes follows from the hardware."""

    work: Span
    """Time that the job would take without faults and pauses."""
    step: Span
    """Duration of one step of the whole world."""
    ranks_per_node: Positive = 8
    replica_nodes: Positive = 1
    """Nodes that together hold one copy of the state."""
    overhead: Part = 0.0
    """Part of the time of undisturbed training outside of steps."""
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
    """Faults of each node in an hour. Times between faults are exponentially distributed."""
    every: list[Span] = []
    """Instead of the rate: least and most time between two faults of all these nodes, uniformly distributed."""
    takes: Literal["worker", "hang", "node", "job"] = "worker"
    """`worker`: a process dies; `hang`: one hangs; `node`: nodes are lost; `job`: all its processes die at once."""
    nodes: Positive = 1
    """Number of neighbouring nodes lost at once."""
    repair: Span = Span(4 * 3600.0)
    """Mean time until a lost node is back, or replaced."""


class HardwareTable(msgspec.Struct, frozen=True):
    """`[[hardware]]`: nodes that are alike."""

    nodes: Positive
    name: str = "nodes"
    price: Rate = 0.0
    """Price of a node for an hour."""
    faults: list[FaultTable] = []


class CapacityTable(msgspec.Struct, frozen=True):
    """`[capacity]`: number of available nodes over time. Default: always those of the job and its spares."""

    kind: Literal["always", "wave", "spot", "trace"] = "always"
    least: Count = 0
    """Lowest number of nodes of a wave."""
    most: Count = 0
    """Highest number of nodes of a wave; 0: as many as the job wants."""
    period: Span = Span(86400.0)
    """Period of a wave, or time after which a trace is repeated."""
    reclaims_per_node_hour: Rate = 0.0
    """Reclaims of each spot node in an hour."""
    away: Span = Span(3600.0)
    """Mean time until a reclaimed spot node is back, or replaced."""
    notice: Span = Span(120.0)
    """Time between the notice of a node's departure and the departure."""
    points: list[tuple[Span, Count]] = []
    """Points of a trace: a time, and the number of nodes from then on."""


class CostRow(msgspec.Struct, frozen=True):
    """`[[costs]]`: durations of one kind of recovery in a world of `ranks`.

    Either the stages of `core.records.IncidentClosed`, or only `total` if the stages are unknown; the unknown part
    counts as regrouping. `redo`: extra time of the first step compared to others, without the lost work itself.
    """

    of: str
    """The name of a set of costs."""
    rung: str = ""
    """Regrow's rungs: `standby`, `fork`, `node`, `shrink`, `grow`, `retry`, `restart`. `start`: to the first step.
    Empty: all rungs without a row of their own."""
    ranks: Positive = 1
    detect: Span = Span(0.0)
    abort: Span = Span(0.0)
    regroup: Span = Span(0.0)
    hydrate: Span = Span(0.0)
    redo: Span = Span(0.0)
    total: Span = Span(0.0)
    source: str = ""


class PolicyTable(msgspec.Struct, frozen=True):
    """`[[policy]]`: one way to recover from faults and to use capacity."""

    name: str
    recovers: Recovers
    costs: str = ""
    """Name of the set of costs; empty: the value of `recovers`."""
    state: Literal["", "checkpoint", "peers"] = ""
    """Source of lost state; empty: peers under regrow, else the last checkpoint."""
    spares: Count = 0
    standbys: Count = 0
    """Regrow only: warm workers on each node, which take over the rank of a worker that dies."""
    elastic: bool = False
    """True if the job goes on with fewer replicas when nodes are missing."""
    least_nodes: Positive = 1
    """An elastic job waits if it has fewer nodes."""
    checkpoint_every: Span = Span(0.0)
    """Training time between two durable checkpoints; 0: none are written, and a job that needs one starts over."""
    checkpoint_stall: Span = Span(0.0)
    """Time for which the training stops to write a checkpoint."""
    hang: Span = Span(600.0)
    """Time until a hanging worker is detected."""
    buddy_every: Count = 0
    """Regrow only: steps between two copies of each node's state to another node; 0: none."""

    @property
    def set_of_costs(self) -> str:
        """Name of its set of costs."""
        return self.costs or self.recovers

    @property
    def from_peers(self) -> bool:
        """True if lost state is restored from surviving peers while there are any."""
        return self.state == "peers" or (not self.state and self.recovers == "regrow")


class PublishedFigure(msgspec.Struct, frozen=True):
    """`[[published]]`: a published result, which is compared with the forecast.

    `wall` is a time, `goodput` a part of 1, `incidents` their number.
    """

    policy: str
    figure: Literal["wall", "goodput", "incidents"]
    value: Span
    source: str
    missing: str = ""
    """Unpublished inputs, without which the forecast is a guess; empty: there are none."""


class FleetScenario(msgspec.Struct, frozen=True):
    """Content of a scenario's file."""

    job: JobTable
    hardware: list[HardwareTable]
    policy: list[PolicyTable]
    costs: list[CostRow] = []
    capacity: CapacityTable = CapacityTable()
    title: str = ""
    assumptions: list[str] = []
    """Assumptions behind the figures, shown with them."""
    published: list[PublishedFigure] = []
    """Published results, which are compared with the forecast."""
    costs_from: list[str] = []
    """More files with `[[costs]]`, as `regrow sim calibrate` writes them, in the same folder."""
    seeds: Positive = 20
    sizes: list[Positive] = []
    """Numbers of nodes to compare, if there is only one kind of hardware; empty: the hardware's own number."""

    @property
    def nodes(self) -> int:
        """Number of the job's nodes, without spares."""
        return sum(each.nodes for each in self.hardware)

    @property
    def ranks(self) -> int:
        """Number of ranks of the whole world."""
        return self.nodes * self.job.ranks_per_node

    @property
    def price(self) -> float:
        """Mean price of a node for an hour."""
        return sum(each.nodes * each.price for each in self.hardware) / self.nodes

    def in_sizes(self) -> "Iterator[FleetScenario]":
        """The scenario with each number of nodes in `sizes`."""
        for nodes in self.sizes or [self.nodes]:
            first, *others = self.hardware
            of_size = first if others else msgspec.structs.replace(first, nodes=nodes)
            yield msgspec.structs.replace(self, hardware=[of_size, *others], sizes=[])


def contradictions(scenario: FleetScenario) -> Iterator[str]:
    """Contradictions in a scenario, one sentence each, with a cure."""
    job = scenario.job
    for name, value in (("work", job.work), ("step", job.step)):
        if value <= 0:
            yield f"job.{name} = {value:g} s is no time at all: give more than 0 seconds"
    if not scenario.hardware:
        yield "there is no hardware: add [[hardware]] with its nodes"
    elif len(scenario.hardware) > 1 and scenario.sizes:
        yield "sizes need one kind of hardware, and there are more: leave sizes out"
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
        yield "published needs one number of nodes, and sizes gives more: leave sizes out"
    for number, each in enumerate(scenario.published, 1):
        if each.value <= 0:
            yield f"published[{number}].value = {each.value:g} is nothing to compare with: give more than 0"
        if each.policy not in names:
            known = ", ".join(sorted(names))
            yield f'published[{number}].policy = "{each.policy}" is not a policy: give one of {known}'


def _of_faults(scenario: FleetScenario) -> Iterator[str]:
    for number, hardware in enumerate(scenario.hardware, 1):
        for place, fault in enumerate(hardware.faults, 1):
            name = f"hardware[{number}].faults[{place}]"
            if fault.every and fault.per_node_hour:
                yield f"{name} has per_node_hour and every: leave one out"
            if fault.every and not (len(fault.every) == 2 and 0 < fault.every[0] <= fault.every[1]):
                yield f'{name}.every is not a shortest and a longest time: give two, as in ["45min", "75min"]'


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
                f'{place}.costs: there are no costs of "{policy.set_of_costs}": add [[costs]] of = '
                f'"{policy.set_of_costs}", or name one of {sets}'
            )
        if policy.checkpoint_stall and not policy.checkpoint_every:
            yield f"{place}.checkpoint_stall is given without checkpoint_every: say how often, or leave it out"
        if policy.buddy_every and policy.recovers != "regrow":
            yield f'{place}.buddy_every works with regrow only: leave it out, or set recovers = "regrow"'


def _of_capacity(capacity: CapacityTable) -> Iterator[str]:
    if capacity.kind == "trace" and not capacity.points:
        yield 'capacity.kind = "trace" has no points: give points = [["0h", 100], ["5h", 60]]'
    if capacity.kind == "wave" and capacity.period <= 0:
        yield "capacity.period = 0 s is no time at all: give more than 0 seconds"
    if any(later[0] <= earlier[0] for earlier, later in pairwise(capacity.points)):
        yield "capacity.points are not in order of time: sort them"

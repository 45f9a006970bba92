"""A job whose world grows and shrinks, and what tests ask of it."""

from typing import Any

from tests.unit.membership.membership_job import Job

from regrow.core.ids import NO_STATE, NodeId, Seconds, WorkerId
from regrow.core.messages import facts, orders
from regrow.membership.orders import AnswerScale


def elastic(world: int = 2, *, slots: int = 6, **changes: Any) -> Job:
    """One that trains, and may have from one to six replicas."""
    fields: dict[str, Any] = {"min_replicas": 1, "max_replicas": 6, **changes}
    return Job(world, slots=slots, **fields).trained(4)


def scale(job: Job, replicas: int, stay: Seconds | None = None, ranks: int | None = None) -> AnswerScale:
    said = job.tell(facts.ScaleRequested(replicas, "an operator asks for it", stay, ranks))
    return next(command for command in said if isinstance(command, AnswerScale))


def candidates(job: Job) -> list[WorkerId]:
    return [worker.worker for _, worker in sorted(job.machine.roster.candidates.items())]


def phase(job: Job) -> str:
    return job.machine.snapshot().phase


def planned(job: Job) -> int:
    """The step before which all were told to stop, in the last order."""
    at = job.last(orders.HaltGeneration).at
    assert at is not None
    return at


def stop(job: Job, *ranks: int, at: int | None = None) -> None:
    """These, or all, stop as planned."""
    state = planned(job) if at is None else at
    for rank in ranks or job.ranks:
        job.halted(rank, state)


def grown(job: Job, replicas: int) -> Job:
    """The world has grown, and everybody has committed a step in it."""
    assert scale(job, replicas).accepted
    for worker in candidates(job):
        job.ready(worker, NO_STATE)
    stop(job)
    return job.joined().stepped(job.machine.step)


def shrunk(job: Job, replicas: int) -> Job:
    assert scale(job, replicas).accepted
    stop(job)
    return job.joined().stepped(job.machine.step)


def drain(job: Job, node: str, grace: Seconds = 60.0) -> None:
    job.tell(facts.NodeDraining(NodeId(node), grace, "its time is over"))


def ask_back(job: Job, node: str, *, certain: bool = False) -> AnswerScale:
    """As `regrow drain`; what becomes of it."""
    said = job.tell(facts.DrainRequested(NodeId(node), 60.0, "an operator asks for it", certain))
    return next(command for command in said if isinstance(command, AnswerScale))


def lose(job: Job, node: str) -> None:
    job.tell(facts.NodeLost(NodeId(node), "its connection ended"))


def comes(job: Job, node: str, slots: int = 1, stay: Seconds | None = None) -> None:
    job.tell(facts.NodeJoined(NodeId(node), "host", slots, f"store of {node}", stay=stay))


def two_nodes(**changes: Any) -> Job:
    """Ranks 0 and 1 on n0, ranks 2 and 3 on n1, no room for more."""
    fields: dict[str, Any] = {"min_replicas": 1, "max_replicas": 4, **changes}
    return Job(4, nodes=2, **fields).trained(4)

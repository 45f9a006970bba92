"""Session in the process that makes batches for its node: just enough for a script to reach its loader."""

import os
import sys
from typing import Any, NoReturn

from regrow.agent.workers.link import WorkerLink
from regrow.comm.groups import Groups
from regrow.core.config import WorkerEnv
from regrow.core.errors import AgentGone
from regrow.core.messages.data import ProducerServed, producer_socket
from regrow.data.cache.forking import open_descriptors, shared_positions
from regrow.data.cache.making import Making
from regrow.data.cache.producer import Producer
from regrow.data.dataloader import on_made
from regrow.data.seeding import seed_everything
from regrow.step.policy import Policy
from regrow.train.hooks.regroups import RegroupHook
from regrow.train.loop import StepLoop
from regrow.train.policy import Scaled
from regrow.train.session import Session
from regrow.train.worker.standalone import FORM_S, StandaloneWorker

SERVED = 0
"""Exit code of a producer without work: another one would have none either."""


class Producing(StandaloneWorker):
    """A process that has a rank of the job's world, but takes no part in the job: collectives are answered locally."""

    rehearses = True

    @classmethod
    def at(cls, env: WorkerEnv) -> "Producing":
        """Make a worker for the job's world, with the rank that the agent gave to this process."""
        Groups().install(rank=env.rank, world=env.world, formation=None, form_s=FORM_S)
        return cls(env.rank, env.local_rank, env.world)


class ProducerLoop(StepLoop):
    """A loop that never begins."""

    def start(self, what: str) -> NoReturn:
        """End the process: the loader that it serves should have been made before."""
        leave(f"the script came to {what}")


class ProducerSession(Session):
    """A session that trains nothing: the script only runs until its loader is made.

    Args:
        env: environment of this process.
    """

    _loop_kind = ProducerLoop

    def __init__(self, env: WorkerEnv, *, seed: int) -> None:
        super().__init__(Producing.at(env), seed=seed)
        seed_everything(seed)  # as every worker does, since the script may make its data from random numbers

    def protect(self, *objects: Any, part: str = "", **named: Any) -> None:
        """Do nothing, as nothing needs protection here."""

    def policy(self, policy: Policy) -> None:
        """Keep the policy for `setting`, which a script may call; nothing is updated here."""
        self._scaled = Scaled(policy, (), lambda: self.replicas)

    def on_regroup(
        self, *, before: RegroupHook | None = None, after: RegroupHook | None = None, within: float = 60.0
    ) -> None:
        """Ignore the hooks, as no groups are formed here."""

    def digest(self) -> str:
        """Return an empty string, as there is no state."""
        return ""


def await_loader(link: WorkerLink) -> None:
    """Turn the process into the producer as soon as the script makes the loader that the producer serves."""
    env = link.env
    producer, data = env.producer, env.data
    if producer is None or data is None:
        leave("it did not receive its loader and the cache's folder")

    before = open_descriptors()

    def take_over(loader: object, number: int) -> None:
        if number == producer.loader:
            making = Making(loader, data, alone=shared_positions(before))
            Producer(making, producer_socket(env.socket_dir, number), served=lambda: _report_served(link)).run()

    on_made(take_over)


def leave(happened: str) -> NoReturn:
    """End this process, as it will never have work."""
    link = WorkerLink.current()
    number = link.env.producer.loader if link is not None and link.env.producer is not None else -1
    sys.stderr.write(
        f"regrow: no batches are made ahead: {happened} without making loader number {number}, which the workers "
        "make before they come to session.steps\n"
    )
    _end(SERVED)


def _report_served(link: WorkerLink) -> None:
    producer = link.env.producer
    if producer is None:
        return
    try:
        link.send(ProducerServed(link.env.worker, producer.loader))
    except AgentGone:
        _end(SERVED)


def _end(code: int) -> NoReturn:
    # Not SystemExit: only workers run what the script does at its exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

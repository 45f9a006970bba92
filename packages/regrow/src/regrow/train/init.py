"""Creation of the session of a process."""

import torch

from regrow.agent.workers.link import WorkerLink
from regrow.core.config import WorkerEnv
from regrow.core.errors import UsageError
from regrow.data.seeding import seed_everything
from regrow.train.session import Session
from regrow.train.worker.standalone import StandaloneWorker
from regrow.train.worker.supervised import SupervisedWorker

_session: Session | None = None


def current_session() -> Session | None:
    """The session of this process; None before `init`."""
    return _session


def init(*, seed: int = 0, invariant: bool = False) -> Session:
    """Join the job that this process belongs to, or train alone if there is none.

    Makes the default process group (backend `regrow`), so that DDP and `torch.distributed` work, and seeds all random
    generators so that every rank builds the same model: torch's, numpy's and Python's global ones begin anew with
    `seed`, and a seed that the script has set above this call is lost.

    Args:
        seed: source of the order of data and of all random numbers; the global generators are seeded with it.
        invariant: world-invariant mode: every committed loss and the final state are bitwise the same with any number
            of replicas, and through every change of it. Gradients are summed over the micro-batches in one fixed tree.
            Needs `session.steps(microbatches=...)`. Each rank computes with one thread.

    Raises:
        UsageError: `torch.distributed` was initialized already, or init() was called twice.
    """
    global _session
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UsageError(
            "torch.distributed is initialized already", hint="call regrow.init() instead of init_process_group()"
        )
    env = WorkerEnv.read()
    link = WorkerLink.current() if env is not None else None
    if invariant:
        torch.set_num_threads(1)
    if link is not None and link.env.producer is not None:
        from regrow.train.producing import ProducerSession  # imports all that only a producer needs

        _session = ProducerSession(link.env, seed=seed)
        return _session
    worker = SupervisedWorker.open(link) if link is not None else StandaloneWorker.open()
    seed_everything(seed)
    _session = Session(worker, seed=seed, invariant=invariant)
    return _session

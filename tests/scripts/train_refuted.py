"""`train_small.py`, with a collective in its set-up, in a job that learns at a step that no newcomer would be equal."""

import os
import runpy
from pathlib import Path

import torch
import torch.distributed as dist

import regrow
from regrow.core.ids import Generation, Rank
from regrow.core.messages.replacements import ReplacementRefuted
from regrow.train.init import current_session
from regrow.train.step import Step

begin = Step.__enter__


def enter(step: Step) -> object:
    session = current_session()
    if not step.rehearsal and step.number == int(os.environ["REFUTED_AT"]) and session is not None:
        worker = session._worker
        worker.send(
            ReplacementRefuted(
                worker.worker_id, Generation(worker.generation), Rank(1), step.number, "its set-up differs"
            )
        )
    return begin(step)


Step.__enter__ = enter  # type: ignore[method-assign]
started = regrow.init


def init(**options: object) -> object:
    """As `regrow.init`, then a collective that carries what rank 0 alone knows: an echo would leave it empty."""
    session = started(**options)  # type: ignore[arg-type]
    told = torch.zeros(3)
    if session.rank == 0:
        told += torch.tensor([1.0, 2.0, 3.0])
    dist.broadcast(told, 0)
    assert told.tolist() == [1.0, 2.0, 3.0] or session.newcomer, told
    return session


regrow.init = init  # type: ignore[assignment]
runpy.run_path(str(Path(__file__).with_name("train_small.py")), run_name="__main__")

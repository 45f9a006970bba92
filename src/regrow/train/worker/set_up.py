"""What a worker hears before its loop: a first worker notes it, a newcomer is told what the first ones heard."""

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from regrow.agent.workers.link import WorkerLink
from regrow.comm.group_ranks import RankInWorld
from regrow.comm.groups import Groups
from regrow.comm.set_up.desk import AgentDesk
from regrow.comm.set_up.recording import Recording
from regrow.comm.set_up.replay import Replay
from regrow.core.ids import NO_STATE
from regrow.core.messages.replacements import ReplacementRefuted
from regrow.core.messages.vocabulary import Role
from regrow.train.state.protected import ProtectedState


class SetUpHearing:
    """From the worker's groups to its loop.

    Args:
        link: to the agent.
        groups: whose collectives are noted, or answered.
    """

    def __init__(self, link: WorkerLink, groups: Groups) -> None:
        self._link, self._groups = link, groups
        env = link.env
        self._desk = AgentDesk(env.store, env.token, build=env.restarts, rank=env.rank)
        seated, unit = RankInWorld(env.rank, env.world), env.spec.unit
        self._kind: Recording | Replay
        if env.role is Role.RANK:
            self._kind = Recording(self._desk, seated, unit)
        else:
            self._kind = Replay(
                self._desk,
                seated,
                unit,
                patience=env.spec.build_deadline,
                refuted=self._refute,
                alone=lambda call: link.early.bind_rank(f"what this rank alone is told by {call}"),
            )
        groups.set_up = self._kind

    def stop(self) -> None:
        """The script has come to its loop."""
        self._groups.set_up = None

    def settle(self, state: ProtectedState) -> str:
        """The worker is built; returns why what it has heard holds in no world of another size, empty where it does.

        Raises `SetUpDiffers` or `DeadlineExceeded` where a newcomer has not heard all.
        """
        self._kind.settle(_tensors(state))
        self._desk.close()
        if not isinstance(self._kind, Recording):
            return ""
        if self._kind.refused:
            self._refute(self._kind.refused)
        return self._kind.fixed

    def _refute(self, reason: str) -> None:
        env = self._link.env
        self._link.send(ReplacementRefuted(env.worker, env.generation, env.rank, NO_STATE, reason))


def _tensors(state: ProtectedState) -> Iterator[torch.Tensor]:
    buffers = (buffer for module in state.modules for buffer in module.buffers(recurse=False))
    for tensor in (*state.parameters(), *buffers):
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor

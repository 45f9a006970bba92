"""Makes a worker's parts once its state is built, and records or answers set-up collectives while it builds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from regrow.agent.workers.link import WorkerLink
from regrow.comm.group_ranks import RankInWorld
from regrow.comm.groups import Groups
from regrow.comm.set_up.notes import AgentNotes
from regrow.comm.set_up.recording import Recording
from regrow.comm.set_up.replay import Replay
from regrow.core.ids import NO_STATE, Seconds
from regrow.core.messages import facts
from regrow.core.messages.replacements import ReplacementRefuted
from regrow.core.messages.vocabulary import Role
from regrow.core.process.forks import at_exit
from regrow.hydration.direct_kinds import lacks
from regrow.hydration.server import HydrationServer
from regrow.train.state.buddy_copies import BuddyCopies
from regrow.train.state.durable import DurableState
from regrow.train.state.frozen import FrozenState
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.accelerator import Accelerator
from regrow.train.worker.comparison import Comparison
from regrow.train.worker.control import Control
from regrow.train.worker.fault_injection import FaultInjector
from regrow.train.worker.recovery import Recovery
from regrow.train.worker.replica_digests import Sampler


@dataclass
class Assembly:
    """Makes the parts of a worker that need its state, from those that it has from its start."""

    link: WorkerLink
    control: Control
    groups: Groups
    faults: FaultInjector
    copies: BuddyCopies
    accelerator: Accelerator

    def assemble(
        self, state: ProtectedState, buffered: Sequence[torch.nn.Module], *, form_s: Seconds
    ) -> tuple[Recovery, DurableState | None]:
        """Make the parts that need protected state: recovery, and durable state if there is a checkpoint folder.

        Args:
            state: the protected state.
            buffered: the modules whose buffers are the same on all ranks between two steps.
            form_s: deadline for re-forming the groups, in seconds.
        """
        env = self.link.env
        frozen = FrozenState(state, self.accelerator.wait)
        server = HydrationServer(
            frozen,
            token=env.token,
            socket_dir=env.socket_dir,
            bind=env.bind,
            advertise=env.advertise,
            nodes=1 if env.one_machine else max(2, env.spec.node_limit),
            ways=env.ways,
            hydration=env.spec.hydration,
        )
        server.open()
        for why in server.failed_addresses:
            self.link.send(facts.WorkerNoted(env.worker, why))
        if env.begins and env.local_rank == 0 and (lacking := lacks(env.spec.hydration)):
            self.link.send(facts.WorkerNoted(env.worker, f"state is read over sockets: {lacking}"))
        at_exit(server.close)
        comparison = sampler = None
        if env.spec.audit and not env.spec.digest_every:
            sampler = Sampler(self.link, self.control, state, own=lambda: state.buffers_of_no(buffered))
        if env.spec.digest_every:
            comparison = Comparison(
                self.link,
                self.groups,
                self.control,
                state,
                every=env.spec.digest_every,
                own=lambda: state.buffers_of_no(buffered),
                builder=env.begins,
            )
        recovery = Recovery(
            self.link,
            self.control,
            self.groups,
            state,
            frozen,
            server,
            self.faults,
            self.copies,
            self.accelerator,
            form_s=form_s,
            comparison=comparison,
            sampler=sampler,
        )
        durable = None
        if env.checkpoint_dir is not None:
            durable = DurableState(env.worker, env.checkpoint_dir, env.spec.lineage, send=self.link.send)
        return recovery, durable


class SetUpCalls:
    """Records or answers collectives between the creation of a worker's groups and its loop.

    Args:
        link: the channel to the agent.
        groups: the groups whose collectives are noted on a rank, and answered in a newcomer.
    """

    def __init__(self, link: WorkerLink, groups: Groups) -> None:
        self._link, self._groups = link, groups
        env = link.env
        self._notes = AgentNotes(env.store, env.token, build=env.restarts + len(env.finished), rank=env.rank)
        rank_in_world, unit = RankInWorld(env.rank, env.world), env.spec.unit
        self._kind: Recording | Replay
        if env.role is Role.RANK:
            self._kind = Recording(self._notes, rank_in_world, unit)
        else:
            self._kind = Replay(
                self._notes,
                rank_in_world,
                unit,
                patience=env.spec.build_deadline,
                refuted=self._refute,
                alone=lambda call: link.early.bind_rank(f"the answer for this rank alone of {call}"),
            )
        groups.set_up = self._kind

    def stop(self) -> None:
        """Stop recording or answering, as the script has come to its loop."""
        self._groups.set_up = None

    def settle(self, state: ProtectedState) -> str:
        """Conclude when the worker is built; returns why the answers hold only in a world of this size, or "".

        Raises `SetUpDiffers` or `DeadlineExceeded` if a newcomer has not received all answers.
        """
        self._kind.settle(_tensors(state))
        self._notes.close()
        if not isinstance(self._kind, Recording):
            return ""
        if self._kind.refused:
            self._refute(self._kind.refused)
        return self._kind.fixed

    def _refute(self, reason: str) -> None:
        env = self._link.env
        self._link.send(ReplacementRefuted(env.worker, env.generation, env.rank, NO_STATE, reason))


def _tensors(state: ProtectedState) -> Iterator[torch.Tensor]:
    buffers = (buffer for module in state.modules for buffer in torch.nn.Module.buffers(module, recurse=False))
    for tensor in (*state.parameters(), *buffers):
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor

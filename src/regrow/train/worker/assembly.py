"""What a worker needs besides its script once that is built: who gives and takes its state, who compares it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regrow.agent.workers.link import WorkerLink
from regrow.comm.groups import Groups
from regrow.core.ids import Seconds
from regrow.core.process.forks import at_exit
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
    """What a worker has had since it was started."""

    link: WorkerLink
    control: Control
    groups: Groups
    faults: FaultInjector
    copies: BuddyCopies
    accelerator: Accelerator

    def assemble(
        self, state: ProtectedState, buffered: Sequence[torch.nn.Module], *, form_s: Seconds
    ) -> tuple[Recovery, DurableState | None]:
        """What comes with protected state: the way into new generations, and to the disk where there is one.

        Args:
            state: what is protected.
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
        )
        server.open()
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

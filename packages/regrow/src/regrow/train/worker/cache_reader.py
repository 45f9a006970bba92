"""Reads batches from a node's data cache for one worker."""

from collections.abc import Callable

from regrow.agent.workers.link import WorkerLink
from regrow.core.ids import NO_STATE
from regrow.core.messages.data import ProducerWanted
from regrow.core.phase import Phase
from regrow.data.cache.client import NodeCache
from regrow.data.loader import Caching
from regrow.train.worker.body import Body
from regrow.train.worker.control import Control


class Reading:
    """The part of a worker that a wait for a batch needs.

    Args:
        link: the channel to the agent, which starts producers.
        control: reports whether the generation is over.
        body: reports whether the read is for a rehearsal, or in a body.
    """

    def __init__(self, link: WorkerLink, control: Control, body: Body) -> None:
        self._link, self._control, self._body = link, control, body
        self._woken: Callable[[], None] = lambda: None

    def cache(self, until: int) -> Caching | None:
        """The node's cache for a training of `until` steps; None if there is none."""
        env = self._link.env
        if env.data is None:
            return None
        node = NodeCache(env.data, env.socket_dir, env.worker, until, speaks=env.local_rank == 0, reader=self)
        return node.source

    def stop(self) -> None:
        """End a wait for a batch, as the generation is over. May be called from any thread."""
        self._woken()

    # --- calls of the cache --------------------------------------------------------------------------------------

    @property
    def stepping(self) -> bool:
        """True while the worker takes part in the training: not in a rehearsal, nor before a standby has its rank."""
        return self._control.step != NO_STATE and not self._body.rehearsing

    @property
    def moved(self) -> bool:
        """True if the world has just changed its size."""
        return self._control.resized

    @property
    def halted(self) -> bool:
        """True if the awaited batch is not needed any more."""
        return self.stepping and self._control.halted

    def on_halt(self, call: Callable[[], None]) -> None:
        """Set the function to be called, from another thread, when the generation is over."""
        self._woken = call

    def want_producer(self, loader: int) -> None:
        """Request the batches of this loader from the agent."""
        self._link.send(ProducerWanted(self._link.env.worker, loader))

    def beat(self) -> None:
        """Show the agent that the worker is alive while it waits."""
        if self.stepping:
            self._link.board.enter(Phase.COMPUTING if self._body.entered else Phase.DATA)

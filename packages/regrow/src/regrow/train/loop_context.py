"""Context of a worker's loop: its part in the job, its protected state, its batches, and its place in the world."""

import contextlib
from collections.abc import Iterable

from torch.distributed.device_mesh import DeviceMesh

from regrow.comm.torch_private import device_mesh, grad_scalers
from regrow.core.errors import UsageError
from regrow.core.ids import Generation, Rank
from regrow.core.messages.facts import WorkerNoted
from regrow.core.messages.replacements import ReplacementRefuted
from regrow.train.batches import Batches
from regrow.train.first_reads import FirstReads
from regrow.train.hooks.external import ExternalDraws
from regrow.train.hooks.regroups import RegroupHooks
from regrow.train.hooks.scale_events import ScaleHooks
from regrow.train.microbatches import Dealer
from regrow.train.sharing import Share, share_of
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.participation import Participation

_GOES_ON = (
    "training goes on, and from now on no lost rank is replaced: after a fault all workers start again, with the state "
    "in memory or on disk where that can be, else from the beginning"
)


class LoopContext:
    """The part of a loop that does not run steps: its protected state, its batches, and its place in the world.

    Args:
        worker: how this process takes part in a job.
    """

    def __init__(self, worker: Participation) -> None:
        self.worker = worker
        self.state: ProtectedState | None = None
        self.batches: Batches | None = None
        self.loader: object = None
        self.first_reads: FirstReads | None = None
        self.objects: list[object] = []
        """Objects that the script protects."""
        self.hooks, self.regroups = ScaleHooks(), RegroupHooks(worker)
        self.draws = ExternalDraws(worker)
        self.kept = ""
        """Reason that the script gives for keeping the world's size; empty if there is none."""
        self._share: Share | None = None
        self._data_of: DeviceMesh | Share | None = None
        self._last_place = (worker.rank, worker.world)
        """Rank and world size for which device meshes are made."""
        self._said_apart: set[str] = set()
        self._unprotected = ""

    @property
    def replicas(self) -> int:
        """Replicas in the world: see `Session.replicas`."""
        if self.dealer is None and self.worker.unit > 1:
            return self.worker.world // self.worker.unit
        return self.place()[1] // (self.dealer.unit if self.dealer is not None else 1)

    @property
    def dealer(self) -> Dealer | None:
        """Dealer of the micro-batches; None if steps have none."""
        return self.batches.dealer if self.batches is not None else None

    def read_share(self, data: DeviceMesh | Share | None) -> None:
        """Set the share of the global batch from `data=` of the script; None if each rank has its own."""
        self._data_of, self._share = data, share_of(data)

    def place(self) -> Share:
        """Share of the global batch that this rank reads, and the number of shares."""
        return self._share or (self.worker.rank, self.worker.world)

    def fixed(self) -> str:
        """Reason, in the data or in device meshes, why the world cannot have another size; empty if it can."""
        dealer, unit, world = self.dealer, self.worker.unit, self.worker.world
        if self.batches is None:
            return "the script has no session.steps"
        if self.kept:
            return self.kept
        if isinstance(self._data_of, tuple):
            return f"session.steps was given data={self._data_of}, which is for one world only"
        if dealer is None and self.batches.order.global_batch == 0:
            return (
                "each rank reads a batch of its own, so that the global batch would follow the number of ranks "
                "(give session.steps microbatches=, or make a regrow.DataLoader with global_batch_size=)"
            )
        if dealer is not None and self.replicas * unit != world:
            return (
                f"{world} ranks are {self.replicas} replicas of this model, but the job was started with "
                f"--replica-ranks {unit}"
            )
        return device_mesh.refusal(self.objects, unit=unit, world=world)

    def let_follow(self, spanning: Iterable[object]) -> None:
        """Let the groups of wrappers that span all replicas, and of device meshes, follow the world."""
        unit, world = self.worker.unit, self.worker.world
        across = [*spanning, *device_mesh.follows(unit=unit, world=world)]
        self.worker.groups.let_follow(across, device_mesh.inside(unit=unit, world=world))

    def follow_world(self) -> bool:
        """In a new generation, update all that depends on ranks, and read this rank's data from its step on.

        False: objects that the script builds on its groups could not be rebuilt, and another generation follows.
        """
        grad_scalers.begin_anew(self.objects)
        self.follow_place()
        if self.batches is not None:
            self.batches.seek(self.worker.step)
        return self.regroups.call_after_hooks(self.protected())

    def follow_place(self) -> None:
        """Update device meshes and the share of the data if this worker's rank or world has changed."""
        before, self._last_place = self._last_place, (self.worker.rank, self.worker.world)
        if before != self._last_place:
            device_mesh.resize(
                self.objects, unit=self.worker.unit, before=before[1], world=self.worker.world, rank=self.worker.rank
            )
            self._share = share_of(self._data_of)

    def tell_change(self) -> None:
        """In a new generation, call the script's hooks if the world's size has changed."""
        change = self.worker.waiting.take_change()
        self.draws.regrouped(change)
        self.hooks.notify(change, self.worker.step)

    @property
    def others_left(self) -> bool:
        """True if no step follows: all ranks have left their loops, or had when they sent this worker its state."""
        return self.worker.over or self.protected().variables.over

    def protected(self) -> ProtectedState:
        """The protected state. Raises `UsageError` if nothing is protected."""
        if self.state is None:
            raise UsageError("nothing is protected", hint="call session.protect(model, optimizer, ...) before steps()")
        return self.state

    def built_state(self) -> ProtectedState:
        """The protected state as the loop begins, when all ranks have built its objects. Raises `UsageError`."""
        for graph in self.protected().graphs():
            graph.settle()
        return self.protected()

    def begins(self) -> None:
        """Called after the rehearsal: from now on, state that no newcomer can receive does not end the training."""
        if self.first_reads is not None:
            self.first_reads.arrives()
        self.draws.arrives()
        for graph in self.protected().graphs():
            graph.begin()

    def remember(self) -> None:
        """Remember the state from which a body is about to start."""
        self.protected().begin()
        self.distinguish()

    def warn_of(self, error: UsageError) -> bool:
        """Warn of state that a fault would lose, found after the rehearsal; it does not end the training."""
        self._unprotected = self._unprotected or error.cause
        self._say_apart(str(error))
        return True

    def _say_apart(self, reason: str) -> None:
        if reason not in self._said_apart:
            self._said_apart.add(reason)
            place = self.worker.worker_id, Generation(self.worker.generation), Rank(self.worker.rank), self.worker.step
            self.worker.send(ReplacementRefuted(*place, reason, alone=True))
            self.worker.note_of_script(f"{reason}: {_GOES_ON}")

    def distinguish(self, *, closely: bool = False) -> None:
        """Report once the state that no newcomer can receive, or that this one lacks. `closely`: find all of it."""
        worker = self.worker
        for graph in self.protected().graphs():
            if closely:
                with contextlib.suppress(Exception):  # objects may raise in mid-body; a sender raises it again
                    graph.look_closely()
            if graph.apart:
                self._say_apart(graph.apart)
            missing, graph.missing = graph.missing, []
            if missing:
                worker.send(WorkerNoted(worker.worker_id, missing[0], doubts=True))
        if closely and self._unprotected:
            worker.send(WorkerNoted(worker.worker_id, self._unprotected, doubts=True))

    def held(self) -> list[object]:
        """Objects that the script protects, and the modules in them."""
        return [*self.objects, *self.protected().modules]

    def data(self) -> Batches:
        """The batches of the steps. Raises `UsageError` if there is no loader."""
        if self.batches is None:
            raise UsageError("no loader yet", hint="call session.steps(loader, until=...)")
        return self.batches

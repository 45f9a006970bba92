"""Interface of a worker to its session and loop, whether an agent supervises it or not."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from regrow.comm.observers import CallTaker, Tape
from regrow.comm.store import AgentStore
from regrow.core.early_reads import EarlyReads
from regrow.core.ids import Generation, Seconds, StepNo, WorkerId
from regrow.core.messages.data import BatchRecord
from regrow.core.messages.replacements import ProveReplacement, ReplacementFact
from regrow.core.messages.trainings import FinishedTraining, TrainingPlace
from regrow.core.messages.unions import WorkerFact
from regrow.core.messages.vocabulary import WorldChange
from regrow.data.loader import Caching
from regrow.train.state.protected import ProtectedState


class AttemptBody(Protocol):
    """The body of a step, from its begin to its commit, or back."""

    entered: bool
    """True while the script is in it."""
    reads: Callable[[], str]
    """Describes its reads for people."""
    waits: Callable[[], None]
    """Called while its gate waits for the device, and then."""
    awaits_causes: bool
    """True if the script uses connections of its own, whose errors may come of a death that nobody has told yet."""
    ready: Callable[[], None]
    """Called when all is there that its update needs: from then on others may commit it without this worker."""

    @property
    def own_time(self) -> Seconds:
        """Time that the newest body took up to its update without waiting for others; 0: not known."""

    @property
    def in_flight(self) -> bool:
        """True if a collective may still be under way on a device, whose numbers an abort would spoil."""

    @property
    def complete(self) -> bool:
        """True if all changes of this step are made, so that an error now comes after it."""

    def watch(self, objects: Iterable[object]) -> None:
        """These are protected: see what a body does to them, and when."""

    def begin_step(self, number: StepNo, state: ProtectedState) -> bool:
        """The body of a step starts; False when the generation is over."""

    def enter(self) -> None:
        """The script comes into the body of a step."""

    def before_update(self, last_collective: Callable[[], None], *, closure: bool = False) -> None:
        """Protected state is about to change. Raises `GenerationHalted` when it must stay as it is."""

    def logged(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """The script has logged these numbers of this rank."""

    def stepped(self, optimizer: object) -> None:
        """A protected optimizer has stepped."""

    def left(self) -> None:
        """The script is out of the body."""

    def commit(self, last_collective: Callable[[], None]) -> bool:
        """The body has ended well; False when it must run again all the same. Raises what `before_update` does."""

    def conclude(self) -> bool:
        """All that the step changes is changed: commit it."""

    def abort(self, error: Exception, state: ProtectedState) -> bool:
        """The attempt failed: put back what it changed. False: outside a job, where the error is the script's."""

    def abandon(self) -> None:
        """The script leaves in the middle of a body, by `SystemExit` or an interrupt."""

    def enter_restartable(self, number: int, training: ProtectedState | None) -> bool:
        """The `number`th restartable function since the last step starts; False when the generation is over."""

    def leave_restartable(self, following: int) -> None:
        """A restartable function has ended well; `following` may be run next."""


class ProofParty(Protocol):
    """View of a worker that shadow proofs need; implemented by `shadow_proofs.py`."""

    @property
    def wanted(self) -> str:
        """Detail in which a newcomer wants this worker's next step; empty: no newcomer does."""

    @property
    def held_up(self) -> Seconds:
        """Time that the update of the offered step has waited for readers."""

    @property
    def over(self) -> bool:
        """True if the present proof must be given up because this worker is needed."""

    def offer(self, step: StepNo) -> None:
        """The state stands before `step`, and is read until its update."""

    def publish(self, trace: bytes | None) -> None:
        """Publish the trace of the offered step; None: it was given up."""

    def listen(self, tape: Tape | None) -> None:
        """Let this hear of all collectives from now on."""

    def await_order(self) -> ProveReplacement | None:
        """Wait for something to prove; None: this worker has a place, or is released."""

    def in_place(self, order: ProveReplacement) -> AbstractContextManager[None]:
        """Within this, this worker is that rank, as far as its script can see."""

    def receive(self, state: ProtectedState, order: ProveReplacement, *, how: str) -> StepNo:
        """Get the rank's state before its next step, whose number is returned."""

    def trace_of(self, order: ProveReplacement, step: StepNo) -> bytes:
        """Trace of the rank's computation in the step."""

    def report(self, fact: ReplacementFact) -> None:
        """Say what came of it."""


class WaitingRoom(Protocol):
    """Waiting of a worker for the others."""

    def checkpoint(self) -> None:
        """At a step's boundary: take the copies of the state that are due."""

    def rejoin(self, give_up: Callable[[], None]) -> StepNo | None:
        """Wait for a membership and stand in it; the step that this worker adopted from its peers, if any.

        Args:
            give_up: called when nobody uses the old groups any more.
        """

    def take_change(self) -> WorldChange | None:
        """Change of the world's size since the last call, if there was one."""

    def finish(self, *, goes_on: bool = False, training: FinishedTraining | None = None) -> bool:
        """No step is left. Wait until no rank needs this one's state; False when a new membership must be formed.

        Args:
            goes_on: until all have run the last step alone; this is called again at the end of the script.
            training: that end is one of a training, after which the script has another.
        """


class WorkerGroups(Protocol):
    """All groups of a worker; `regrow.comm.groups.Groups`, under an agent."""

    generation: Generation
    """Of the groups that stand."""
    on_leaving: Callable[[], None] | None
    """Called before the script destroys the group of all ranks."""

    def echo(self) -> AbstractContextManager[None]:
        """Within this, collectives are answered locally."""

    def let_follow(self, across: Iterable[object], inside: Iterable[object]) -> None:
        """These groups have the ranks of all replicas, those lie inside one, however many there are."""

    def take_over(self, between: CallTaker) -> None:
        """Ask this first for each call of a collective; its `past` hears of the answers."""


class Participation(Protocol):
    """A worker's part in its job. `supervised.py` and `standalone.py` have one each; one test holds both to it."""

    worker_id: WorkerId
    early: EarlyReads
    """Reads by the script of its place before its loop."""
    rehearses: bool
    records: bool
    """True if the reads of steps are recorded."""
    proofs: "ProofParty | None"
    """This worker's side of shadow proofs; None: there are none."""
    reads_once: bool
    """True if batches come from an iterator, which does not ask again for its place once it has given one."""
    trial_steps: int
    rewrites: bool
    """False if nothing may be written into the script's frames."""
    training: TrainingPlace

    @property
    def rank(self) -> int:
        """This worker's rank now."""

    @property
    def local_rank(self) -> int:
        """This worker's rank on its node."""

    @property
    def world(self) -> int:
        """Ranks in the world."""

    @property
    def unit(self) -> int:
        """Ranks of one replica, as the job was started."""

    @property
    def nproc(self) -> int:
        """Most ranks on this node."""

    @property
    def one_node(self) -> bool:
        """True if the job can have no other node than this one."""

    @property
    def generation(self) -> int:
        """The membership that this worker runs in."""

    @property
    def step(self) -> StepNo:
        """The step that this worker stands before."""

    @property
    def halted(self) -> bool:
        """True if the generation is over."""

    @property
    def restart_index(self) -> int:
        """The restartable function that all run again before they go on; 0: none."""

    @property
    def over(self) -> bool:
        """True if all ranks have run the last step."""

    @property
    def leaves_others(self) -> bool:
        """True if the script ends with an error, so that it need not wait for the others."""

    @property
    def holds_initial_state(self) -> bool:
        """True if the state that the script built here counts, and is not overwritten by peers or a checkpoint."""

    @property
    def newcomer(self) -> bool:
        """True if this worker has joined a running training."""

    @property
    def body(self) -> AttemptBody:
        """The body of the present step."""

    @property
    def groups(self) -> WorkerGroups:
        """The groups of the script."""

    @property
    def waiting(self) -> WaitingRoom:
        """The worker's way to wait for the others. Raises `GenerationHalted` before `arrive`."""

    def echo(self) -> AbstractContextManager[None]:
        """A rehearsal: collectives are answered locally, updates are the rehearsal's own."""

    def beside(self, hook: str, within: Seconds, *, calls: bool) -> AbstractContextManager[None]:
        """Within this, a hook of the script runs on all ranks, beside its steps.

        Args:
            hook: its name, for people.
            within: seconds for which it counts as progress.
            calls: it may call collectives.
        """

    def rehearsed(self) -> bool:
        """True if the rehearsed body updated protected state through an optimizer."""

    def note_of_script(self, text: str, *, doubts: bool = False) -> None:
        """Tell people something about the script, once, whoever says it. `doubts`: the job does not end with 0."""

    def node_store(self) -> AgentStore | None:
        """Keys that this node's agent keeps for as long as it is there; None: there is no agent."""

    def send(self, fact: WorkerFact) -> None:
        """Tell whoever supervises this worker."""

    def arrive(
        self,
        state: ProtectedState,
        buckets: str,
        buffered: Sequence[torch.nn.Module] = (),
        *,
        microbatches: int = 0,
        fixed: str = "",
        unprovable: str = "",
    ) -> None:
        """Report to the coordinator: built and warm.

        Args:
            buckets: which gradients are reduced together.
            buffered: the modules whose buffers are the same on all ranks between two steps.
            microbatches: into how many the script divides a step; 0: into none.
            fixed: why the world of this script can have no other size; empty: it can.
            unprovable: why nothing of it can be compared in a shadow; empty: it can.
        """

    def compare(self, *, last: bool = False) -> bool:
        """At a step's boundary: whether replicas have the same state, where that is to be asked."""

    def cache(self, until: int) -> Caching | None:
        """The data cache of this node for a training of `until` steps; None where there is none."""

    def fetches(self, number: StepNo) -> None:
        """The batch of a step is about to be fetched."""

    def fetching(self, loader: object) -> AbstractContextManager[None]:
        """Within this, the script's loader fetches a batch, and may call no collectives."""

    def show_read(self, number: StepNo, read: BatchRecord | None) -> None:
        """Put what was read for a step where the agent finds it should this worker die in it."""

    def pass_boundary(self) -> bool:
        """The next step begins; False when this worker stops before it, as all do, because the world is to change."""

    def turn(self) -> None:
        """A training has ended, and another follows. Raises `WorkerReleased` where other processes run it."""

    def expect_after_steps(self, following: int) -> None:
        """Set the worker's place after a commit: before its first restartable function (1), or past all (0)."""

    def place_after_step(self, following: int) -> None:
        """Say which restartable function this worker may run next, of those after its last step; 0: none any more."""

    def await_position(self) -> tuple[StepNo, int]:
        """For a newcomer: where the others stand, and which restartable function since their last step they are in."""

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
    """The body of a step, from its beginning to its commit or rollback."""

    entered: bool
    """True while the script is in the body."""
    reads: Callable[[], str]
    """Describes the body's reads for people."""
    waits: Callable[[], None]
    """Called while the gate waits for the device, and after that."""
    awaits_causes: bool
    """True if the script uses connections of its own, whose errors may follow from a death not yet reported."""
    ready: Callable[[], None]
    """Called when the update has all it needs: from then on others may commit the step without this worker."""

    @property
    def own_time(self) -> Seconds:
        """Time that the newest body took up to its update without waiting for others; 0 if not known."""

    @property
    def in_flight(self) -> bool:
        """True if a collective may still be under way on a device, whose numbers an abort would spoil."""

    @property
    def complete(self) -> bool:
        """True if all changes of this step are made, so that an error now belongs to the code after it."""

    def watch(self, objects: Iterable[object]) -> None:
        """Watch these protected objects, to learn which of them a body changes, and when."""

    def begin_step(self, number: StepNo, state: ProtectedState) -> bool:
        """Start the body of a step; False if the generation is over."""

    def enter(self) -> None:
        """Note that the script enters the body of a step."""

    def before_update(self, last_collective: Callable[[], None], *, closure: bool = False) -> None:
        """Called before protected state changes. Raises `GenerationHalted` if the state must not change."""

    def logged(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """Check numbers of this rank that the script has logged, if numbers are checked."""

    def stepped(self, optimizer: object) -> None:
        """Note that a protected optimizer has stepped."""

    def left(self) -> None:
        """Note that the script has left the body."""

    def commit(self, last_collective: Callable[[], None]) -> bool:
        """Commit a body without an error; False if it must run again all the same. Raises errors of `before_update`."""

    def conclude(self) -> bool:
        """Commit the step, as all its changes are made."""

    def abort(self, error: Exception, state: ProtectedState) -> bool:
        """Undo the changes of a failed attempt. False outside a job: there the error is the script's."""

    def abandon(self) -> None:
        """Give up a body that the script leaves by `SystemExit` or an interrupt."""

    def enter_restartable(self, number: int, training: ProtectedState | None) -> bool:
        """Start the `number`th restartable function since the last step; False if the generation is over."""

    def leave_restartable(self, following: int) -> None:
        """End a restartable function that returned; number `following` may run next."""


class ProofParty(Protocol):
    """The part of a worker that shadow proofs need; implemented by `shadow_proofs.py`."""

    @property
    def wanted(self) -> str:
        """Level of detail of the trace that a newcomer wants of this worker's next step; empty if none is wanted."""

    @property
    def held_up(self) -> Seconds:
        """Time that the update of the offered step waited for readers."""

    @property
    def over(self) -> bool:
        """True if the present proof must be given up because this worker is needed."""

    def offer(self, step: StepNo) -> None:
        """Offer the state before `step`, to be read until the step's update."""

    def publish(self, trace: bytes | None) -> None:
        """Publish the trace of the offered step; None if it was given up."""

    def listen(self, tape: Tape | None) -> None:
        """Send all collectives to this tape from now on."""

    def await_order(self) -> ProveReplacement | None:
        """Wait for an order to prove a replacement; None if this worker has a rank, or is released."""

    def in_place(self, order: ProveReplacement) -> AbstractContextManager[None]:
        """Context in which this worker appears to its script as the rank to be proven."""

    def receive(self, state: ProtectedState, order: ProveReplacement, *, how: str) -> StepNo:
        """Receive the rank's state before its next step; returns the number of that step."""

    def trace_of(self, order: ProveReplacement, step: StepNo) -> bytes:
        """Trace of the rank's computation in the step."""

    def report(self, fact: ReplacementFact) -> None:
        """Report the result of a proof."""


class WaitingRoom(Protocol):
    """Interface to a worker's waits for the other ranks."""

    def checkpoint(self) -> None:
        """At a step's boundary, take the copies of the state that are due."""

    def rejoin(self, give_up: Callable[[], None]) -> StepNo | None:
        """Wait for a membership and join it; returns the step that its peers committed for this worker, if any.

        Args:
            give_up: called when no rank uses the old groups any more.
        """

    def take_change(self) -> WorldChange | None:
        """Change of the world's size since the last call, if there was one."""

    def finish(self, *, goes_on: bool = False, training: FinishedTraining | None = None) -> bool:
        """After the last step, wait until no rank needs this rank's state; False if a new membership must be formed.

        Args:
            goes_on: wait only until all have run the last step; this is called again at the end of the script.
            training: the training that ends here, if the script has another one after it.
        """


class WorkerGroups(Protocol):
    """All groups of a worker; under an agent `regrow.comm.groups.Groups`."""

    generation: Generation
    """Generation of the present groups."""
    on_leaving: Callable[[], None] | None
    """Called before the script destroys the group of all ranks."""

    def echo(self) -> AbstractContextManager[None]:
        """Context in which collectives are answered locally."""

    def let_follow(self, across: Iterable[object], inside: Iterable[object]) -> None:
        """Let groups follow the world: `across` have the ranks of all replicas, `inside` those of one."""

    def take_over(self, between: CallTaker) -> None:
        """Offer each call of a collective to `between` first; its `past` receives the answers."""


class Participation(Protocol):
    """A worker's part in its job; implemented in `supervised.py` and `standalone.py`, which the same test checks."""

    worker_id: WorkerId
    early: EarlyReads
    """Records where the script has read its rank and the world's size before its loop."""
    rehearses: bool
    records: bool
    """True if the reads of steps are recorded."""
    proofs: "ProofParty | None"
    """This worker's side of shadow proofs; None if there are none."""
    reads_once: bool
    """True if batches come from an iterator, which reads the rank only until it has given its first batch."""
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
        """Largest number of ranks on this node."""

    @property
    def one_node(self) -> bool:
        """True if the job can have no other node."""

    @property
    def generation(self) -> int:
        """Number of the membership that this worker runs in."""

    @property
    def step(self) -> StepNo:
        """The step that this worker will run next."""

    @property
    def halted(self) -> bool:
        """True if the generation is over."""

    @property
    def restart_index(self) -> int:
        """Number of the restartable function that all ranks run again before they go on; 0: none."""

    @property
    def over(self) -> bool:
        """True if all ranks have run the last step."""

    @property
    def leaves_others(self) -> bool:
        """True if the script ends with an error, so that it need not wait for the others."""

    @property
    def holds_initial_state(self) -> bool:
        """True if the state built by the script here is used, and not overwritten by peers or a checkpoint."""

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
        """Interface to this worker's waits for the others. Raises `GenerationHalted` before `arrive`."""

    def echo(self) -> AbstractContextManager[None]:
        """Context of a rehearsal: collectives are answered locally, and updates count for the rehearsal only."""

    def beside(self, hook: str, within: Seconds, *, calls: bool) -> AbstractContextManager[None]:
        """Context in which a hook of the script runs on all ranks, outside its steps.

        Args:
            hook: name of the hook, for people.
            within: seconds for which the hook counts as progress.
            calls: whether the hook may call collectives.
        """

    def rehearsed(self) -> bool:
        """True if the rehearsed body updated protected state through an optimizer."""

    def note_of_script(self, text: str, *, doubts: bool = False) -> None:
        """Report a note on the script, shown once if several ranks send it. `doubts`: the job does not exit with 0."""

    def node_store(self) -> AgentStore | None:
        """Store of keys that this node's agent keeps for its lifetime; None if there is no agent."""

    def send(self, fact: WorkerFact) -> None:
        """Send a fact to the supervisor of this worker."""

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
        """Report to the coordinator that this worker is built and warm.

        Args:
            state: the protected state.
            buckets: the layout of buckets in which gradients are reduced together.
            buffered: the modules whose buffers are the same on all ranks between two steps.
            microbatches: number of micro-batches of a step; 0 if it has none.
            fixed: reason why the world of this script cannot have another size; empty if it can.
            unprovable: reason why nothing can be compared in a shadow proof; empty if it can.
        """

    def compare(self, *, last: bool = False) -> bool:
        """At a step's boundary: True if replicas have the same state, or no comparison is due."""

    def cache(self, until: int) -> Caching | None:
        """The data cache of this node for a training of `until` steps; None if there is none."""

    def fetches(self, number: StepNo) -> None:
        """Note that the batch of a step is about to be fetched."""

    def fetching(self, loader: object) -> AbstractContextManager[None]:
        """Context in which the script's loader fetches a batch, and must not call collectives."""

    def show_read(self, number: StepNo, read: BatchRecord | None) -> None:
        """Record the read of a step where the agent can find it if this worker dies in the step."""

    def pass_boundary(self) -> bool:
        """Begin the next step; False if all ranks stop before it because the world is to change."""

    def turn(self) -> None:
        """Go on to the next training, as this one has ended. Raises `WorkerReleased` if other processes run it."""

    def expect_after_steps(self, following: int) -> None:
        """Set the worker's place right after a commit: before its first restartable function (1), or past all (0)."""

    def place_after_step(self, following: int) -> None:
        """Set the number of the restartable function after its last step that this worker may run next; 0: none."""

    def await_position(self) -> tuple[StepNo, int]:
        """For a newcomer: the next step of the other ranks, and the restartable function that they are in."""

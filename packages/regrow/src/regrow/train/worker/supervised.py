"""A worker that an agent has started, as a participant of its job."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import xxhash

from regrow.agent.workers.imports import changed, installed
from regrow.agent.workers.link import WorkerLink
from regrow.comm import nccl
from regrow.comm.flight import FLIGHT
from regrow.comm.groups import Formation, Groups
from regrow.comm.on_device.bell import BELLS
from regrow.comm.on_device.waits import WAITS
from regrow.comm.store import AgentStore
from regrow.comm.torch_private import device_mesh, expected_names, internals
from regrow.core.errors import GenerationHalted, StateError
from regrow.core.ids import NO_STATE, Seconds, StepNo
from regrow.core.messages import facts
from regrow.core.messages.data import BatchRecord
from regrow.core.messages.trainings import TrainingPlace
from regrow.core.messages.unions import WorkerFact
from regrow.core.messages.vocabulary import FaultKind, FaultStage, Role
from regrow.core.phase import Phase
from regrow.core.process.stage_times import BUILD, REHEARSE
from regrow.data.loader import Caching
from regrow.devices import accelerators
from regrow.train.state.buddy_copies import BuddyCopies
from regrow.train.state.durable import Read
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.accelerator import accelerator_of
from regrow.train.worker.assembly import Assembly, SetUpCalls
from regrow.train.worker.body import Body
from regrow.train.worker.cache_reader import Reading
from regrow.train.worker.control import Control
from regrow.train.worker.failed_device import judge_failure
from regrow.train.worker.fault_injection import FaultInjector
from regrow.train.worker.participation import ProofParty
from regrow.train.worker.recovery import site_of
from regrow.train.worker.rejoin import Rejoin, WorkerReleased, report_fault
from regrow.train.worker.shadowing.shadow_proofs import ShadowProofs
from regrow.train.worker.stray_calls import Beside, StrayCalls
from regrow.train.worker.update_gate import UpdateGate

FORM_S: Seconds = 60.0


class SupervisedWorker:
    """A worker that an agent has started; it takes part in a job."""

    rehearses = True
    records = True
    """True if the reads of steps are recorded."""

    def __init__(self, link: WorkerLink, groups: Groups) -> None:
        self._link, self.groups = link, groups
        self.worker_id, self.early = link.env.worker, link.early
        self.trial_steps, self.rewrites = link.env.spec.trial_steps, link.env.spec.rewrites
        alone = "" if link.env.checkpoint_dir is None else "the job was started with --checkpoint-dir"
        self.training = TrainingPlace(link.env.finished, alone=alone)
        self.reads_once = False
        """True if batches come from an iterator, which reads the rank only until it has given its first batch."""
        self._state: ProtectedState | None = None
        self._rejoin: Rejoin | None = None
        self._set_up: SetUpCalls | None = None
        self._born = time.monotonic()
        self.control = Control(
            link,
            stop=self._stop,
            arm=lambda fault: self._faults.arm(fault),
            stored=lambda answer: self._copies.stored(answer),
        )
        self._copies = BuddyCopies(link, every=link.env.spec.buddy_every, halted=lambda: self.control.halted)
        self._faults = FaultInjector(
            link,
            groups,
            parameters=lambda: self._state.parameters() if self._state else [],
            halted=lambda: self.control.halted,
        )
        self._gate = UpdateGate(link, self.control, groups, self._faults, self._copies)
        self.body = Body(link, self.control, groups, self._faults, self._gate)
        self._stray = StrayCalls(link.board, groups, self.control, self.body)
        groups.observers = (self.body, self._stray, *self.body.checks)
        self._beside = Beside(link.board, groups, self.note_of_script)
        self.reading = Reading(link, self.control, self.body)
        self.proofs: ProofParty | None = ShadowProofs(link, self.control, groups, self.body)

    @classmethod
    def open(cls, link: WorkerLink) -> "SupervisedWorker":
        """Make the groups of this worker's generation (echo groups for a newcomer), and begin to take orders."""
        env, groups = link.env, Groups()
        worker = cls(link, groups)
        groups.unit = env.spec.unit
        if env.spec.elastic:
            device_mesh.watch()
        formation = None
        if env.role is Role.RANK:
            formation = Formation(env.generation, env.rank, env.world, env.store, site_of(env))
        link.excused = lambda: worker.control.halted or groups.refused or groups.broke()
        link.failing = partial(judge_failure, link)
        link.advice = lambda: worker._stray.advice() if worker._state is not None else ""
        worker.control.start()
        groups.early = link.early if link.early.watching else None
        worker._set_up = SetUpCalls(link, groups)
        BELLS.show = link.board.show_bell
        groups.install(rank=env.rank, world=env.world, formation=formation, form_s=FORM_S)
        if reported := expected_names.shortfalls():
            worker.note_of_script(reported)
        FLIGHT.show = link.board.show_flight
        nccl.ERRORS.report = worker._report_groups_error
        WAITS.body_beats = link.board.body_beats
        return worker

    def _report_groups_error(self, why: str) -> None:
        """Report an error that a device's groups detected, as the training thread might wait for them for ever."""
        if not self.control.halted:
            error = StateError(f"the groups of its device have failed ({why})")
            report_fault(self._link, self.control.generation, self.control.step, FaultKind.GROUPS, error)

    # --- place in the job --------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank now."""
        return self._link.env.rank

    @property
    def local_rank(self) -> int:
        """This worker's rank on its node."""
        return self._link.env.local_rank

    @property
    def world(self) -> int:
        """Ranks in the world."""
        return self._link.env.world

    @property
    def unit(self) -> int:
        """Ranks of one replica, as the job was started."""
        return self._link.env.spec.unit

    @property
    def nproc(self) -> int:
        """Largest number of ranks on this node."""
        return self._link.env.spec.nproc

    @property
    def one_node(self) -> bool:
        """True if the job can have no other node."""
        return self._link.env.spec.node_limit == 1

    @property
    def generation(self) -> int:
        """Number of the membership that this worker runs in."""
        return self.control.generation

    @property
    def step(self) -> StepNo:
        """The step that this worker will run next."""
        return self.control.step

    @property
    def halted(self) -> bool:
        """True if the generation is over."""
        return self.control.halted

    @property
    def over(self) -> bool:
        """True if all ranks have run the last step."""
        return self.control.over

    @property
    def leaves_others(self) -> bool:
        """True if the script ends with an error, so that it need not wait for the others."""
        return self._link.failed or self._link.ended_badly

    # --- before the first step ---------------------------------------------------------------------------------

    @property
    def holds_initial_state(self) -> bool:
        """True if the state built by the script here is used, and not overwritten by peers or a checkpoint."""
        return self._link.env.begins

    @property
    def newcomer(self) -> bool:
        """True if this worker has joined a running training."""
        return self._link.env.role is not Role.RANK

    @contextmanager
    def echo(self) -> Iterator[None]:
        """Context of a rehearsal: collectives are answered locally, and updates count for the rehearsal only."""
        if not self.reads_once:
            self._stop_listening()
        self._reached(BUILD)
        with self.body.rehearsal(), self.groups.echo():
            yield

    def _reached(self, stage: str) -> dict[str, Seconds]:
        """Record the end of a stage before the loop. Returns the times of stages so far; none for a standby."""
        stages = self._link.stages
        if stage not in stages.seconds:
            stages.reached(stage, time.monotonic(), internals.compiled())
            stages.stop()
        return {} if self._link.env.role is Role.STANDBY else stages.seconds

    def _stop_listening(self) -> None:
        """Stop noting early reads and set-up calls, as the script has come to its loop."""
        self.early.stop()
        self.groups.early = None
        if self._set_up is not None:
            self._set_up.stop()

    def beside(self, hook: str, within: Seconds, *, calls: bool) -> AbstractContextManager[None]:
        """Context in which a hook of the script runs on all ranks, outside its steps."""
        return self._beside.run(hook, within, calls=calls)

    def rehearsed(self) -> bool:
        """True if the rehearsed body updated protected state through an optimizer."""
        return self.body.updated

    def node_store(self) -> AgentStore:
        """Store of keys that this node's agent keeps across generations."""
        return AgentStore(self._link.env.store, self._link.env.token, "")

    def send(self, fact: WorkerFact) -> None:
        """Send a fact to the agent."""
        self._link.send(fact)

    def note_of_script(self, text: str, *, doubts: bool = False) -> None:
        """Report a note on the script, shown once if several ranks send it. `doubts`: the job does not exit with 0."""
        self._link.send(facts.WorkerNoted(self._link.env.worker, text, doubts=doubts))

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
        """Report to the coordinator that this worker is built and warm: see `Participation.arrive`."""
        self._state = state
        self._stop_listening()
        if accelerators.in_use() is not None and torch.accelerator.device_count() > 1:
            self.early.bind(f"{accelerators.kind().upper()} device {torch.accelerator.current_device_index()}")
        self._gate.accelerator = accelerator_of(state.parameters())
        workplace = Assembly(self._link, self.control, self.groups, self._faults, self._copies, self._gate.accelerator)
        recovery, durable = workplace.assemble(state, buffered, form_s=FORM_S)
        self.body.recovery = recovery
        self._rejoin = Rejoin(self._link, self.control, recovery, state, self._copies, durable)
        env, read = self._link.env, Read(NO_STATE, {})
        if env.begins:
            reads = durable is not None and env.resume
            read = durable.load(state, env.rank, env.avoid) if durable and reads else Read(self.training.began, {})
        reported = "" if self._set_up is None else self._set_up.settle(state)
        holding = state.layout()
        self._link.board.enter(Phase.WAITING)
        self._link.send(
            facts.WorkerReady(
                env.worker,
                read.step,
                recovery.server.endpoint,
                xxhash.xxh3_64_hexdigest(f"{holding}|{buckets}".encode()),
                built_s=time.monotonic() - self._born,
                holding=holding,
                whole_body=self.body.whole_body,
                sharded=self.groups.count > 1 or state.parted(),
                microbatches=microbatches,
                fixed=fixed or self.groups.fixed() or reported,
                between=self.control.first_restart > 0,
                early=self.early.found,
                parts=recovery.first_look() if env.begins else {},
                imported=installed(self._link.modules) if self.rank == 0 and self.rewrites else [],
                environment=changed(self._link.environment) if self.rank == 0 else [],
                refused=read.refused,
                unprovable=unprovable,
                training=self.training.name,
                devices_taken=accelerators.all_taken(env.spec.nproc),
                stages=self._reached(REHEARSE if BUILD in self._link.stages.seconds else BUILD),
            )
        )

    # --- steps -------------------------------------------------------------------------------------------------

    def compare(self, *, last: bool = False) -> bool:
        """At a step's boundary: True if replicas have the same state, or no comparison is due.

        False if they differ; the coordinator knows, and `rejoin` waits for its verdict. Raises what collectives raise.

        Args:
            last: no step follows.
        """
        recovery = self.body.recovery
        if recovery is None:
            return True
        if recovery.sampler is not None and not self.control.halted:
            recovery.sampler.tick(self.control.step, last=last)
        comparison = recovery.comparison
        return comparison is None or comparison.compare(self.control.step, last=last)

    def cache(self, until: int) -> Caching | None:
        """The data cache of this node for a training of `until` steps; None if there is none."""
        return self.reading.cache(until)

    def fetches(self, number: StepNo) -> None:
        """Note that the batch of a step is about to be fetched."""
        self._link.board.enter(Phase.DATA, step=number, generation=self.control.generation)
        self._faults.inject(FaultStage.DATA, number)

    @contextmanager
    def fetching(self, loader: object) -> Iterator[None]:
        """Context in which the script's loader fetches a batch, and must not call collectives."""
        with self.body.fetching.of(loader):
            yield
        self._stop_listening()

    def show_read(self, number: StepNo, read: BatchRecord | None) -> None:
        """Record the read of a step where the agent can find it if this worker dies in the step."""
        if read is not None:
            self._link.board.show_batch(self.control.generation, number, read)

    def pass_boundary(self) -> bool:
        """Begin the next step; False if all ranks stop before it because the world is to change."""
        self._faults.inject(FaultStage.AFTER, StepNo(self.control.step - 1))
        return self.control.pass_boundary()

    def turn(self) -> None:
        """End this worker, as all do: new workers run the next training. See `Participation.turn`."""
        raise WorkerReleased(None)

    def expect_after_steps(self, following: int) -> None:
        """Set the worker's place right after a commit: before its first restartable function (1), or past all (0)."""
        self.control.first_restart = following

    def place_after_step(self, following: int) -> None:
        """Set the number of the restartable function after its last step that this worker may run next; 0: none."""
        self.control.restart_index = following
        if following == 0:
            self.control.reformed = False

    def await_position(self) -> tuple[StepNo, int]:
        """For a newcomer: the next step of the other ranks, and the restartable function that they are in."""
        form = self.control.peek_form()
        return form.step, 0 if form.over else form.restart_index

    @property
    def restart_index(self) -> int:
        """Number of the restartable function that all ranks run again before they go on; 0: none."""
        return self.body.recovery.restart_index if self.body.recovery is not None else 0

    @property
    def waiting(self) -> Rejoin:
        """Interface to this worker's waits for the others. Raises `GenerationHalted` before `arrive`."""
        if self._rejoin is None:
            raise GenerationHalted("this worker has not arrived yet")
        return self._rejoin

    def _stop(self) -> None:
        """End all that may block the training thread, as the generation is over. Called by the control thread."""
        self.groups.halt()
        self.body.interrupt.set()
        self._copies.wake()
        self.reading.stop()
        if self.body.recovery is not None:
            self.body.recovery.stop()

"""A worker as the coordinator sees one: builds, joins, steps, commits, finishes; and fails at any moment."""

import msgspec

from regrow.core.ids import NO_STATE, Generation, Instant, Seconds, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.observations import ProveAlive, WorkerAlive
from regrow.core.messages.replacements import ProveReplacement, ReplacementProven, ReplacementRefuted
from regrow.core.messages.unions import WorkerOrder
from regrow.core.messages.vocabulary import ErrorReport, FaultHow, FaultKind, FaultSpec, Role, Warmth
from regrow_lab.sim.script import IN_STEP, Doing
from regrow_lab.sim.worker_process import SimProcess


class SimWorker(SimProcess):
    """One worker process: its reactions to orders, and its own course."""

    def start(self) -> None:
        """Begin, once the process exists."""
        if self.spawn.role is Role.STANDBY and self._warmth is Warmth.IMPORTS and self._around.script.with_session:
            self._enter(Doing.IDLE)
            self._around.say(self, facts.WorkerReady(self.worker, NO_STATE, "", ""))
        else:
            self._build()

    def order(self, order: WorkerOrder) -> None:
        """Handle an order from the agent."""
        if self.hung or not self.alive:
            return
        match order:
            case orders.HaltGeneration(at=None) if self.stalled:
                # Another thread answers for it, unless an update is half done.
                if order.generation > self._halted_in and self.doing is not Doing.UPDATING:
                    self._halted_in = order.generation
                    self._leave_group(reset=False)
                    halted = facts.WorkerHalted(self.worker, order.generation, self.state, self.ready, stands=False)
                    self._around.say(self, halted)
            case ProveAlive():
                self._around.say(self, WorkerAlive(self.worker))
            case _ if self.stalled:
                pass
            case orders.StartScript() if self.doing is Doing.IDLE:
                self.rank, self.placed = order.rank, True
                self._build()
            case orders.FormGeneration() if order.generation > max(self.generation, self._halted_in):
                self._take_place(order)
            case orders.HaltGeneration(at=None) if order.generation > self._halted_in:
                self._give_up(order)
            case orders.HaltGeneration(at=int() as at) if order.generation == self.generation > self._halted_in:
                self._plan_halt(order.generation, at)
            case orders.ReleaseWorker(goes_on=True) if self.doing is Doing.FINISHED and not self._over:
                self._go_on()
            case orders.ReleaseWorker(goes_on=False) if self.doing in (Doing.FINISHED, Doing.HALTED):
                self._leave_group(reset=False)
                self._enter(Doing.FINISHED if self._over else Doing.AFTER)
                self.later(self._around.jitter(0.01 if self._over else self._around.script.after), "end", 0)
            case orders.ArmFault():
                self._armed[order.fault.fault] = order.fault
            case ProveReplacement() if self.doing is Doing.READY:
                self._around.after(self._around.jitter(self._around.script.compute), lambda: self._proves(order))
            case _:
                pass

    def _proves(self, order: ProveReplacement) -> None:
        if self.doing is Doing.READY and not self.hung:
            self._around.say(self, ReplacementProven(self.worker, order.generation, order.rank, StepNo(0), 0.001, 0.1))

    def raise_in_body(self, error: ErrorReport) -> None:
        """Raise in the step's own code; outside of a step the script fails."""
        if not self.alive or self.hung or self.stalled:
            return
        if self.doing in (Doing.COMPUTING, Doing.REDUCING) and self._around.script.with_session:
            self._fault(FaultKind.BODY, error)
        else:
            step = self.state if self.doing in (Doing.FINISHED, Doing.AFTER) else StepNo(-1)
            self._around.say(self, facts.WorkerFailed(self.worker, error, step))
            self.end(1)

    def _build(self) -> None:
        self._enter(Doing.BUILDING)
        self.later(self._around.jitter(self._around.script.build), "built")

    def built(self) -> None:
        """Called when the script has reached its first step; a script without a session runs to its end."""
        script = self._around.script
        if not script.with_session:
            self._enter(Doing.AFTER)
            self.later(self._around.jitter(script.compute * script.until), "end", 0)
            return
        if self._around.fails(self):
            reported = ErrorReport("OSError", "the data set cannot be read", "OSError: the data set cannot be read")
            self._around.say(self, facts.WorkerFailed(self.worker, reported, StepNo(-1)))
            self.end(1)
            return
        if self.spawn.role is Role.RANK and not self.spawn.restored:
            self.state = self._around.disk.durable if self.spawn.resume else StepNo(0)
        self._wait(Doing.READY)
        ready = facts.WorkerReady(self.worker, self.state, f"sim:{self.worker}", "layout", script.build)
        if script.parts:
            self.holding = f"part {self.rank % script.parts}"
            ready = msgspec.structs.replace(ready, holding=self.holding, layout=self.holding, sharded=True)
        self._around.say(self, ready)

    def gives_up(self) -> None:
        """Fail, because no order arrived in time."""
        error = ErrorReport("DeadlineExceeded", f"{self.worker} received nothing", "DeadlineExceeded", self.doing)
        self._around.say(self, facts.WorkerFailed(self.worker, error, self.state))
        self.end(1)

    def _take_place(self, form: orders.FormGeneration) -> None:
        self._leave_group(reset=False)
        self._form, self._halt, self._halt_at = form, None, None
        self._over = self._over or form.over
        self.generation, self.rank, self.placed = form.generation, form.rank, True
        self.ready = self.ready and form.step > self.state
        self._armed.update({spec.fault: spec for spec in form.faults})
        self.group = self._around.group(form.generation, form.members)
        self._enter(Doing.FORMING)
        self.group.enter(self)

    def formed(self) -> None:
        """Receive the missing state, as the groups have formed."""
        if self._form is None or self.doing is not Doing.FORMING:
            return
        if self._form.rank in self._form.holders:
            self.state, self.ready = self._form.step, False  # A holder that was ready applies its own gradients.
            self._resume(0.0)
            return
        self._enter(Doing.HYDRATING)
        self.later(self._around.jitter(self._around.script.hydrate), "hydrated", self._around.now())

    def hydrated(self, since: Instant) -> None:
        """Take the state from a holder; fail if no holder is left."""
        form, group = self._form, self.group
        if form is None or group is None:
            return
        if form.restore is not None:
            self._restored(form.step, self._around.readable(form.restore), since)
            return
        holders = [group.has(member.worker) for member in form.members if member.rank in form.holders]
        giving = [
            peer
            for peer in holders
            if isinstance(peer, SimWorker) and peer.state == form.step and peer.holding == self.holding
        ]
        if any(not peer.hung and not peer.stalled for peer in giving):
            self.state, self.ready = form.step, False
            self._resume(self._around.now() - since)
        elif not giving:
            # The part that had arrived has overwritten the old state.
            self.state, self.ready = NO_STATE, False
            self._fault(FaultKind.HYDRATION, ErrorReport("HydrationError", "no holder", "HydrationError"))

    def _restored(self, step: StepNo, read: bool, since: Instant) -> None:
        """Take the state from an agent's memory; fail if the copy is gone."""
        self.state, self.ready = step if read else NO_STATE, False
        if read:
            self._resume(self._around.now() - since)
        else:
            self._fault(FaultKind.HYDRATION, ErrorReport("HydrationError", "no copy", "HydrationError"))

    def refute(self, *, alone: bool) -> None:
        """Report that no newcomer is equal to the rank that it would replace."""
        reason = "the set-up differs"
        self._around.say(self, ReplacementRefuted(self.worker, self.generation, self.rank, self.state, reason, alone))

    def _resume(self, took: Seconds) -> None:
        self._around.say(self, facts.WorkerResumed(self.worker, self.generation, 0.01, took, int(took * 1000)))
        self._begin()

    def symptom(self) -> None:
        """Wait for the coordinator's verdict after a failed collective."""
        if self.doing in (Doing.REDUCING, Doing.VOTING, Doing.FORMING):
            self._fault(FaultKind.COLLECTIVE, ErrorReport("RuntimeError", "connection reset", "RuntimeError"))

    def _fault(self, kind: FaultKind, error: ErrorReport) -> None:
        self._around.say(self, facts.WorkerFaulted(self.worker, self.generation, self.state, kind, error))
        self._wait(Doing.WAITING)

    def _give_up(self, halt: orders.HaltGeneration) -> None:
        self._halt = halt
        if self.doing is Doing.UPDATING:
            return  # The update itself is never interrupted.
        torn = self.doing is Doing.HYDRATING
        self._leave_group(reset=False)
        self._enter(Doing.HALTING)
        self.later(self._around.jitter(0.01), "halted", torn)

    def _plan_halt(self, generation: Generation, at: StepNo) -> None:
        if self.doing is Doing.FINISHED or self.doing is Doing.HALTED:
            return
        if self.doing in IN_STEP and self.state >= at:
            self._around.say(self, facts.HaltMissed(self.worker, generation, at, self.state))
        else:
            self._halt_at = at

    def halted(self, torn: bool = False) -> None:
        """Report the halt after leaving the groups."""
        if self._halt is None:
            return
        if torn:
            self.state, self.ready = NO_STATE, False
        halt, self._halt = self._halt, None
        self._halted_in = halt.generation
        self._leave_group(reset=False)
        self._wait(Doing.HALTED)
        self._around.say(self, facts.WorkerHalted(self.worker, halt.generation, self.state, self.ready))

    def _begin(self) -> None:
        script = self._around.script
        leaves = script.leaves is not None and (self.rank, self.state) == script.leaves
        if leaves or self.state >= script.until:
            self._go_on() if self._over else self._finish(goes_on=script.goes_on)
            return
        if self._halt_at is not None and self.state >= self._halt_at:
            self._wait(Doing.HALTED)  # The groups stay as they are: others may be about to use them.
            self._around.say(self, facts.WorkerHalted(self.worker, self.generation, self.state))
            return
        self._enter(Doing.COMPUTING)
        self.later(self._around.jitter(script.compute), "computed")
        due = [spec for spec in self._armed.values() if spec.step is None or spec.step == self.state]
        if due:
            self._inject(due[0])

    def _go_on(self) -> None:
        self._over = True
        self._enter(Doing.AFTER)
        self.later(self._around.jitter(self._around.script.after), "_finish")

    def _finish(self, *, goes_on: bool = False) -> None:
        self._wait(Doing.FINISHED)
        self._around.say(self, facts.WorkerFinished(self.worker, self.generation, self.state, goes_on))

    def _inject(self, spec: FaultSpec) -> None:
        del self._armed[spec.fault]
        self._around.say(self, facts.FaultFired(self.worker, spec.fault, self.state, self._around.now()))
        if spec.how is FaultHow.EXCEPTION:
            self.raise_in_body(ErrorReport("InjectedFault", spec.fault, "InjectedFault"))
        elif spec.how is FaultHow.SIGSTOP:
            self.hang()
        else:
            self.end(-9 if spec.how is not FaultHow.EXIT else 3)

    def computed(self) -> None:
        """Called when the gradients of this rank are computed."""
        if self._around.script.bug == (self.rank, self.state):
            self.raise_in_body(ErrorReport("ValueError", "a bad batch", "ValueError: a bad batch"))
            return
        self._enter(Doing.REDUCING)
        if self.group is not None:
            self.group.arrive(self, self.state)

    def reduced(self, step: StepNo) -> None:
        """Called when the gradients of all ranks are summed."""
        if self.doing is not Doing.REDUCING or self.group is None or step != self.state:
            return
        if not self.group.completes():
            return  # It blocks: the sum was broken before it reached this rank.
        if self._around.script.parts:
            self.ready = True
            self._enter(Doing.VOTING)
            self.group.arrive(self, step, "voted")
        else:
            self._update()

    def voted(self, step: StepNo) -> None:
        """Called when all ranks have the inputs of the update."""
        if self.doing is Doing.VOTING and self.group is not None and step == self.state and self.group.completes():
            self._update()

    def _update(self) -> None:
        self._enter(Doing.UPDATING)
        self.later(self._around.jitter(self._around.script.update), "updated")

    def updated(self) -> None:
        """Called when the update is done: commit the step."""
        now = self._around.now()
        commit = facts.WorkerCommitted(self.worker, self.generation, self.state, now, 0.5, {"loss": 1.0}, 4)
        self.state, self.ready = StepNo(self.state + 1), False
        self._around.progressed(self, commit)
        if self._announced < self.generation:
            self._announced = self.generation
            self._around.say(self, commit)
        if self._halt is not None:
            self.halted()
        else:
            self._begin()

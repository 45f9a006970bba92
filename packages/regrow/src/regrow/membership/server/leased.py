"""A machine that makes no decisions while another coordinator may have been elected."""

from collections.abc import Callable, Sequence

import msgspec

from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.ids import Instant, NodeId, Seconds
from regrow.core.job import JobSpec
from regrow.core.messages import facts
from regrow.core.messages.elections import Leader
from regrow.core.messages.unions import Fact
from regrow.membership.orders import Command, Deposed, EndJob
from regrow.membership.server.hosted import Machine
from regrow.membership.succession.late_facts import aged, says_all_of, still_meant
from regrow.membership.succession.voters import PASSED_S, Voters

_LOOK_S: Seconds = 0.2
_GIVE_UP_S: Seconds = 30.0
"""Time for the links to voters to come back."""


class LeasedMachine:
    """Behaves like the machine that it wraps while this coordinator may decide; at other times facts wait.

    Args:
        machine: takes the decisions.
        voters: the launchers, which may have elected another coordinator.
        changed: called after decisions that a successor needs to know.
    """

    def __init__(self, machine: Machine, voters: Voters, changed: Callable[[], None]) -> None:
        self._machine, self._voters, self._changed = machine, voters, changed
        self._held: list[tuple[Instant, Fact]] = []
        self._blocked_since: Instant | None = None
        self._reported_at: Instant = float("-inf")
        """Time at which another node last reported a step."""
        self._look_at: Instant | None = None
        self._retired = False

    @property
    def spec(self) -> JobSpec:
        """Specification with which the job was started."""
        return self._machine.spec

    @property
    def world(self) -> int:
        """Ranks of the present world, or of the one that is being formed."""
        return self._machine.world

    def snapshot(self) -> msgspec.Struct:
        """The last known state of the job, for people."""
        return self._machine.snapshot()

    def next_deadline(self) -> Instant | None:
        """Latest time at which `TimeAdvanced` must be sent; None: nothing is awaited."""
        return self._machine.next_deadline() if self._look_at is None else self._look_at

    def retire(self) -> None:
        """Make no further decisions, because this process ends and others elect another coordinator."""
        self._retired = True

    def handle(self, event: Fact, now: Instant) -> list[Command]:
        """Take one fact; return the resulting commands, in order."""
        if self._retired:
            return []
        if isinstance(event, facts.NodeProgress) and event.node != self._voters.me.node:
            self._reported_at = now
        self._held = [*((since, fact) for since, fact in self._held if not says_all_of(event, fact)), (now, event)]
        if not self._voters.may_decide(now):
            return self._wait(now)
        held, self._held, self._blocked_since, self._look_at = self._held, [], None, None
        commands: list[Command] = []
        for since, fact in held:
            commands = still_meant(commands, fact)
            commands += self._machine.handle(aged(fact, now - since), now)
            if any(isinstance(command, EndJob) for command in commands):
                break
        if commands:
            self._changed()
        return commands

    def _wait(self, now: Instant) -> list[Command]:
        self._blocked_since = now if self._blocked_since is None else self._blocked_since
        self._look_at = now + _LOOK_S
        if self._voters.deposed_by:
            return [_deposed(self._voters.deposed_by)]
        if self._voters.has_later_vote and now - self._blocked_since >= PASSED_S:
            return [Deposed(RUN_AGAIN, _PASSED, None)]
        # While other nodes train under this coordinator, its end would end their training too.
        if now - max(self._blocked_since, self._reported_at) < _GIVE_UP_S:
            return []
        return [EndJob(RUN_AGAIN, _cut_off([voter.node for voter in self._voters.free(now)]))]


_PASSED = (
    "launchers have voted for another coordinator and answer this one no more, so it gives way, and they elect another"
)


def _deposed(by: Leader) -> Deposed:
    text = f"another coordinator was elected meanwhile (term {by.term}, at {by.address}), so this one gives way"
    return Deposed(RUN_AGAIN, text, by)


def _cut_off(silent: Sequence[NodeId]) -> str:
    others = ", ".join(silent)
    return (
        f"{others} answered nothing for {_GIVE_UP_S:g} s: these are enough to have elected another coordinator, so "
        f"this one ends"
    )

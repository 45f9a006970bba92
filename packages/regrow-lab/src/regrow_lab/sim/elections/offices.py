"""Simulated coordinators: they answer launchers, look after the voters and decide, as `LauncherDesk` does."""

from collections.abc import Callable
from functools import partial

import msgspec

from regrow.core.ids import Instant, Seconds
from regrow.core.messages.elections import CoordinatorPresent, LauncherPresent, Office, Voter
from regrow.membership.succession.voters import PASSED_S, VOTE_LEASE, Voters
from regrow.membership.succession.witness import is_witness
from regrow_lab.sim.elections.carriers import Carriers, SimLauncher
from regrow_lab.sim.elections.disk import WitnessDisk
from regrow_lab.sim.elections.laws import ElectionLaws

_DECIDE_S: Seconds = 0.3
_BIND = 0.2
"""Probability that a deciding coordinator has its witness stand for it."""


class SimOffices:
    """Behaviour of all coordinators.

    Args:
        carriers: between launchers.
        laws: that must hold.
        disk: with the witness; None: there is none.
        answered: a launcher hears from the coordinator.
        deposed: a coordinator has learned of another of a later term, or gets no answers any more.
    """

    def __init__(
        self,
        carriers: Carriers,
        laws: ElectionLaws,
        disk: WitnessDisk | None,
        answered: Callable[[SimLauncher, int, CoordinatorPresent], None],
        deposed: Callable[[SimLauncher, Office | None], None],
    ) -> None:
        self._carriers, self._laws, self._disk = carriers, laws, disk
        self._answered, self._deposed = answered, deposed
        self._decided: dict[int, Instant] = {}
        """Time of each coordinator's last decision, by its clock."""

    def begin(self, host: SimLauncher, voters: Voters) -> None:
        """A coordinator begins."""
        host.voters = voters
        self._decided[host.number] = self._carriers.clock(host)
        self._decide(host, voters)

    def present(self, host: SimLauncher, sender: SimLauncher, term: int, present: LauncherPresent) -> None:
        """A launcher is there."""
        voters = host.voters
        if voters is None or voters.term != term:
            return
        now = self._carriers.clock(host)
        voters.heard(present, now)
        self._change(host, voters)
        held = present.number if present.term == voters.term else 0
        handover = voters.handover(present.voter.name) if held < voters.number else None
        answer = CoordinatorPresent(voters.term, now, VOTE_LEASE, handover)
        self._carriers.send(host, sender.number, lambda me: self._answered(me, host.number, answer))

    def _change(self, host: SimLauncher, voters: Voters) -> None:
        if voters.change(self._carriers.clock(host)):
            names = [voter.name for voter in voters.newest]
            self._carriers.say("coordinator {} of term {} has the voters {}", host.number, voters.term, names)

    def _decide(self, host: SimLauncher, voters: Voters) -> None:
        if host.voters is not voters:
            return
        carriers = self._carriers
        carriers.again(host, _DECIDE_S, partial(self._decide, host, voters))
        now = carriers.clock(host)
        voters.write(msgspec.msgpack.encode(len(self._laws.decisions)))
        self._change(host, voters)
        if self._disk is not None and carriers.rng.random() < _BIND:
            self._disk.bind(host)
        decides = voters.may_decide(now)
        if decides:
            self._decided[host.number] = now
        for voter in voters.quiet(now) + ([] if decides else voters.free(now)):
            if not is_witness(voter):
                self._ask(host, voters, voter)
        if voters.may_decide(now):
            self._laws.decided(host, voters.term)
        elif voters.passed and now - self._decided.get(host.number, now) >= PASSED_S:
            self._gives_way(host, voters, None)

    def _ask(self, host: SimLauncher, voters: Voters, voter: Voter) -> None:
        """Note that a launcher has ended; else, whom it follows."""
        carriers, number = self._carriers, int(voter.address)
        if carriers.seen_gone(host, number, hosts=False):
            voters.ended(voter.name, carriers.clock(host))
            return

        def asked(to: SimLauncher) -> None:
            if to.follows is not None:
                office = Office(to.follows[0], str(to.follows[1]), to.election.term)
                carriers.send(to, host.number, lambda _: self._hears(host, voters, voter.name, office))

        carriers.send(host, number, asked)

    def _hears(self, host: SimLauncher, voters: Voters, name: str, office: Office) -> None:
        if host.voters is voters:
            voters.told(name, office)
            if voters.deposed_by is not None:
                self._gives_way(host, voters, voters.deposed_by)

    def _gives_way(self, host: SimLauncher, voters: Voters, office: Office | None) -> None:
        to = "nobody" if office is None else office.address
        self._carriers.say("coordinator {} of term {} gives way to {}", host.number, voters.term, to)
        host.voters = None
        self._deposed(host, office)

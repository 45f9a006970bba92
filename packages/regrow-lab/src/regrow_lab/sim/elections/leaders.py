"""Simulated coordinators: they answer launchers, update the voters and decide, as `SuccessionApi` does."""

from collections.abc import Callable
from functools import partial

import msgspec

from regrow.core.ids import Instant, Seconds
from regrow.core.messages.elections import CoordinatorPresent, LauncherPresent, Leader, Voter
from regrow.membership.succession.voters import PASSED_S, VOTE_LEASE, Voters
from regrow.membership.succession.witness import is_witness
from regrow_lab.sim.elections.disk import WitnessDisk
from regrow_lab.sim.elections.laws import ElectionLaws
from regrow_lab.sim.elections.network import SimLauncher, SimNetwork

_DECIDE_S: Seconds = 0.3
_BIND = 0.2
"""Probability that a deciding coordinator renews its witness's support."""


class ElectedLeaders:
    """Behaviour of all coordinators.

    Args:
        network: between launchers.
        laws: the laws to check.
        disk: the witness's disk; None: there is no witness.
        answered: delivers the coordinator's answer to a launcher.
        deposed: called when a coordinator learns of a later term, or gets no answers any more.
    """

    def __init__(
        self,
        network: SimNetwork,
        laws: ElectionLaws,
        disk: WitnessDisk | None,
        answered: Callable[[SimLauncher, int, CoordinatorPresent], None],
        deposed: Callable[[SimLauncher, Leader | None], None],
    ) -> None:
        self._network, self._laws, self._disk = network, laws, disk
        self._answered, self._deposed = answered, deposed
        self._decided: dict[int, Instant] = {}
        """Time of each coordinator's last decision, by its clock."""

    def begin(self, host: SimLauncher, voters: Voters) -> None:
        """Start a coordinator."""
        host.voters = voters
        self._decided[host.number] = self._network.clock(host)
        self._decide(host, voters)

    def present(self, host: SimLauncher, sender: SimLauncher, term: int, present: LauncherPresent) -> None:
        """Handle a launcher's heartbeat, and answer it."""
        voters = host.voters
        if voters is None or voters.term != term:
            return
        now = self._network.clock(host)
        voters.received(present, now)
        self._change(host, voters)
        held = present.number if present.term == voters.term else 0
        handover = voters.handover(present.voter.name) if held < voters.number else None
        answer = CoordinatorPresent(voters.term, now, VOTE_LEASE, handover)
        self._network.send(host, sender.number, lambda me: self._answered(me, host.number, answer))

    def _change(self, host: SimLauncher, voters: Voters) -> None:
        if voters.change(self._network.clock(host)):
            names = [voter.name for voter in voters.newest]
            self._network.say("coordinator {} of term {} has the voters {}", host.number, voters.term, names)

    def _decide(self, host: SimLauncher, voters: Voters) -> None:
        if host.voters is not voters:
            return
        network = self._network
        network.again(host, _DECIDE_S, partial(self._decide, host, voters))
        now = network.clock(host)
        voters.write(msgspec.msgpack.encode(len(self._laws.decisions)))
        self._change(host, voters)
        if self._disk is not None and network.rng.random() < _BIND:
            self._disk.bind(host)
        decides = voters.may_decide(now)
        if decides:
            self._decided[host.number] = now
        for voter in voters.quiet(now) + ([] if decides else voters.free(now)):
            if not is_witness(voter):
                self._ask(host, voters, voter)
        if voters.may_decide(now):
            self._laws.decided(host, voters.term)
        elif voters.has_later_vote and now - self._decided.get(host.number, now) >= PASSED_S:
            self._gives_way(host, voters, None)

    def _ask(self, host: SimLauncher, voters: Voters, voter: Voter) -> None:
        """Record that a launcher has ended, or ask it which coordinator it follows."""
        network, number = self._network, int(voter.address)
        if network.seen_gone(host, number, hosts=False):
            voters.ended(voter.name, network.clock(host))
            return

        def asked(to: SimLauncher) -> None:
            if to.follows is not None:
                leader = Leader(to.follows[0], str(to.follows[1]), to.election.term)
                network.send(to, host.number, lambda _: self._receives(host, voters, voter.name, leader))

        network.send(host, number, asked)

    def _receives(self, host: SimLauncher, voters: Voters, name: str, leader: Leader) -> None:
        if host.voters is voters:
            voters.notified(name, leader)
            if voters.deposed_by is not None:
                self._gives_way(host, voters, voters.deposed_by)

    def _gives_way(self, host: SimLauncher, voters: Voters, leader: Leader | None) -> None:
        to = "nobody" if leader is None else leader.address
        self._network.say("coordinator {} of term {} gives way to {}", host.number, voters.term, to)
        host.voters = None
        self._deposed(host, leader)

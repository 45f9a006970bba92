"""Simulated launchers that follow the coordinator and elect its successor, as `FollowingLauncher` does."""

from collections.abc import Callable
from functools import partial

from regrow.core.ids import Seconds
from regrow.core.messages.elections import CoordinatorPresent, LauncherPresent, Leader, VoteAnswered, VoteAsked, Voter
from regrow.membership.succession.voters import VOTE_LEASE, Voters
from regrow.membership.succession.witness import is_witness
from regrow_lab.sim.elections.disk import WITNESS, WitnessDisk
from regrow_lab.sim.elections.laws import ElectionLaws
from regrow_lab.sim.elections.network import SimLauncher, SimNetwork

_POLL_S: Seconds = 0.5


class SimFollowers:
    """Behaviour of all followers.

    Args:
        network: between launchers.
        laws: the laws to check.
        disk: the witness's disk.
        present: reports a launcher to a coordinator, which answers.
        begin: starts a coordinator.
    """

    def __init__(
        self,
        network: SimNetwork,
        laws: ElectionLaws,
        disk: WitnessDisk,
        present: Callable[[SimLauncher, SimLauncher, int, LauncherPresent], None],
        begin: Callable[[SimLauncher, Voters], None],
    ) -> None:
        self._network, self._laws, self._disk = network, laws, disk
        self._present, self._begin = present, begin

    def poll(self, me: SimLauncher) -> None:
        """Contact the coordinator, or look for another one; repeats itself."""
        network, election = self._network, me.election
        free = network.clock(me) >= election.bound_until
        network.again(me, _POLL_S / 5 if free else _POLL_S, partial(self.poll, me))
        if me.voters is not None:
            return
        if me.follows is None:
            self._ask_leader(me, [each.number for each in network.launchers if each is not me])
            return
        term, coordinator = me.follows
        if network.seen_gone(me, coordinator, hosts=True):
            election.released(network.clock(me))
        else:
            self._beat(me, term, coordinator)
        if network.clock(me) >= election.bound_until:
            voters = {voter.address for voter in self._others(me) if not is_witness(voter)}
            self._ask_leader(me, sorted(map(int, voters | {*election.candidates.values()})))
            asked = election.stand(network.clock(me))
            if asked is not None:
                self._ask_all(me, asked)

    def answered(self, me: SimLauncher, host: int, answer: CoordinatorPresent) -> None:
        """Handle the coordinator's answer to a heartbeat."""
        if me.voters is not None or me.follows != (answer.term, host):
            return
        if me.election.received(answer.term, answer.handover, answer.lease, self._network.clock(me)):
            me.beat = answer.beat
            self._laws.obeys(me, answer.term)
        self._laws.acted(me)

    def follow(self, me: SimLauncher, leader: Leader) -> None:
        """Follow the coordinator that another launcher reports, if its term is newer."""
        if me.voters is None and (me.follows is None or leader.term > me.follows[0]):
            me.follows, me.beat = (leader.term, int(leader.address)), None
            me.election.follow(VOTE_LEASE, self._network.clock(me))
            self._beat(me, *me.follows)

    # --- following ---------------------------------------------------------------------------------------------

    def _beat(self, me: SimLauncher, term: int, coordinator: int) -> None:
        held = me.election.handover
        version = (0, 0) if held is None else held.version
        present = LauncherPresent(me.election.me, *version, me.beat)
        self._network.send(me, coordinator, lambda to: self._present(to, me, term, present))

    def _others(self, me: SimLauncher) -> list[Voter]:
        handover = me.election.handover
        return [] if handover is None else [each for each in handover.voters if each.name != me.election.me.name]

    def _ask_leader(self, me: SimLauncher, of: list[int]) -> None:
        for number in of:
            self._network.send(me, number, lambda to: self._send_leader(to, me.number))

    def _send_leader(self, to: SimLauncher, asker: int) -> None:
        if to.follows is not None:
            leader = Leader(to.follows[0], str(to.follows[1]))
            self._network.send(to, asker, lambda me: self.follow(me, leader))

    # --- electing ----------------------------------------------------------------------------------------------

    def _ask_all(self, me: SimLauncher, asked: VoteAsked) -> None:
        me.votes[asked.term, asked.trial] = {me.election.me.name}
        if not asked.trial:
            self._network.say(
                "launcher {} is a candidate in term {}, with handover {}", me.number, asked.term, asked.version
            )
        for voter in self._others(me):
            if is_witness(voter):
                self._disk.elect(me, asked, partial(self._counted, me, WITNESS.name, asked, _granted(asked)))
            else:
                self._ask_vote(me, int(voter.address), asked.to(voter.name))

    def _ask_vote(self, me: SimLauncher, to: int, asked: VoteAsked) -> None:
        self._network.send(me, to, lambda voter: self._vote(voter, me.number, asked))

    def _vote(self, to: SimLauncher, asker: int, asked: VoteAsked) -> None:
        granted = to.election.vote(asked, self._network.clock(to))
        if granted and not asked.trial:
            self._network.say("launcher {} votes for {} in term {}", to.number, asker, asked.term)
        self._laws.acted(to)
        answer, name = VoteAnswered(granted, to.election.term), to.election.me.name
        self._network.send(to, asker, lambda me: self._counted(me, name, asked, answer))

    def _counted(self, me: SimLauncher, voter: str, asked: VoteAsked, answer: VoteAnswered) -> None:
        election = me.election
        if not election.answered(answer) or me.voters is not None or election.handover is None:
            return
        votes = me.votes[asked.term, asked.trial]
        votes.add(voter)
        if asked.trial:
            if election.wins(len(votes)) and (asked.term, False) not in me.votes:
                real = election.campaign(asked, self._network.clock(me))
                if real is not None:
                    self._ask_all(me, real)
            return
        newer = me.follows is not None and me.follows[0] < asked.term
        if newer and election.term == asked.term and election.wins(len(votes)):
            election.become_leader()
            self._laws.elected(me, asked.term)
            self._network.say("launcher {} is elected in term {} by {}", me.number, asked.term, sorted(votes))
            me.follows = (asked.term, me.number)
            voters = Voters.of_successor(
                election.me, asked.term, VOTE_LEASE, election.handover, self._network.clock(me)
            )
            self._begin(me, voters)


def _granted(asked: VoteAsked) -> VoteAnswered:
    return VoteAnswered(True, asked.term)

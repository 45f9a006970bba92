"""Launchers that may elect another coordinator, as the present coordinator knows them. Pure.

A voter that has answered a heartbeat elects no other for one lease after that heartbeat was sent. So a coordinator may
decide while fewer voters than a quorum are free to elect another. Voters change one at a time, and a change counts when
a quorum of the new voters has it: then any two quorums that could decide have a voter in common (Ongaro, "Consensus:
Bridging Theory and Practice", chapter 4).
"""

from dataclasses import dataclass, field

from regrow.core.ids import Instant, Seconds
from regrow.core.messages.elections import Handover, LauncherPresent, Leader, Voter

VOTE_LEASE: Seconds = 10.0
"""Time for which a launcher that has answered elects no other coordinator: as long as a node may be unreachable."""
PASSED_S: Seconds = 3.0
"""Time within which a candidate of a later term is elected, or cannot be, while the last coordinator still exists."""
_ENDED = -1
MOST_VOTERS = 7
"""Largest number of voters. More would cost messages and hardly make an election more likely to succeed."""


@dataclass
class _Launcher:
    voter: Voter
    bound_until: Instant
    """Time until which the launcher elects no other coordinator."""
    holds: int = 0
    """Number of the newest handover of this term that the launcher has."""


@dataclass
class Voters:
    """The voters for one coordinator in one term.

    Attributes:
        me: the coordinator's own launcher.
        term: its term.
        lease: time for which a heartbeat binds a voter.
    """

    me: Voter
    term: int
    lease: Seconds
    number: int = 1
    """Number of the newest handover."""
    memory: bytes = b""
    deposed_by: Leader | None = None
    """A known coordinator of a later term; None: none is known."""
    _sets: dict[int, list[Voter]] = field(default_factory=dict)
    """The voters by handover, for the newest handover that counts and all later ones."""
    _launchers: dict[str, _Launcher] = field(default_factory=dict)
    _later_voters: set[str] = field(default_factory=set)
    """Launchers that have voted in a later term."""

    def __post_init__(self) -> None:
        self._sets = self._sets or {self.number: [self.me]}

    @classmethod
    def of_successor(cls, me: Voter, term: int, lease: Seconds, former: Handover, now: Instant) -> "Voters":
        """The voters of an elected coordinator, which decides once enough of them have answered its heartbeats."""
        made = cls(me, term, lease, memory=former.memory, _sets={1: list(former.voters)})
        for voter in former.voters:
            if voter.name != me.name:
                made._launchers[voter.name] = _Launcher(voter, now)
        return made

    @property
    def newest(self) -> list[Voter]:
        """The voters of the newest handover."""
        return self._sets[max(self._sets)]

    @property
    def may_change(self) -> bool:
        """True if the newest set of voters counts, so that it may be changed."""
        return len(self._sets) == 1 and self._counts(min(self._sets))

    def received(self, present: LauncherPresent, now: Instant) -> None:
        """Note a launcher's report of its presence."""
        known = self._launchers.setdefault(present.voter.name, _Launcher(present.voter, now))
        if present.beat is not None:
            known.bound_until = max(known.bound_until, present.beat + self.lease)
        if present.term == self.term:
            known.holds = max(known.holds, present.number)
        self._drop_superseded()

    @property
    def has_later_vote(self) -> bool:
        """True if a voter has voted in a later term and so no longer answers, though nobody else may be elected."""
        return any(voter.name in self._later_voters for voters in self._sets.values() for voter in voters)

    def notified(self, name: str, leader: Leader) -> None:
        """Note the leader that a launcher follows, by its own report."""
        if leader.voted > self.term:
            self._later_voters.add(name)
        if leader.term > self.term:
            self.deposed_by = leader

    def ended(self, name: str, now: Instant) -> None:
        """Note that a launcher's process has certainly ended; if it was still bound, it can never elect another."""
        known = self._launchers.get(name)
        if known is not None and now < known.bound_until:
            known.bound_until, known.holds = float("inf"), _ENDED

    def write(self, memory: bytes) -> None:
        """Store the knowledge for a successor, under a new number if it has changed."""
        if memory != self.memory:
            self.memory = memory
            self.number += 1

    def change(self, now: Instant) -> bool:
        """Add a launcher to the voters, or remove a silent one, if they may change now; returns True if they did."""
        if not self.may_change:
            return False
        voters = self.newest
        names = {voter.name for voter in voters}
        lost = [voter for voter in voters if voter.name != self.me.name and not self._answers(voter.name, now)]
        came = [each.voter for each in self._launchers.values() if each.voter.name not in names]
        came = [voter for voter in came if self._answers(voter.name, now)]
        if lost:
            voters = [voter for voter in voters if voter is not lost[0]]
        elif came and len(voters) < MOST_VOTERS:
            voters = [*voters, came[0]]
        else:
            return False
        self.number += 1
        self._sets[self.number] = voters
        self._drop_superseded()
        if lost:
            self._launchers.pop(lost[0].name, None)
        return True

    def handover(self, name: str) -> Handover:
        """The handover for a launcher. It includes the coordinator's knowledge only if the launcher is a voter."""
        voters = self.newest
        secret = self.memory if any(voter.name == name for voter in voters) else b""
        return Handover(self.term, self.number, voters, self.me.node, secret)

    def for_witness(self, witness: str, now: Instant) -> int:
        """Number of the handover that a witness records next; a launcher that could win with the witness's vote has it.

        If no launcher answers, it is the newest, which then counts for the remaining voters. It never goes back.
        """
        others = [each.holds for name, each in self._launchers.items() if name != witness and self._answers(name, now)]
        known = self._launchers.get(witness)
        return max(0 if known is None else known.holds, max(others, default=self.number))

    def quiet(self, now: Instant) -> list[Voter]:
        """Bound voters that have not answered for half a lease, so that their processes may have ended."""
        voters = {voter.name: voter for voters in self._sets.values() for voter in voters}
        found = [(voter, self._launchers.get(name)) for name, voter in voters.items()]
        return [voter for voter, known in found if known and 0 < known.bound_until - now < self.lease / 2]

    def free(self, now: Instant) -> list[Voter]:
        """Voters that may elect another coordinator by now."""
        all_of_them = {voter.name: voter for voters in self._sets.values() for voter in voters}
        return [voter for voter in all_of_them.values() if self._is_free(voter, now)]

    def may_decide(self, now: Instant) -> bool:
        """True if no other coordinator can have been elected by now."""
        return not self.deposed_by and all(
            sum(self._is_free(voter, now) for voter in voters) <= len(voters) // 2 for voters in self._sets.values()
        )

    def _is_free(self, voter: Voter, now: Instant) -> bool:
        if voter.name == self.me.name:
            return False
        known = self._launchers.get(voter.name)
        return known is None or known.bound_until <= now

    def _answers(self, name: str, now: Instant) -> bool:
        known = self._launchers.get(name)
        return known is not None and known.holds != _ENDED and known.bound_until > now

    def _counts(self, number: int) -> bool:
        voters = self._sets[number]
        held = {name: each.holds for name, each in self._launchers.items()} | {self.me.name: self.number}
        have = sum(held.get(voter.name, 0) >= number for voter in voters)
        return have >= len(voters) // 2 + 1

    def _drop_superseded(self) -> None:
        counted = [number for number in self._sets if self._counts(number)]
        for number in [each for each in self._sets if counted and each < max(counted)]:
            del self._sets[number]

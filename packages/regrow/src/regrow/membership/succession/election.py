"""A launcher's part in the election of another coordinator. Pure.

A launcher votes once a term, never for a candidate that knows less than itself, and never while the coordinator may
count on it. It also votes for candidates that it does not know as voters, and even if it does not know itself as one:
the candidate counts the votes of the voters in the newest handover, which this launcher may not have. Once it has
voted, it ignores coordinators of older terms. As in Raft (Ongaro, "Consensus: Bridging Theory and Practice", chapters
3, 4.1, 6.4.1 and 9.6), but with turns instead of random waits.
"""

from regrow.core.ids import Instant, Seconds
from regrow.core.messages.elections import Handover, VoteAnswered, VoteAsked, Voter

_TURN_S: Seconds = 0.3
"""Interval between the candidacies of two voters, so that one is elected before the next becomes a candidate."""
_WAIT_S: Seconds = 2.0
"""Time for which a launcher that has voted for a candidate waits for it to begin, and votes for no other.

Otherwise a third candidate could get votes after the election, from launchers that the elected one has not reached yet.
These could no longer follow the elected one, and those that it has reached would be bound to a leader without quorum.
"""
FEWEST_VOTERS = 3
"""Fewest voters for an election: one that remains of two is no majority."""


class Election:
    """Knowledge and promises of one launcher in elections of a coordinator.

    Args:
        me: this launcher.
    """

    def __init__(self, me: Voter) -> None:
        self.me = me
        self.handover: Handover | None = None
        self.term = 0
        """The newest term that this launcher has received or voted in."""
        self.bound_until: Instant = float("-inf")
        """Time until which the coordinator counts on this launcher."""
        self.candidates: dict[str, str] = {}
        """Addresses of candidates, by name, since the coordinator's last answer. Not all are known as voters."""
        self._leads = False
        self._voted_for = ""
        """The candidate for which this launcher has voted and is waiting."""
        self._next: Instant = float("-inf")
        self._waits_until: Instant = float("-inf")
        self._seen = 0
        """The newest term in which another launcher was a candidate."""
        self._missed = 0
        """The newest term whose coordinator does not answer an agent that needs it."""

    @property
    def possible(self) -> bool:
        """True if there are enough voters to hold an election after one is lost."""
        return self.handover is not None and len(self.handover.voters) >= FEWEST_VOTERS

    @property
    def turn(self) -> int | None:
        """Position of this launcher among the voters; None: it is no voter."""
        if self.handover is None:
            return None
        names = [voter.name for voter in self.handover.voters]
        return names.index(self.me.name) if self.me.name in names and self.handover.memory else None

    def follow(self, lease: Seconds, now: Instant) -> None:
        """Note that another coordinator was elected, which may take up to `lease` until its first answer."""
        self.bound_until = max(self.bound_until, now + lease)

    def miss(self, term: int) -> None:
        """Note that an agent needs the coordinator of this term and gets no answer. Later ones are not affected."""
        self._missed = max(self._missed, term)

    def misses(self, term: int) -> bool:
        """True if an agent needs the coordinator of this term, which has not answered since."""
        return self._missed >= term

    def received(self, term: int, handover: Handover | None, lease: Seconds, now: Instant) -> bool:
        """Take an answer of this term's coordinator; False if a newer term is known, so that it is deposed."""
        if term < self.term:
            return False
        self.term, self._missed = term, 0
        self.candidates.clear()
        self.bound_until = max(self.bound_until, now + lease)
        if handover is not None and (self.handover is None or handover.version > self.handover.version):
            self.handover = handover
        return True

    def become_leader(self) -> None:
        """Note that this launcher hosts the coordinator, which counts on it until `released`, even through a pause."""
        self._leads = True

    def released(self, now: Instant) -> None:
        """Note that the coordinator's process has certainly ended, so that it no longer counts on any voter."""
        self.bound_until, self._leads = min(self.bound_until, now), False

    def vote(self, asked: VoteAsked, now: Instant) -> bool:
        """Vote on a candidate; returns True if this launcher elects it."""
        self._seen = max(self._seen, asked.term)
        if asked.voter == self.me.name != asked.name:
            self.candidates[asked.name] = asked.address
        if self._leads or now < self.bound_until or asked.term <= self.term or asked.voter != self.me.name:
            return False
        if self.handover is not None and asked.version < self.handover.version:
            return False
        if now < self._waits_until and asked.name != self._voted_for:
            return False
        if asked.trial:
            return True
        self.term = asked.term
        if asked.name != self.me.name:
            self._waits_until, self._voted_for = now + _WAIT_S, asked.name
        return True

    def stand(self, now: Instant) -> VoteAsked | None:
        """Request for a trial vote on this launcher, to be sent to the others; None: it is not its turn."""
        turn, mine = self.turn, self.handover
        if turn is None or mine is None or not self.possible or self._leads:
            return None
        if now < max(self.bound_until + _TURN_S * turn, self._next, self._waits_until):
            return None
        term = max(self.term, self._seen) + 1
        # The turns depend on the term, so that two candidates of the same moment do not collide again.
        self._next = now + _TURN_S * (1 + (turn + term) % len(mine.voters))
        return VoteAsked(term, self.me.name, mine.version, trial=True, address=self.me.address)

    def campaign(self, asked: VoteAsked, now: Instant) -> VoteAsked | None:
        """Request for real votes after a successful trial, with this launcher's own vote; None: it may not vote now."""
        real = VoteAsked(asked.term, asked.name, asked.version, address=asked.address)
        return real if now >= self._waits_until and self.vote(real.to(self.me.name), now) else None

    def answered(self, answer: VoteAnswered) -> bool:
        """True if the answer is a vote; a refusal contains the term after which to try again."""
        self._seen = max(self._seen, answer.term)
        return answer.granted

    def wins(self, votes: int) -> bool:
        """True if this number of votes, with this launcher's own, elects it."""
        return self.handover is not None and votes >= self.handover.quorum

"""A launcher's part in the election of another coordinator. Pure.

It votes once a term, for nobody who knows less than itself, and for nobody while the coordinator may count on it. Whom
it does not know as a voter it votes for as well, and though it does not know that it is one itself: who asks counts the
votes of those that the newest handover names, and this launcher may not have that one. Once it has voted, a coordinator
of an older term is none any more. As in Raft (Ongaro, "Consensus: Bridging Theory and Practice", chapters 3, 4.1,
6.4.1 and 9.6), but for turns in place of random waits.
"""

from regrow.core.ids import Instant, Seconds
from regrow.core.messages.elections import Handover, VoteAnswered, VoteAsked, Voter

_TURN_S: Seconds = 0.3
"""The voters stand one after the other, so that one is elected before the next one stands."""
_WAIT_S: Seconds = 2.0
"""Time that a launcher that has voted for another waits for it to begin, and votes for nobody else.

Otherwise a third one could get votes after the quorum has elected, from those that the elected one has not reached yet:
these could not follow it any more, and those that it has reached would be bound to one that may not decide.
"""
FEWEST_VOTERS = 3
"""Of two, the one that is left is no majority."""


class Election:
    """Knowledge and promises of one launcher.

    Args:
        me: this launcher.
    """

    def __init__(self, me: Voter) -> None:
        self.me = me
        self.handover: Handover | None = None
        self.term = 0
        """The newest that was heard of, or voted in."""
        self.bound_until: Instant = float("-inf")
        """Until then the coordinator counts on this launcher."""
        self.candidates: dict[str, str] = {}
        """Candidates since the coordinator has answered last: addresses, by name. Not all are known as voters."""
        self._leads = False
        self._voted_for = ""
        """Candidate that it waits for."""
        self._next: Instant = float("-inf")
        self._waits_until: Instant = float("-inf")
        self._seen = 0
        """The newest term in which another has stood."""
        self._missed = 0
        """The newest term whose coordinator an agent needs and gets no answer from."""

    @property
    def possible(self) -> bool:
        """True if there are enough voters to lose one."""
        return self.handover is not None and len(self.handover.voters) >= FEWEST_VOTERS

    @property
    def turn(self) -> int | None:
        """Position of this launcher among the voters; None: it is none of them."""
        if self.handover is None:
            return None
        names = [voter.name for voter in self.handover.voters]
        return names.index(self.me.name) if self.me.name in names and self.handover.memory else None

    def follow(self, lease: Seconds, now: Instant) -> None:
        """Another coordinator is in office: it may take `lease` to answer at all."""
        self.bound_until = max(self.bound_until, now + lease)

    def miss(self, term: int) -> None:
        """An agent needs the coordinator of this term, and gets no answer. It says nothing of a later one."""
        self._missed = max(self._missed, term)

    def misses(self, term: int) -> bool:
        """True if the coordinator of this term is needed and has not answered since."""
        return self._missed >= term

    def received(self, term: int, handover: Handover | None, lease: Seconds, now: Instant) -> bool:
        """The coordinator of this term has answered; False where a newer one is known, so that it is none any more."""
        if term < self.term:
            return False
        self.term, self._missed = term, 0
        self.candidates.clear()
        self.bound_until = max(self.bound_until, now + lease)
        if handover is not None and (self.handover is None or handover.version > self.handover.version):
            self.handover = handover
        return True

    def become_leader(self) -> None:
        """This launcher hosts the coordinator, which counts on it until it is `released`, also after a pause."""
        self._leads = True

    def released(self, now: Instant) -> None:
        """The process of the coordinator has certainly ended: it counts on nobody any more."""
        self.bound_until, self._leads = min(self.bound_until, now), False

    def vote(self, asked: VoteAsked, now: Instant) -> bool:
        """Vote on a candidate; True if this launcher elects it."""
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
        """Ask the others whether they would elect this launcher, if it is its turn."""
        turn, mine = self.turn, self.handover
        if turn is None or mine is None or not self.possible or self._leads:
            return None
        if now < max(self.bound_until + _TURN_S * turn, self._next, self._waits_until):
            return None
        term = max(self.term, self._seen) + 1
        # Whoever has stood at the same moment as another stands at another one next: the turns go round with the terms.
        self._next = now + _TURN_S * (1 + (turn + term) % len(mine.voters))
        return VoteAsked(term, self.me.name, mine.version, trial=True, address=self.me.address)

    def campaign(self, asked: VoteAsked, now: Instant) -> VoteAsked | None:
        """They would: ask them to do so. Its own vote is given; None: meanwhile it is not free any more."""
        real = VoteAsked(asked.term, asked.name, asked.version, address=asked.address)
        return real if now >= self._waits_until and self.vote(real.to(self.me.name), now) else None

    def answered(self, answer: VoteAnswered) -> bool:
        """True if the answer is a vote; a refusal tells in which term to stand next."""
        self._seen = max(self._seen, answer.term)
        return answer.granted

    def wins(self, votes: int) -> bool:
        """True if this number of votes, its own included, elects it."""
        return self.handover is not None and votes >= self.handover.quorum

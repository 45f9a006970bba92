"""A voter that is no process but a row of places, each of which only the first writer can take. Pure.

Places are taken in order. A coordinator that counts on the witness takes one after the other; each place binds the
witness for one lease from the moment at which the coordinator began to take it. A candidate takes the next place one
lease after it first saw the newest. It saw that place later than the coordinator began, so by then the coordinator no
longer counts on the witness. Only one of the two can take the next place. So no clock is compared with another, and
late writes do no harm.
"""

from regrow.core.ids import Instant, Seconds
from regrow.core.messages.elections import VoteAsked, Voter, WitnessWord

SCHEME = "file:"
"""Prefix of the address of a voter that is a witness."""


class Witness:
    """One launcher's knowledge of the witness.

    Args:
        lease: time for which an entry binds the witness.
    """

    def __init__(self, lease: Seconds) -> None:
        self.place = 0
        """The newest place that is known to be taken."""
        self.word: WitnessWord | None = None
        """Entry at the place `place`; None: no entry is known."""
        self._lease = lease
        self._seen: Instant = float("-inf")

    def saw(self, place: int, word: WitnessWord, now: Instant) -> None:
        """Note that a place is taken by the entry `word`."""
        if place > self.place:
            self.place, self.word, self._seen = place, word, now

    def elects(self, asked: VoteAsked, now: Instant) -> bool:
        """True if the candidate may take the next place, to be elected in its term."""
        if self.word is None:
            return True
        return self.word.term < asked.term and self.word.version <= asked.version and now >= self._seen + self._lease

    def binds(self, term: int, name: str) -> bool:
        """True if the coordinator of that term may take the next place, to count on the witness."""
        return self.word is None or self.word.term < term or (self.word.term, self.word.name) == (term, name)


def is_witness(voter: Voter) -> bool:
    """True if this voter is a witness, which cannot be asked over the network."""
    return voter.address.startswith(SCHEME)

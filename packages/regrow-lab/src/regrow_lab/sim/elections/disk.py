"""A simulated shared disk with a witness, as `membership/server/witness_folder.py` uses a real one."""

from collections.abc import Callable

from regrow.core.ids import NodeId
from regrow.core.messages.elections import LauncherPresent, VoteAsked, Voter, WitnessWord
from regrow.membership.succession.voters import Voters
from regrow_lab.sim.elections.carriers import Carriers, SimLauncher

WITNESS = Voter("witness", NodeId(""), "file:/shared")
_OLD_LIST = 0.1
"""Probability that the newest name is missing in a list of names."""


class WitnessDisk:
    """Its places, of which each is written once.

    Args:
        carriers: between launchers and disk.
    """

    def __init__(self, carriers: Carriers) -> None:
        self._carriers = carriers

    def bind(self, host: SimLauncher) -> None:
        """Let the witness stand for a coordinator for a lease more."""
        voters = host.voters
        self._look(host, lambda: self._bind(host, voters))

    def elect(self, me: SimLauncher, asked: VoteAsked, voted: Callable[[], None]) -> None:
        """Ask whether it elects this launcher, or would."""

        def looked() -> None:
            if not me.witness.elects(asked, self._carriers.clock(me)):
                return
            if asked.trial:
                voted()
            else:
                self._take(me, WitnessWord(asked.term, asked.name, asked.version), voted)

        self._look(me, looked)

    def _look(self, me: SimLauncher, then: Callable[[], None]) -> None:
        carriers = self._carriers

        def act() -> Callable[[], None]:
            newest = max(carriers.places, default=0) - (carriers.rng.random() < _OLD_LIST)

            def seen() -> None:
                if newest > 0:
                    me.witness.saw(newest, carriers.places[newest], carriers.clock(me))
                then()

            return seen

        carriers.at_disk(me, act)

    def _take(self, me: SimLauncher, word: WitnessWord, taken: Callable[[], None]) -> None:
        carriers, place = self._carriers, me.witness.place + 1

        def act() -> Callable[[], None]:
            mine = carriers.places.setdefault(place, word) is word

            def told() -> None:
                me.witness.saw(place, carriers.places[place], carriers.clock(me))
                if mine:
                    taken()

            return told

        carriers.at_disk(me, act)

    def _bind(self, host: SimLauncher, voters: Voters | None) -> None:
        if voters is None or host.voters is not voters or not host.witness.binds(voters.term, voters.me.name):
            return
        began = self._carriers.clock(host)
        number = voters.for_witness(WITNESS.name, began)
        word = WitnessWord(voters.term, voters.me.name, (voters.term, number))
        present = LauncherPresent(WITNESS, *word.version, began)
        self._take(host, word, lambda: voters.heard(present, self._carriers.clock(host)))

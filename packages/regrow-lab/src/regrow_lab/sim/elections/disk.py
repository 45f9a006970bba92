"""A simulated shared disk with a witness, as `membership/server/witness_folder.py` uses a real one."""

from collections.abc import Callable

from regrow.core.ids import NodeId
from regrow.core.messages.elections import LauncherPresent, VoteAsked, Voter, WitnessWord
from regrow.membership.succession.voters import Voters
from regrow_lab.sim.elections.network import SimLauncher, SimNetwork

WITNESS = Voter("witness", NodeId(""), "file:/shared")
_OLD_LIST = 0.1
"""Probability that the newest name is missing in a listing."""


class WitnessDisk:
    """The witness's places on the disk, each of which is written once.

    Args:
        network: between launchers and disk.
    """

    def __init__(self, network: SimNetwork) -> None:
        self._network = network

    def bind(self, host: SimLauncher) -> None:
        """Renew the witness's support for a coordinator by one more lease."""
        voters = host.voters
        self._look(host, lambda: self._bind(host, voters))

    def elect(self, me: SimLauncher, asked: VoteAsked, voted: Callable[[], None]) -> None:
        """Ask the witness for its vote, or in a trial whether it would give it."""

        def looked() -> None:
            if not me.witness.elects(asked, self._network.clock(me)):
                return
            if asked.trial:
                voted()
            else:
                self._take(me, WitnessWord(asked.term, asked.name, asked.version), voted)

        self._look(me, looked)

    def _look(self, me: SimLauncher, then: Callable[[], None]) -> None:
        network = self._network

        def act() -> Callable[[], None]:
            newest = max(network.places, default=0) - (network.rng.random() < _OLD_LIST)

            def seen() -> None:
                if newest > 0:
                    me.witness.saw(newest, network.places[newest], network.clock(me))
                then()

            return seen

        network.at_disk(me, act)

    def _take(self, me: SimLauncher, word: WitnessWord, taken: Callable[[], None]) -> None:
        network, place = self._network, me.witness.place + 1

        def act() -> Callable[[], None]:
            mine = network.places.setdefault(place, word) is word

            def answer() -> None:
                me.witness.saw(place, network.places[place], network.clock(me))
                if mine:
                    taken()

            return answer

        network.at_disk(me, act)

    def _bind(self, host: SimLauncher, voters: Voters | None) -> None:
        if voters is None or host.voters is not voters or not host.witness.binds(voters.term, voters.me.name):
            return
        began = self._network.clock(host)
        number = voters.for_witness(WITNESS.name, began)
        word = WitnessWord(voters.term, voters.me.name, (voters.term, number))
        present = LauncherPresent(WITNESS, *word.version, began)
        self._take(host, word, lambda: voters.received(present, self._network.clock(host)))

"""Laws of elections, which must hold under all faults."""

from dataclasses import dataclass

from regrow.core.ids import Instant, Seconds
from regrow.membership.succession.election import FEWEST_VOTERS
from regrow.membership.succession.voters import VOTE_LEASE
from regrow.membership.succession.witness import is_witness
from regrow_lab.sim.elections.network import SimLauncher, SimNetwork
from regrow_lab.sim.invariants import InvariantBroken

ELECTED_S: Seconds = 10.0
"""Time for an election once no voter is bound to the last coordinator any more, which takes a lease at most."""


@dataclass
class Decided:
    """A decision of a coordinator. `by`: its launcher's number."""

    at: Instant
    term: int
    by: int


class ElectionLaws:
    """Checks the laws of elections. Each method raises `InvariantBroken`.

    Args:
        network: of all launchers.
    """

    def __init__(self, network: SimNetwork) -> None:
        self.decisions: list[Decided] = []
        self.leaders: dict[int, int] = {1: 0}
        """Launcher elected in each term."""
        self._terms: dict[int, int] = {}
        self._obeyed: dict[int, int] = {}
        self._network = network

    def elected(self, launcher: SimLauncher, term: int) -> None:
        """Check that a launcher is the only one elected in its term."""
        first = self.leaders.setdefault(term, launcher.number)
        if first != launcher.number:
            raise InvariantBroken(f"term {term} has two coordinators: launchers {first} and {launcher.number}")

    def decided(self, launcher: SimLauncher, term: int) -> None:
        """Check a coordinator's decision: its term is not older than the last, and elected this launcher."""
        last = self.decisions[-1] if self.decisions else Decided(0.0, 0, launcher.number)
        if term < last.term:
            said = f"launcher {launcher.number} decides in term {term} after launcher {last.by} in term {last.term}"
            raise InvariantBroken(f"two coordinators decide: {said}")
        if self.leaders[term] != launcher.number:
            raise InvariantBroken(f"launcher {launcher.number} decides in term {term}, in which it was not elected")
        self.decisions.append(Decided(self._network.now, term, launcher.number))

    def obeys(self, launcher: SimLauncher, term: int) -> None:
        """Check that a launcher obeys no older term than before."""
        last = self._obeyed.get(launcher.number, 0)
        if term < last:
            raise InvariantBroken(f"launcher {launcher.number} follows term {term} after term {last}")
        self._obeyed[launcher.number] = term

    def acted(self, launcher: SimLauncher) -> None:
        """Check that a launcher's own term never decreases."""
        last = self._terms.get(launcher.number, 0)
        if launcher.election.term < last:
            raise InvariantBroken(f"launcher {launcher.number} goes back from term {last} to {launcher.election.term}")
        self._terms[launcher.number] = launcher.election.term

    def settled(self) -> bool:
        """True if the elections are over: all follow a deciding coordinator, or none can be elected."""
        alive = [each for each in self._network.launchers if not each.dead]
        last = self.decisions[-1]
        if self._network.now - last.at < 0.5:
            return all(each.follows == (last.term, last.by) for each in alive)
        return electable(self._network) is None

    def recovered(self, healed: Instant) -> None:
        """Require a deciding coordinator some time after healing, if one could be elected."""
        now = self._network.now
        last = self.decisions[-1].at if self.decisions else 0.0
        if now - last > 1.0 and (who := electable(self._network)) is not None:
            could = f"launcher {who} could be elected, or stay the coordinator"
            raise InvariantBroken(
                f"no coordinator decides {now - healed:.1f} s after all faults have healed, and {could}"
            )


def limit(healed: Instant, *, witness: bool) -> Instant:
    """Time by which `ElectionLaws.recovered` must hold.

    If two launchers are candidates at the same time, one may get the witness's vote and the other the rest: the witness
    is then bound for another lease.
    """
    return healed + VOTE_LEASE * (1 + witness) + ELECTED_S


def electable(network: SimNetwork) -> int | None:
    """Number of a launcher whose state is at least as new as that of a majority of its voters; None: there is none.

    A launcher that still hosts a coordinator with a majority counts too.
    """
    alive = {each.election.me.name: each for each in network.launchers if not each.dead}
    for launcher in alive.values():
        if launcher.voters is not None:
            newest = launcher.voters.newest
            if sum(voter.name in alive for voter in newest) > len(newest) // 2:
                return launcher.number
        handover = launcher.election.handover
        if handover is None or launcher.election.turn is None or len(handover.voters) < FEWEST_VOTERS:
            continue
        voters = [alive[voter.name].election for voter in handover.voters if voter.name in alive]
        known = [(0, 0) if voter.handover is None else voter.handover.version for voter in voters]
        if any(is_witness(voter) for voter in handover.voters):
            word = network.places.get(max(network.places, default=0))
            known.append((0, 0) if word is None else word.version)
        if sum(version <= handover.version for version in known) >= handover.quorum:
            return launcher.number
    return None

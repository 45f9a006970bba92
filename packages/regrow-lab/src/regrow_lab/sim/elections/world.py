"""One run of an election schedule."""

import random
from collections.abc import Iterator
from functools import partial

import msgspec

from regrow.core.ids import Instant
from regrow.core.messages.elections import CoordinatorPresent, Leader
from regrow.membership.succession.voters import VOTE_LEASE, Voters
from regrow_lab.sim.elections.disk import WitnessDisk
from regrow_lab.sim.elections.faults import COORDINATOR, ElectionFault, ElectionSchedule, draw_election
from regrow_lab.sim.elections.followers import SimFollowers
from regrow_lab.sim.elections.laws import Decided, ElectionLaws, limit
from regrow_lab.sim.elections.leaders import ElectedLeaders
from regrow_lab.sim.elections.network import SimLauncher, SimNetwork
from regrow_lab.sim.schedule import BROKEN

ELECTION = "election:"
"""Prefix of the name of an election; its number follows."""


class ElectionWorld:
    """Launchers that elect coordinators, in virtual time.

    Args:
        schedule: all inputs of the run.
    """

    def __init__(self, schedule: ElectionSchedule) -> None:
        self.schedule = schedule
        self._rng = rng = random.Random(schedule.seed)
        self.network = network = SimNetwork(rng, schedule.conditions, schedule.heals)
        self.laws = ElectionLaws(network)
        disk = WitnessDisk(network)
        self._leaders = ElectedLeaders(
            network, self.laws, disk if schedule.witness else None, self._answered, self._give_way
        )
        self._followers = SimFollowers(network, self.laws, disk, self._leaders.present, self._leaders.begin)
        first, *_ = [self._start() for _ in range(schedule.launchers)]
        first.election.become_leader()
        for each in network.launchers:
            each.follows = (1, first.number)
        self._leaders.begin(first, Voters(first.election.me, 1, VOTE_LEASE))
        for fault in schedule.faults:
            network.timeline.at(fault.at, partial(self._happens, fault))

    def __repr__(self) -> str:
        return repr(self.schedule)

    @property
    def decisions(self) -> list[Decided]:
        """All decisions until now."""
        return self.laws.decisions

    def run(self, until: Instant) -> None:
        """Let time pass. Raises `InvariantBroken`."""
        timeline, done = self.network.timeline, [False]
        timeline.at(until, lambda: done.__setitem__(0, True))
        while not done[0] and timeline.step():
            pass

    def run_all(self) -> None:
        """Run until the elections are settled, or must be. Raises `InvariantBroken`."""
        healed = self.schedule.heals or 0.0
        self.run(healed + 0.7)
        if not self.laws.settled():
            self.run(limit(healed, witness=self.schedule.witness))
            self.laws.recovered(healed)

    def _start(self) -> SimLauncher:
        launcher = self.network.make()
        self.network.again(launcher, self._rng.random() / 2, partial(self._followers.poll, launcher))
        return launcher

    def _answered(self, me: SimLauncher, host: int, answer: CoordinatorPresent) -> None:
        self._followers.answered(me, host, answer)

    def _give_way(self, host: SimLauncher, leader: Leader | None) -> None:
        """End a coordinator: an elected one becomes a follower with its state; the first restarts as a new process."""
        if host.number > 0:
            host.election.released(self.network.clock(host))
            if leader is not None:
                self._followers.follow(host, leader)
        else:
            host.dead = True
            if leader is not None:
                self._followers.follow(self._start(), leader)

    # --- faults ------------------------------------------------------------------------------------------------

    def _happens(self, fault: ElectionFault) -> None:
        network = self.network
        of = {max(self.laws.leaders.items())[1] if each == COORDINATOR else each for each in fault.of}
        ends = network.now + fault.lasts
        network.say("{} of {} until {}", fault.how, sorted(of), round(ends, 3))
        if fault.how == "cut":
            network.cuts.append((ends, frozenset(of)))
        for number in sorted(of):
            launcher = network.launchers[number]
            match fault.how:
                case "off":
                    network.off[number] = max(network.off.get(number, 0.0), ends)
                case "pauses":
                    launcher.paused_until = max(launcher.paused_until, ends)
                case "dies":
                    launcher.dead = True
                case "restarts" if not launcher.dead:
                    launcher.dead = True
                    network.timeline.at(ends, self._restart)

    def _restart(self) -> None:
        launcher = self._start()
        self.network.say("launcher {} joins", launcher.number)


def run_election(number: int) -> ElectionWorld:
    """Run the schedule of this number. Raises `InvariantBroken`; a note gives the command that repeats the run."""
    world = ElectionWorld(draw_election(number))
    try:
        world.run_all()
    except Exception as error:
        error.add_note(f"to replay this run: regrow sim replay {ELECTION}{number}")
        raise
    return world


def election_lines(schedule: ElectionSchedule) -> Iterator[str]:
    """Yield the events of a run, a line each, and its end. A broken law is its last line."""
    yield f"the election: {msgspec.json.encode(schedule).decode()}"
    world, last = ElectionWorld(schedule), ""
    try:
        world.run_all()
        terms = sorted({decision.term for decision in world.decisions})
        last = f"ended well: {len(world.decisions)} decisions, in the terms {terms}"
    except Exception as error:  # noqa: BLE001 - any error is a result of the run
        last = f"{BROKEN}{type(error).__name__}: {error}"
    yield from (f"{at:10.3f} {what.format(*values)}" for at, what, values in world.network.log)
    yield last

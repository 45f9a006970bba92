"""One run of an election schedule."""

import random
from collections.abc import Iterator
from functools import partial

import msgspec

from regrow.core.ids import Instant
from regrow.core.messages.elections import CoordinatorPresent, Office
from regrow.membership.succession.voters import VOTE_LEASE, Voters
from regrow_lab.sim.elections.carriers import Carriers, SimLauncher
from regrow_lab.sim.elections.deputies import SimDeputies
from regrow_lab.sim.elections.disk import WitnessDisk
from regrow_lab.sim.elections.faults import COORDINATOR, ElectionFault, ElectionSchedule, draw_election
from regrow_lab.sim.elections.laws import Decided, ElectionLaws, limit
from regrow_lab.sim.elections.offices import SimOffices
from regrow_lab.sim.schedule import BROKEN

ELECTION = "election:"
"""Prefix of the name of an election; its number follows."""


class ElectionWorld:
    """Launchers that elect coordinators, in virtual time.

    Args:
        schedule: all that the run depends on.
    """

    def __init__(self, schedule: ElectionSchedule) -> None:
        self.schedule = schedule
        self._rng = rng = random.Random(schedule.seed)
        self.carriers = carriers = Carriers(rng, schedule.conditions, schedule.heals)
        self.laws = ElectionLaws(carriers)
        disk = WitnessDisk(carriers)
        self._offices = SimOffices(
            carriers, self.laws, disk if schedule.witness else None, self._answered, self._give_way
        )
        self._deputies = SimDeputies(carriers, self.laws, disk, self._offices.present, self._offices.begin)
        first, *_ = [self._start() for _ in range(schedule.launchers)]
        first.election.enter_office()
        for each in carriers.launchers:
            each.follows = (1, first.number)
        self._offices.begin(first, Voters(first.election.me, 1, VOTE_LEASE))
        for fault in schedule.faults:
            carriers.timeline.at(fault.at, partial(self._happens, fault))

    def __repr__(self) -> str:
        return repr(self.schedule)

    @property
    def decisions(self) -> list[Decided]:
        """All that were made."""
        return self.laws.decisions

    def run(self, until: Instant) -> None:
        """Let time pass. Raises `InvariantBroken`."""
        timeline, done = self.carriers.timeline, [False]
        timeline.at(until, lambda: done.__setitem__(0, True))
        while not done[0] and timeline.step():
            pass

    def run_all(self) -> None:
        """Until all is well again, or must be. Raises `InvariantBroken`."""
        healed = self.schedule.heals or 0.0
        self.run(healed + 0.7)
        if not self.laws.settled():
            self.run(limit(healed, witness=self.schedule.witness))
            self.laws.recovered(healed)

    def _start(self) -> SimLauncher:
        launcher = self.carriers.make()
        self.carriers.again(launcher, self._rng.random() / 2, partial(self._deputies.poll, launcher))
        return launcher

    def _answered(self, me: SimLauncher, host: int, answer: CoordinatorPresent) -> None:
        self._deputies.answered(me, host, answer)

    def _give_way(self, host: SimLauncher, office: Office | None) -> None:
        """One that was elected follows the other with all that it knows; the first goes on as another process does."""
        if host.number > 0:
            host.election.released(self.carriers.clock(host))
            if office is not None:
                self._deputies.follow(host, office)
        else:
            host.dead = True
            if office is not None:
                self._deputies.follow(self._start(), office)

    # --- what goes wrong ---------------------------------------------------------------------------------------

    def _happens(self, fault: ElectionFault) -> None:
        carriers = self.carriers
        of = {max(self.laws.offices.items())[1] if each == COORDINATOR else each for each in fault.of}
        ends = carriers.now + fault.lasts
        carriers.say("{} of {} until {}", fault.how, sorted(of), round(ends, 3))
        if fault.how == "cut":
            carriers.cuts.append((ends, frozenset(of)))
        for number in sorted(of):
            launcher = carriers.launchers[number]
            match fault.how:
                case "off":
                    carriers.off[number] = max(carriers.off.get(number, 0.0), ends)
                case "pauses":
                    launcher.paused_until = max(launcher.paused_until, ends)
                case "dies":
                    launcher.dead = True
                case "restarts" if not launcher.dead:
                    launcher.dead = True
                    carriers.timeline.at(ends, self._restart)

    def _restart(self) -> None:
        launcher = self._start()
        self.carriers.say("launcher {} joins", launcher.number)


def run_election(number: int) -> ElectionWorld:
    """Run the schedule of this number. Raises `InvariantBroken`, with the command that shows it again as a note."""
    world = ElectionWorld(draw_election(number))
    try:
        world.run_all()
    except Exception as error:
        error.add_note(f"to see that run again: regrow sim replay {ELECTION}{number}")
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
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the run is looked at for
        last = f"{BROKEN}{type(error).__name__}: {error}"
    yield from (f"{at:10.3f} {what.format(*values)}" for at, what, values in world.carriers.log)
    yield last

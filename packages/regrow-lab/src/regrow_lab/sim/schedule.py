"""One run of a simulated job as a value: the job, its faults and their times, and the seed of all other draws.

The same schedule gives the same run, event by event, in any process: `regrow sim replay`.
"""

import base64
import binascii
import zlib
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from regrow.core.errors import UsageError
from regrow.core.exit_codes import RUN_AGAIN, UNPROVEN
from regrow.core.job import JobSpec
from regrow.membership.machine import EndJob
from regrow_lab.sim.faults import SimFault, SimRequest
from regrow_lab.sim.invariants import InvariantBroken
from regrow_lab.sim.network import NetworkConditions
from regrow_lab.sim.script import SimScript
from regrow_lab.sim.world import World

BROKEN = "BROKEN: "
"""Prefix of the last line of a run that broke a law."""
_PREFIX = "schedule:"
_TIME_TO_SAVE_S = 5.0
"""With a shorter notice, not all work of a job may reach the disk."""
_MESSAGES_TO_SAVE = 8
"""Messages of a checkpoint that wait for each other, if its snapshots are taken twice; any of them may be slow."""
_AFTER_THE_LOOP = {"kill finished", "kill after", "hang finished", "hang after", "lost releasing", "reclaimed"}
"""Faults that excuse a missing end: code after the last step does not run again, nor any code of a node out of time."""
_MENDED_THERE = {"kill after"}
"""Excuses that do not count if the script goes on after its loop."""


class Promised(StrEnum):
    """Promise that a schedule must keep."""

    AN_END = "an end"
    """The job ends once, with a code that says how."""
    THE_LAST_STEP = "the last step"
    """The job reaches its last step in spite of all faults."""


class SimSchedule(msgspec.Struct, frozen=True, omit_defaults=True):
    """All inputs of a run. `slots`: of each of the first nodes; None: as many as its ranks at the start."""

    spec: JobSpec
    script: SimScript = SimScript()
    weather: NetworkConditions = NetworkConditions()
    injected: list[SimFault] = msgspec.field(default_factory=list, name="strikes")
    requests: list[SimRequest] = msgspec.field(default_factory=list, name="wishes")
    slots: int | None = None
    seed: int = 0
    promise: Promised = Promised.AN_END

    @classmethod
    def of_code(cls, code: str) -> "SimSchedule":
        """The schedule with this `code`. Raises `UsageError`."""
        try:
            packed = base64.urlsafe_b64decode(code.removeprefix(_PREFIX).encode())
            return msgspec.msgpack.decode(zlib.decompress(packed), type=cls)
        except (binascii.Error, zlib.error, msgspec.MsgspecError, ValueError) as error:
            raise UsageError(
                f"{code[:40]!r} is not a schedule of this version: {error}",
                hint="copy the whole code that the failed test printed, or give a number",
            ) from error

    @property
    def code(self) -> str:
        """The whole schedule, encoded as one word."""
        return _PREFIX + base64.urlsafe_b64encode(zlib.compress(msgspec.msgpack.encode(self), 9)).decode()

    @property
    def command(self) -> str:
        """The command that repeats this run."""
        return f"regrow sim replay {self.code}"

    def world(self) -> World:
        """The job before its first event."""
        return World(
            self.spec,
            script=self.script,
            weather=self.weather,
            injected=self.injected,
            requests=self.requests,
            slots=self.slots,
            seed=self.seed,
        )

    def run(self, world: World | None = None) -> EndJob:
        """Run to the job's end. Raises `InvariantBroken` or the machine's error, with the command as a note."""
        world = world or self.world()
        try:
            end = world.run()
            if broken := self._broken(world, end):
                raise InvariantBroken(broken)
        except Exception as error:
            error.add_note(f"to replay this run: {self.command}")
            raise
        return end

    def _broken(self, world: World, end: EndJob) -> str:
        """Describe a broken promise; empty: all are kept."""
        if end.code not in (0, 1, 75, UNPROVEN) or (end.code == UNPROVEN and "refuted" not in world.bad_moments):
            return f"the job ended with code {end.code}"
        if end.code == 0 and world.laws.memory.doubtful:
            return "refuted newcomers had trained, and the job ended with code 0"
        if end.code == RUN_AGAIN and "stop" in world.bad_moments and end.diagnosis.startswith("stopped"):
            return self._stopped(world)
        excused = _AFTER_THE_LOOP - (_MENDED_THERE if self.script.goes_on else set())
        if self._leaves_in_order(world, end):
            return ""
        if self.promise is Promised.THE_LAST_STEP and not world.bad_moments & excused:
            if end.code not in (0, UNPROVEN) or (end.diagnosis and end.code == 0):
                return f"the job did not come to its last step: {end.diagnosis} (code {end.code})"
            return "" if _finished(world, self.script) else "the job ended before all ranks had done the last step"
        if end.code == 0 and self.script.with_session and not _finished(world, self.script):
            return "the job ended well before all ranks had done the last step"
        return ""

    def _stopped(self, world: World) -> str:
        """Describe work missing on disk after a stop, if it could be saved in time and there was no fault."""
        grace = min(request.grace for request in self.requests if request.what in ("stop", "signals"))
        slow = _MESSAGES_TO_SAVE * self.weather.slow_by if self.weather.slow else 0.0
        calm = not self.injected and not self.script.fails and grace >= _TIME_TO_SAVE_S + slow
        lost = calm and self.spec.checkpoint_every and world.disk.durable < world.laws.memory.stop_at
        return "the job was asked to stop, and its work is not on disk" if lost else ""

    def _leaves_in_order(self, world: World, end: EndJob) -> bool:
        """True if it ends because its nodes were drained, with all its work on disk, if there was time."""
        drains = [request for request in self.requests if request.what == "drain"]
        hurried = any(request.grace < _TIME_TO_SAVE_S for request in drains) or "disk" in world.bad_moments
        on_disk = world.laws.all_on_disk or hurried
        given_back = end.code == RUN_AGAIN and "given back" in end.diagnosis
        return bool(self.spec.checkpoint_every and drains) and given_back and on_disk


def replay_lines(schedule: SimSchedule) -> Iterator[str]:
    """Yield the events of a run, a line each, and its end. An `InvariantBroken` is its last line."""
    yield f"the job: {_line(schedule.spec)}"
    yield f"its script: {_line(schedule.script)}"
    yield f"its network: {_line(schedule.weather)}"
    yield from (f"fault: {_line(fault)}" for fault in schedule.injected)
    yield from (f"request: {_line(request)}" for request in schedule.requests)
    world, last = schedule.world(), ""
    begin = world.now()
    try:
        end = schedule.run(world)
        last = f"ended with code {end.code}" + (f": {end.diagnosis}" if end.diagnosis else "")
    except Exception as error:  # noqa: BLE001 - any error is a result of the run
        last = f"{BROKEN}{type(error).__name__}: {error}"
    yield from (f"{at - begin:10.3f} {_line(item)}" for at, item in world.log)
    yield last


def _line(item: msgspec.Struct) -> str:
    return msgspec.json.encode(item).decode()


def _finished(world: World, script: SimScript) -> bool:
    """True if the workers of the last generation have done the last step."""
    alone = script.leaves is not None and world.laws.world == 1
    last = script.leaves[1] if alone and script.leaves is not None else script.until
    ranks = {worker.rank for worker in world.workers.values() if worker.state == last}
    return ranks >= set(range(world.laws.world)) and world.laws.world > 0

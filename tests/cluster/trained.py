"""A small training under the operator, which must end with the bits of an undisturbed run whatever happens to it."""

from pathlib import Path
from typing import Any

from tests.cluster.bed import Bed
from tests.cluster.fake_store import Manifest
from tests.cluster.jobs import training_job
from tests.ports import held_port
from tests.process.elastic import HURRY, final, fixed_run, losses
from tests.process.training import SCRIPTS, redone

from regrow.observe.ledger import Ledger, read_records
from regrow_clusters.operator.objects import JOB_LABEL, PLACE_LABEL

STEPS = 200
MICRO = (str(SCRIPTS / "train_micro.py"),)


def micro_job(*, steps: int = STEPS, pace: float = 0.6, **spec: Any) -> dict[str, Any]:
    """A job of the small training in micro-batches, in world-invariant mode; it takes its time until it is let go."""
    script = [*MICRO, "--steps", str(steps), "--pace", str(pace), "--invariant", "--out", "job.out"]
    quick: dict[str, Any] = {"scaleUpSnoozeTimeInSeconds": 0, "gracefulShutdownTimeoutInSeconds": 20}
    given = {"script": script, "port": held_port(), "runFlags": ["--data-cache=off"], **quick}
    return training_job(**(given | spec))


class TrainedJob:
    """The job that `micro_job` has described, on a test's cluster, from before it is made."""

    def __init__(self, cluster: Bed, folder: Path) -> None:
        self.cluster, self._folder = cluster, folder
        self.made: list[tuple[int, str]] = []
        """Place and name of each of its pods that was ever made."""
        cluster.store.listeners.append(self._note)

    def _note(self, change: Any) -> None:
        if (change.plural, change.what) == ("pods", "ADDED") and JOB_LABEL in change.new["metadata"]["labels"]:
            meta = change.new["metadata"]
            self.made.append((int(meta["labels"][PLACE_LABEL]), meta["name"]))

    def ledger(self) -> Ledger:
        """Records of all of its pods, each in a home of its own."""
        records = [each for folder in self._folder.glob("*.home/jobs/job") for each in read_records(folder)]
        return Ledger(sorted(records, key=lambda record: record.at))

    def step(self, ranks: int) -> int:
        """The newest step that `ranks` ranks have committed while they were the world; -1: none."""
        told = self.ledger()
        if not told.generations or len(told.generations[-1].workers) != ranks:
            return -1
        return max((step for step, done in told.commits.items() if len(done) == ranks), default=-1)

    async def until_world(self, ranks: int) -> float:
        """Wait until `ranks` ranks train, a step further; returns the time that took."""
        before = max(self.ledger().commits, default=-1)
        return await self.cluster.until(lambda: self.step(ranks) > before, f"{ranks} ranks train")

    def at(self, place: int) -> Manifest:
        """The pod at a place."""
        (found,) = [each for each in self.cluster.pods() if each["metadata"]["labels"].get(PLACE_LABEL) == str(place)]
        return found

    def let_go(self) -> None:
        """It trains to its end without any pause."""
        (self._folder / HURRY).touch()

    def assert_undisturbed(self, ranks: int) -> list[str]:
        """Every loss and the state of every rank bit by bit, no step lost or done twice; kinds of what has happened."""
        alone = self._folder / "alone"
        alone.mkdir()
        fixed = fixed_run(alone, STEPS)
        finals = [final(self._folder / f"job.{rank}.json") for rank in range(ranks)]
        assert finals == [{"digest": fixed["digest"], "parameters": fixed["parameters"]}] * ranks
        return self.assert_losses(fixed["losses"])

    def assert_losses(self, undisturbed: dict[int, Any]) -> list[str]:
        """Every loss bit by bit, no step lost or done twice; kinds of what has happened."""
        told = self.ledger()
        assert losses(told) == undisturbed
        assert redone(told) == [] and told.open_incidents == {}
        assert [each.steps_lost for each in told.incidents] == [0] * len(told.incidents)
        return [each.kind for each in told.incidents]

    async def assert_no_orphan(self) -> None:
        """Delete the job, and see that nothing of it is left, neither an object nor a process."""
        store = self.cluster.store
        store.delete("trainingjobs", "team", "job")
        kinds = ("pods", "secrets", "services", "poddisruptionbudgets")
        await self.cluster.until(lambda: not any(store.all_of(kind) for kind in kinds), "its objects are gone")
        await self.cluster.until(lambda: not self.cluster.kubelet.running(), "its processes have ended")

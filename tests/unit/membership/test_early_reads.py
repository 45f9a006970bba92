"""Reads of a script's place before its loop are noted, and standbys that got wrong answers are not seated."""

import os
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
from tests.unit.membership.elastic_job import elastic, grown
from tests.unit.membership.membership_job import Job

from regrow.core.early_reads import EarlyReads, PlaceInWorld
from regrow.core.ids import NO_STATE, NodeId
from regrow.core.messages import facts, orders
from regrow.core.messages.vocabulary import Role, Warmth
from regrow.core.records import Noted
from regrow.membership.roster import Stage

RANK = {PlaceInWorld.RANK: "RANK at train.py:7"}

# --- noting reads ---------------------------------------------------------------------------------------------------


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[EarlyReads]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    reads = EarlyReads()
    reads.watch()
    yield reads
    reads.stop()
    assert type(os.environ) is os._Environ


@pytest.mark.parametrize(
    ("asks", "what"),
    [
        (lambda: os.environ["RANK"], PlaceInWorld.RANK),
        (lambda: os.environ.get("LOCAL_RANK", "0"), PlaceInWorld.LOCAL_RANK),
        (lambda: os.getenv("WORLD_SIZE"), PlaceInWorld.WORLD),
        (lambda: os.environ["HOME"], None),
        (lambda: "RANK" in os.environ, None),
        (lambda: os.environ.copy(), None),
        (lambda: dict(os.environ), None),
        (lambda: {**os.environ, "MORE": "1"}, None),
        (lambda: os.environ | {"MORE": "1"}, None),
        (lambda: [value for _, value in os.environ.items()], None),
        (lambda: [os.environ[name] for name in ("HOME", "RANK")], PlaceInWorld.RANK),
        (lambda: [os.environ[name] for name in list(os.environ.keys()) if name == "RANK"], PlaceInWorld.RANK),
    ],
)
def test_reads_of_the_environment_are_noted_with_the_line_of_the_script(
    early: EarlyReads, asks: FunctionType, what: PlaceInWorld | None
) -> None:
    asks()
    assert list(early.found) == ([] if what is None else [what])
    assert all(f"{__file__}:{asks.__code__.co_firstlineno}" in where for where in early.found.values())


def ask_within(early: EarlyReads, *modules: str) -> None:
    """Ask for the rank, from the first of the modules, which the second has called, and so on."""
    body = "early.note(what, 'get_rank()')"
    known: dict[str, Any] = {"early": early, "what": PlaceInWorld.RANK}
    for module in modules:
        made = {"__name__": module, **known}
        exec(f"def ask(): {body}", made)
        body, known = "inner()", {"inner": made["ask"]}
    known["inner"]()


@pytest.mark.parametrize(
    ("modules", "counts"),
    [
        (("train",), True),
        (("accelerate.state", "train"), True),
        (("torch.nn.parallel.distributed", "train"), False),
        (("regrow.train.session", "train"), False),
        (("torchtitan.train",), True),
    ],
)
def test_what_torch_and_regrow_ask_for_themselves_does_not_count(
    early: EarlyReads, modules: tuple[str, ...], counts: bool
) -> None:
    ask_within(early, *modules)
    assert bool(early.found) == counts


def test_what_is_asked_in_the_loop_does_not_count(early: EarlyReads) -> None:
    early.stop()
    assert os.environ["RANK"] == "1"
    assert early.found == {}


def test_a_device_that_is_in_use_binds_its_worker_to_the_place_on_the_node(early: EarlyReads) -> None:
    early.bind("CUDA device 1")
    assert early.found == {PlaceInWorld.LOCAL_RANK: "CUDA device 1 is in use"}


def test_a_sampler_of_torchs_that_asked_for_its_rank_follows_when_the_worker_is_seated(
    early: EarlyReads,
) -> None:
    made: dict[str, Any] = {"__name__": "torch.utils.data.distributed", "early": early, "what": PlaceInWorld.RANK}
    exec(
        "class Sampler:\n    def __init__(self):\n        early.note(what, 'get_rank()')\n        self.rank = 1",
        made,
    )
    sampler = made["Sampler"]()
    early.stop()
    early.take_rank(0)
    assert (sampler.rank, early.found) == (0, {})


# --- what becomes of the standby ------------------------------------------------------------------------------------


def trained(world: int, nodes: int = 1) -> Job:
    return Job(world, nodes=nodes, standbys=1).trained(0)


def warmth(job: Job) -> Warmth | None:
    return [each for each in job.all(orders.SpawnWorker) if each.role is Role.STANDBY][-1].warmth


def test_a_standby_whose_script_asks_early_is_ended_once_and_others_wait_before_the_script() -> None:
    job = trained(3)
    first = job.standby()
    job.ready(first, early=RANK)
    assert [each.worker for each in job.all(orders.FenceWorker)] == [first]
    notes = [note.text for note in job.all(Noted)]
    assert len(notes) == 1 and "session.is_main inside the loop" in notes[0]
    assert "reads its rank before its loop (RANK at train.py:7), so a standby built for one rank cannot" in notes[0]
    job.exited(first)
    assert job.standby() != first
    assert warmth(job) is Warmth.IMPORTS
    job.tell(facts.WorkerReady(job.standby(), NO_STATE, "", ""))
    assert len(job.all(orders.FenceWorker)) == 1
    job.exited(job.of(0))
    assert job.machine.roster.workers[job.of(0)].role is Role.STANDBY
    assert len(job.all(Noted)) == 1


@pytest.mark.parametrize("moment", ["while the next one comes", "when that one waits"])
def test_the_read_is_the_reason_why_nothing_is_proven_though_there_are_standbys(moment: str) -> None:
    job = Job(3, standbys=1, proof=True).trained(4)
    first = job.standby()
    job.ready(first, early=RANK)
    job.exited(first)
    if moment == "when that one waits":
        job.tell(facts.WorkerReady(job.standby(), NO_STATE, "", ""))
    job.now += 5.0
    job.stepped(5)
    why = job.machine.snapshot().replaceable
    assert "because the script reads its rank before its loop (RANK at train.py:7)" in why, why
    assert "--standby" not in why


@pytest.mark.parametrize("early", [{}, {PlaceInWorld.WORLD: "WORLD_SIZE at train.py:7"}])
def test_a_standby_that_was_told_nothing_wrong_is_used_as_it_is(early: dict[str, str]) -> None:
    job = trained(3)
    job.ready(job.standby(), early=early)
    assert not job.all(orders.FenceWorker)
    assert job.machine.roster.standbys()[0].stage is Stage.READY


def test_a_standby_that_is_seated_while_it_builds_is_replaced_when_it_was_told_another_rank() -> None:
    job = trained(3)
    standby = job.standby()
    job.exited(job.of(0))
    assert job.of(0) == standby
    job.ready(standby, early=RANK)
    assert standby in {each.worker for each in job.all(orders.FenceWorker)}
    assert job.of(0) != standby
    newcomer = job.of(0)
    job.ready(newcomer, early=RANK)
    assert job.of(0) == newcomer


def test_the_place_on_a_node_counts_where_it_has_several() -> None:
    bound = {PlaceInWorld.LOCAL_RANK: "CUDA device 1 is in use"}
    several, single = trained(2), trained(2, nodes=2)
    several.ready(several.standby(), early=bound)
    assert warmth(several) is Warmth.IMPORTS and len(several.all(orders.FenceWorker)) == 1
    for standby in single.machine.roster.standbys():
        single.ready(standby.worker, early=bound)
    assert not single.all(orders.FenceWorker)


@pytest.mark.parametrize("asks", [True, False])
def test_a_standby_that_was_told_the_size_of_a_world_makes_room_when_that_has_changed(asks: bool) -> None:
    job = elastic(standbys=1)
    first = job.standby()
    job.ready(first, early={PlaceInWorld.WORLD: "WORLD_SIZE at train.py:7"} if asks else {})
    grown(job, 3)
    if not asks:
        assert first in job.machine.roster.places.values()
        return
    assert first in {each.worker for each in job.all(orders.FenceWorker)}
    assert job.standby() != first and warmth(job) is None
    job.ready(job.standby(), early={PlaceInWorld.WORLD: "WORLD_SIZE at train.py:7"})
    assert len(job.all(orders.FenceWorker)) == 1 and not job.all(Noted)


def test_on_a_node_with_one_rank_a_standby_is_built_as_that_rank_unless_it_is_rank_0() -> None:
    job = trained(3, nodes=3)
    built = {each.node: each for each in job.all(orders.SpawnWorker) if each.role is Role.STANDBY}
    assert [built[NodeId(f"n{index}")].rank for index in range(3)] == [2, 1, 2]
    for standby in list(job.machine.roster.standbys()):
        job.ready(standby.worker, early=RANK)
    assert [each.node for each in job.all(orders.FenceWorker)] == ["n0"]
    later = [each for each in job.all(orders.SpawnWorker) if each.role is Role.STANDBY][3:]
    assert [(each.node, each.warmth) for each in later] == [("n0", Warmth.IMPORTS)]

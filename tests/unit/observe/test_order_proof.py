"""Every sample once: what the records of a right history prove, and that each way to be wrong is found."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.observe.order_runs import GLOBAL, FakeRun, changed, read, with_data

from regrow.core.errors import UsageError
from regrow.core.messages.data import BatchRecord, OrderSpec, SourceSpec
from regrow.core.records import GenerationFormed, OrderStated, Record, StepCommitted
from regrow.launch.verifying import verify
from regrow.observe.order_proof import prove
from regrow.observe.proof import Proof, Verdict, proof_lines, spans
from regrow.observe.reads import RunRecords
from regrow.observe.sample_counts import SampleCounts
from regrow.observe.tail import read_run

A_RANK = msgspec.structs.replace(GLOBAL, global_batch=0, batch_size=6, remainder="keep")
MIXED = OrderSpec(
    "mixture",
    seed=3,
    sources=[SourceSpec("web", 90), SourceSpec("books", 20)],
    global_batch=24,
    shuffle=True,
    remainder="wrap",
    weights=[(0, [3.0, 1.0]), (9, [1.0, 1.0])],
)
OPAQUE = OrderSpec("opaque", seed=3)


def causes(proof: Proof) -> set[str]:
    return set(proof.causes)


# --- histories in which nothing was lost -------------------------------------------------------------------------


def test_an_undisturbed_run_is_proven_and_its_samples_are_counted() -> None:
    proof = prove([FakeRun().run(25).end()])
    assert (proof.verdict, proof.findings, proof.reasons) == (Verdict.PROVEN, [], [])
    assert (proof.first, proof.steps, proof.read, proof.epochs) == (0, 25, 600, 6)
    assert (proof.repeated, proof.skipped, proof.padding, proof.dropped, proof.agreed) == (0, 0, 0, 0, 0)
    assert [(world.shares, world.first, world.last) for world in proof.worlds] == [(4, 0, 24)]
    assert proof.orders == [GLOBAL]


def test_worlds_of_4_3_4_and_2_by_restarts_are_one_chain_with_the_steps_that_ran_again() -> None:
    chain = [
        FakeRun("a", world=4).run(10).end(75),
        FakeRun("b", world=3, start=8).run(5).end(75),
        FakeRun("c", world=4, start=13).run(9).end(75),
        FakeRun("d", world=2, start=20).run(5).end(0),
    ]
    proof = prove(chain)
    assert (proof.verdict, proof.findings, proof.reasons) == (Verdict.PROVEN, [], [])
    assert [(world.shares, world.first, world.last) for world in proof.worlds] == [
        (4, 0, 7),
        (3, 8, 12),
        (4, 13, 19),
        (2, 20, 24),
    ]
    assert (proof.steps, proof.read, proof.epochs) == (25, 600, 6)


def test_steps_that_ran_again_in_the_same_world_are_counted_once_and_compared() -> None:
    proof = prove([FakeRun().run(10).form(6).run(6).form(9).run(4).end()])
    assert (proof.verdict, proof.steps, proof.read) == (Verdict.PROVEN, 13, 312)
    assert proof.agreed == 6, "steps 6 to 11"


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("order", [GLOBAL, A_RANK, MIXED], ids=["global", "a rank's", "mixture"])
def test_a_rank_that_died_in_its_update_and_one_that_had_not_come_so_far_have_read_the_step(
    world: int, order: OrderSpec
) -> None:
    proof = prove([FakeRun(world=world, order=order).run(4).kill_in_update(1).run(3).kill_in_update(0).run(3).end()])
    assert (proof.verdict, proof.findings, proof.reasons) == (Verdict.PROVEN, [], [])
    assert (proof.steps, proof.agreed) == (12, 0)


@pytest.mark.parametrize(
    ("remainder", "steps", "epochs", "padding", "dropped"), [("keep", 10, 2, 0, 0), ("drop", 9, 2, 0, 8)]
)
def test_what_becomes_of_an_epoch_s_last_samples_is_told_apart(
    remainder: str, steps: int, epochs: int, padding: int, dropped: int
) -> None:
    order = msgspec.structs.replace(GLOBAL, remainder=remainder)
    proof = prove([FakeRun(world=3, order=order).run(steps).end()])
    assert (proof.verdict, proof.epochs, proof.padding, proof.dropped) == (Verdict.PROVEN, epochs, padding, dropped)


def test_samples_that_fill_up_unequal_shares_are_padding_and_no_repetition() -> None:
    order = msgspec.structs.replace(A_RANK, sources=[SourceSpec("corpus", 101)])
    proof = prove([FakeRun(order=order).run(10).end()])
    assert (proof.verdict, proof.epochs, proof.read, proof.padding) == (Verdict.PROVEN, 2, 208, 6)


def test_ranks_that_share_a_share_read_it_once() -> None:
    proof = prove([FakeRun(world=4, share=lambda rank, world: (rank // 2, 2)).run(9).kill_in_update(2).run(5).end()])
    assert (proof.verdict, proof.read, proof.worlds[0].shares) == (Verdict.PROVEN, 15 * 24, 2)


@pytest.mark.parametrize(
    ("microbatches", "worlds"),
    [(8, [(8, 0, 24)]), ({1: 8, 3: 12}, [(8, 0, 5), (12, 6, 24)])],
    ids=["as many", "by a table"],
)
def test_micro_batches_are_proven_through_every_change_of_the_world(
    microbatches: int | dict[int, int], worlds: list[tuple[int, int, int]]
) -> None:
    grown = FakeRun(microbatches=microbatches, world=1).run(3).resize(2).run(3).resize(4).run(3).resize(3).run(16).end()
    proof = prove([grown], against=[FakeRun(microbatches=8, world=1).run(25).end()])
    assert (proof.verdict, proof.findings, proof.reasons) == (Verdict.PROVEN, [], [])
    assert (proof.steps, proof.read, proof.epochs, proof.compared) == (25, 600, 6, 25)
    assert [(world.shares, world.first, world.last) for world in proof.worlds] == worlds


@pytest.mark.parametrize(
    ("lie", "cause"),
    [
        (lambda parts: parts[1:], "share missing"),
        (lambda parts: [*parts, parts[0]], "share repeated"),
        (lambda parts: [msgspec.structs.replace(parts[0], samples="0" * 16), *parts[1:]], "not the order's samples"),
    ],
)
def test_a_micro_batch_that_was_left_out_read_twice_or_wrong_is_found(
    lie: Callable[[list[BatchRecord]], list[BatchRecord]], cause: str
) -> None:
    def change(commit: StepCommitted) -> StepCommitted:
        at = (commit.step, commit.rank) == (5, 1)
        return msgspec.structs.replace(commit, parts=lie(commit.parts)) if at else commit

    proof = prove([changed(FakeRun(microbatches=8, world=3).run(25).end(), change)])
    assert proof.verdict is Verdict.WRONG and cause in causes(proof)


def test_a_micro_batch_that_was_read_again_in_another_world_is_compared() -> None:
    before = FakeRun("a", microbatches=8, world=4).run(10).end(75)
    again = FakeRun("b", microbatches=8, world=3, start=8).run(17).end()
    assert prove([before, again]).agreed == 2

    def change(commit: StepCommitted) -> StepCommitted:
        if (commit.step, commit.rank) != (9, 0):
            return commit
        parts = [*commit.parts[:-1], msgspec.structs.replace(commit.parts[-1], digest="0" * 16)]
        return msgspec.structs.replace(commit, parts=parts)

    proof = prove([before, changed(again, change)])
    assert causes(proof) == {"changed the second time"}
    assert proof.findings[0].share == 2


def test_a_batch_size_that_follows_the_world_by_hand_is_the_same_order() -> None:
    six, eight = (msgspec.structs.replace(A_RANK, batch_size=size) for size in (6, 8))
    chain = [FakeRun("a", world=4, order=six).run(7).end(75), FakeRun("b", world=3, order=eight, start=7).run(7).end()]
    assert prove(chain).verdict is Verdict.PROVEN


# --- what is wrong is found --------------------------------------------------------------------------------------

Defect = Callable[[StepCommitted], StepCommitted | None]
OTHER = msgspec.structs.replace(GLOBAL, seed=4)


def at(step: int, rank: int | None, change: Defect) -> Defect:
    """Changes the lines of a step; of one rank, or of all."""
    return lambda commit: change(commit) if commit.step == step and rank in (None, commit.rank) else commit


def gone(commit: StepCommitted) -> None:
    return None


def reads_as(order: OrderSpec, step: int) -> Defect:
    """Reads what stands at another step, or in another order."""

    def change(commit: StepCommitted) -> StepCommitted:
        assert commit.data is not None
        return msgspec.structs.replace(commit, data=read(order, step, commit.data.share, commit.data.shares))

    return change


DEFECTS = {
    "step skipped": (at(7, None, gone), {"step skipped"}, (7, None, None)),
    "the first step skipped": (at(0, None, gone), {"step skipped"}, (0, None, None)),
    "a rank's line missing": (at(7, 2, gone), {"share missing"}, (7, 2, 2)),
    "a rank's last line missing": (at(19, 3, gone), {"share missing"}, (19, 3, 3)),
    "a share read twice, another not": (
        at(7, 2, lambda c: msgspec.structs.replace(c, data=read(GLOBAL, 7, 1, 4))),
        {"share missing"},
        (7, 2, None),
    ),
    "a step read again in place of the next": (
        at(8, None, reads_as(GLOBAL, 7)),
        {"not the order's samples"},
        (8, 0, None),
    ),
    "one rank with samples of another step": (
        at(8, 3, reads_as(GLOBAL, 9)),
        {"not the order's samples"},
        (8, 3, None),
    ),
    "another order in one step": (at(8, None, reads_as(OTHER, 8)), {"not the order's samples"}, (8, 0, None)),
    "another order in all steps": (
        lambda commit: reads_as(OTHER, commit.step)(commit),
        {"not the order's samples"},
        (0, 0, None),
    ),
    "two worlds in one step": (
        at(7, 1, lambda c: msgspec.structs.replace(c, data=read(GLOBAL, 7, 1, 3))),
        {"two worlds in one step"},
        (7, None, None),
    ),
    "a share that is none": (at(7, 1, lambda c: with_data(c, share=4)), {"share out of range", "share missing"}, None),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_what_is_wrong_with_a_run_is_found_and_named(name: str) -> None:
    change, expected, place = DEFECTS[name]
    sound = FakeRun().run(20).end()
    assert prove([sound]).verdict is Verdict.PROVEN
    proof = prove([changed(sound, change)])
    assert (proof.verdict, causes(proof)) == (Verdict.WRONG, expected)
    if place is not None:
        step, share, rank = place
        found = proof.findings[0]
        assert (found.step, found.share, found.rank) == (step, share, rank)
        assert (found.run, found.generation) == ("job", 1)


@pytest.mark.parametrize("what", ["digest", "samples"])
@pytest.mark.parametrize("when", ["the first time", "the second time"])
def test_a_step_that_read_something_else_when_it_ran_again_is_found(what: str, when: str) -> None:
    run = FakeRun().run(10).form(6).run(6).end()
    generation = 1 if when == "the first time" else 2

    def change(commit: StepCommitted) -> StepCommitted:
        touched = (commit.step, commit.rank, commit.generation) == (8, 2, generation)
        return with_data(commit, **{what: "f" * 16}) if touched else commit

    proof = prove([changed(run, change)])
    assert proof.verdict is Verdict.WRONG
    assert "changed the second time" in causes(proof)
    assert {(found.step, found.share, found.rank) for found in proof.findings} <= {(8, 2, 2), (8, 2, None)}
    assert proof.agreed == 3, "steps 6, 7 and 9"


def test_what_was_read_before_going_back_is_held_to_the_order_too() -> None:
    run = FakeRun("a", world=4).run(10).end(75), FakeRun("b", world=3, start=8).run(8).end()
    wrong = changed(run[0], at(9, 1, reads_as(GLOBAL, 3)))
    assert causes(prove([wrong, run[1]])) == {"not the order's samples"}


def test_ranks_with_the_same_share_that_read_different_things_are_found() -> None:
    run = FakeRun(world=4, share=lambda rank, world: (rank // 2, 2)).run(9).end()
    proof = prove([changed(run, at(5, 3, lambda commit: with_data(commit, digest="f" * 16)))])
    assert [(found.cause, found.step, found.share, found.rank) for found in proof.findings] == [
        ("share read differently", 5, 1, 3)
    ]


def test_a_share_that_more_ranks_have_read_than_another_is_found() -> None:
    proof = prove([FakeRun(world=3, share=lambda rank, world: (rank // 2, 2)).run(3).end()])
    assert causes(proof) == {"share repeated"}
    assert proof.causes["share repeated"] == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 4}, "seed 3 became 4"),
        ({"sources": [SourceSpec("corpus", 99)]}, "sources corpus of 100 became corpus of 99"),
        ({"global_batch": 23}, "global_batch 24 became 23"),
        ({"shuffle": False}, "shuffle True became False"),
        ({"remainder": "keep"}, "remainder wrap became keep"),
        ({"kind": "opaque"}, "kind ordered became opaque"),
    ],
)
def test_an_order_that_changes_between_two_runs_is_found(change: dict[str, object], said: str) -> None:
    other = msgspec.structs.replace(GLOBAL, **change)
    second = FakeRun("b", order=GLOBAL if "kind" in change else other, start=8).run(9).end()
    if "kind" in change:
        second = RunRecords("b", [_declaring(record, other) for record in second.records])
    proof = prove([FakeRun("a").run(8).end(75), second])
    found = next(found for found in proof.findings if found.cause == "order changed")
    assert (found.step, found.run) == (8, "b")
    assert said in found.text


def _declaring(record: Record, order: OrderSpec) -> Record:
    return msgspec.structs.replace(record, order=order) if isinstance(record, OrderStated) else record


def test_a_batch_size_of_a_rank_s_own_repeats_samples_when_the_world_changes() -> None:
    chain = [
        FakeRun("a", world=4, order=A_RANK).run(2).end(75),
        FakeRun("b", world=3, order=A_RANK, start=2).run(4).end(),
    ]
    proof = prove(chain)
    assert {"order changed", "sample repeated"} <= causes(proof)
    assert proof.repeated == 12, "36 to 47: 48 were read, and step 2 starts at 36"


def test_a_worker_with_another_order_than_the_others_is_found() -> None:
    run = FakeRun().run(6).end()
    records = [
        msgspec.structs.replace(record, order=OTHER) if isinstance(record, OrderStated) and record.rank == 2 else record
        for record in run.records
    ]
    assert "two orders in one step" in causes(prove([RunRecords("job", records)]))


def test_thousands_of_findings_are_counted_and_a_few_of_each_cause_are_told() -> None:
    proof = prove([changed(FakeRun().run(200).end(), lambda commit: reads_as(OTHER, commit.step)(commit))])
    assert proof.causes == {"not the order's samples": 800}
    assert len(proof.findings) == 20
    assert "800 findings in all" in "\n".join(proof_lines(proof))


# --- what the records do not tell --------------------------------------------------------------------------------


def test_the_newest_lines_of_a_lost_node_are_missed_and_not_called_wrong() -> None:
    fake = FakeRun(nodes=2).run(10)
    run = fake.lose_node(1).form(10).run(5).end()
    for lost in (1, 3):
        first = 10 - lost
        torn = run
        for step in range(first, 10):
            torn = changed(changed(torn, at(step, 2, gone)), at(step, 3, gone))
        proof = prove([torn])
        assert (proof.verdict, proof.findings) == (Verdict.UNPROVEN, [])
        assert "node1 was lost" in " ".join(proof.reasons)
        assert spans(range(first, 10)) in " ".join(proof.reasons)


def test_a_hole_before_other_lines_of_a_lost_node_is_wrong_all_the_same() -> None:
    run = FakeRun(nodes=2).run(10).lose_node(1).form(10).run(5).end()
    assert causes(prove([changed(run, at(8, 2, gone))])) == {"share missing"}


def test_a_line_that_a_node_lost_after_it_came_back_is_wrong() -> None:
    run = FakeRun(nodes=2).run(10).lose_node(1).form(10).run(5).end()
    assert causes(prove([changed(run, at(14, 2, gone))])) == {"share missing"}


def test_a_line_missing_on_a_node_that_was_not_lost_is_wrong() -> None:
    run = FakeRun(nodes=2).run(10).lose_node(1).form(10).run(5).end()
    assert causes(prove([changed(run, at(9, 0, gone))])) == {"share missing"}


def test_a_line_of_a_rank_that_died_long_before_its_node_was_lost_had_been_written() -> None:
    run = FakeRun(nodes=2).run(5).kill_in_update(2).run(20).lose_node(1).form(26).run(5).end()
    assert prove([run]).verdict is Verdict.PROVEN
    assert causes(prove([changed(run, at(5, 2, gone))])) == {"share missing"}


def test_a_torn_last_line_is_told_as_what_is_missing(tmp_path: Path) -> None:
    folder = _written(FakeRun().run(12).end(), tmp_path / "job")
    assert prove([read_run(folder, "job")]).verdict is Verdict.PROVEN
    path = folder / "steps.node0.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    proof = prove([read_run(folder, "job")])
    assert (proof.verdict, proof.findings) == (Verdict.UNPROVEN, [])
    assert proof.reasons == [
        "step 11: rank 3 has no record of it, and others have: the file of node0 ends in the middle of a "
        "line, or has zeros in the place of some"
    ]


def test_a_whole_last_line_that_is_gone_is_wrong(tmp_path: Path) -> None:
    folder = _written(FakeRun().run(12).end(), tmp_path / "job")
    path = folder / "steps.node0.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n").rpartition(b"\n")[0] + b"\n")
    assert causes(prove([read_run(folder, "job")])) == {"share missing"}


def _written(run: RunRecords, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, of_steps in (("events", False), ("steps.node0", True)):
        lines = [msgspec.json.encode(r) for r in run.records if isinstance(r, StepCommitted | OrderStated) is of_steps]
        (folder / f"{name}.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


@pytest.mark.parametrize("ended", [75, None])
def test_steps_that_not_all_ranks_had_done_when_the_job_ended_do_not_count(ended: int | None) -> None:
    fake = FakeRun().run(9)
    fake.commit(1)
    proof = prove([fake.end(ended) if ended is not None else fake.made(live=True)])
    assert (proof.verdict, proof.steps, proof.unfinished) == (Verdict.PROVEN, 9, 1)


def test_a_step_that_not_all_ranks_had_done_when_a_job_ended_well_is_wrong() -> None:
    fake = FakeRun().run(9)
    fake.commit(1)
    assert causes(prove([fake.end(0)])) == {"share missing"}


def test_a_chain_that_goes_on_after_a_step_that_was_not_written_down_whole_is_not_proven() -> None:
    fake = FakeRun("a").run(9)
    fake.commit(1)
    proof = prove([fake.end(75), FakeRun("b", start=10).run(5).end()])
    assert (proof.verdict, proof.findings) == (Verdict.UNPROVEN, [])
    assert "step 9" in proof.reasons[0] and "job a ended in it" in proof.reasons[0]


@pytest.mark.parametrize("code", [0, 75])
def test_jobs_that_are_missing_in_a_chain_are_missed(code: int) -> None:
    late = prove([FakeRun("b", start=8).run(12).end()])
    assert (late.verdict, late.first) == (Verdict.UNPROVEN, 8)
    assert late.epochs == 2, "those that begin after step 8; of the one before nobody knows the beginning"
    assert late.reasons == ["steps 0 to 7: not in these records; name the jobs before them too"]
    hole = prove([FakeRun("a").run(5).end(code), FakeRun("b", start=8).run(12).end()])
    assert (hole.verdict, hole.findings) == (Verdict.UNPROVEN, [])
    assert "steps 5 to 7: no rank has a record" in hole.reasons[0]


def test_a_loader_with_an_order_of_its_own_is_held_to_shares_and_digests() -> None:
    def opaque(run: RunRecords) -> RunRecords:
        kept = changed(run, lambda commit: with_data(commit, samples=""))
        return replace(kept, records=[_declaring(record, OPAQUE) for record in kept.records])

    sound = opaque(FakeRun().run(10).form(6).run(6).end())
    proof = prove([sound])
    assert (proof.verdict, proof.samples_known, proof.agreed) == (Verdict.UNPROVEN, False, 4)
    assert proof.reasons == ["the loader has an order of its own"]
    assert causes(prove([changed(sound, at(3, 1, gone))])) == {"share missing"}
    again = changed(sound, lambda c: with_data(c, digest="e" * 16) if (c.step, c.generation) == (7, 2) else c)
    assert causes(prove([again])) == {"changed the second time"}


def test_records_that_do_not_say_what_was_read_prove_nothing() -> None:
    silent = changed(FakeRun().run(4).end(), lambda commit: msgspec.structs.replace(commit, data=None))
    proof = prove([silent])
    assert (proof.verdict, proof.samples_known) == (Verdict.UNPROVEN, True) or proof.reasons
    assert proof.verdict is Verdict.UNPROVEN
    one = changed(FakeRun().run(4).end(), at(2, 1, lambda commit: msgspec.structs.replace(commit, data=None)))
    assert prove([one]).reasons == ["step 2: the record of rank 1 does not list what was read"]


def test_no_step_at_all_proves_nothing() -> None:
    assert prove([FakeRun().end()]).verdict is Verdict.UNPROVEN


def test_commits_without_the_events_of_their_job_are_not_enough() -> None:
    run = FakeRun().run(8).end()
    proof = prove([RunRecords("file", [r for r in run.records if isinstance(r, StepCommitted | OrderStated)])])
    assert (proof.verdict, proof.findings) == (Verdict.UNPROVEN, [])
    holed = [r for r in run.records if isinstance(r, StepCommitted | OrderStated) and getattr(r, "step", 0) != 3]
    assert any("step 3: no rank has a record" in reason for reason in prove([RunRecords("file", holed)]).reasons)


def test_a_generation_of_which_only_commits_tell_starts_with_the_first_of_them() -> None:
    run = FakeRun().run(10).form(6).run(6).end()
    records = [r for r in run.records if not (isinstance(r, GenerationFormed) and r.generation == 2)]
    proof = prove([RunRecords("job", records)])
    assert (proof.verdict, proof.steps, proof.agreed) == (Verdict.PROVEN, 12, 4)


# --- against another run -----------------------------------------------------------------------------------------


def chain_of_worlds() -> list[RunRecords]:
    return [FakeRun("a", world=4).run(10).end(75), FakeRun("b", world=3, start=8).run(12).end()]


def test_every_step_of_a_chain_of_worlds_has_read_what_the_undisturbed_run_has() -> None:
    proof = prove(chain_of_worlds(), against=[FakeRun("whole", world=4).run(20).end()])
    assert (proof.verdict, proof.compared, proof.against) == (Verdict.PROVEN, 20, ["whole"])


def test_another_order_than_that_of_the_run_compared_with_is_found() -> None:
    proof = prove(chain_of_worlds(), against=[FakeRun("whole", order=OTHER).run(20).end()])
    assert proof.compared == 0
    assert proof.causes["other samples than compared"] == 20


def test_the_same_samples_in_another_grouping_of_the_same_set_are_the_same() -> None:
    whole = [SourceSpec("corpus", 24)]
    one, other = (msgspec.structs.replace(GLOBAL, sources=whole, shuffle=shuffle) for shuffle in (True, False))
    proof = prove([FakeRun(order=one).run(5).end()], against=[FakeRun("whole", order=other).run(5).end()])
    assert "other samples than compared" not in causes(proof), "a step is all of the data"


def test_other_content_under_the_same_addresses_is_found_where_shares_agree() -> None:
    perturbed = changed(FakeRun("whole").run(20).end(), at(5, 2, lambda c: with_data(c, digest="f" * 16)))
    proof = prove(chain_of_worlds(), against=[perturbed])
    assert [(f.cause, f.step, f.share, f.run) for f in proof.findings] == [("other content than compared", 5, 2, "a")]
    assert proof.compared == 19


def test_steps_that_only_one_of_the_runs_has_are_not_proven() -> None:
    proof = prove(chain_of_worlds(), against=[FakeRun("whole").run(17).end()])
    assert (proof.verdict, proof.reasons) == (Verdict.UNPROVEN, ["steps 17 to 19: only in these runs"])


def test_a_run_that_is_itself_wrong_is_nothing_to_compare_with() -> None:
    proof = prove(chain_of_worlds(), against=[changed(FakeRun("whole").run(20).end(), at(5, 1, gone))])
    assert proof.verdict is Verdict.UNPROVEN
    assert "itself wrong" in proof.reasons[0]


# --- the count of samples ----------------------------------------------------------------------------------------


def test_samples_read_again_and_left_out_are_counted() -> None:
    order = msgspec.structs.replace(GLOBAL, sources=[SourceSpec("corpus", 12)], global_batch=4)
    counts = SampleCounts(order, 2, whole=True)
    assert counts.add([(0, 1), (0, 2), (0, 3), (0, 4)]) == []
    (again,) = counts.add([(0, 3), (0, 4), (0, 5), (0, 6)])
    assert (again.cause, again.times) == ("sample repeated", 2)
    assert "sample 3 of corpus" in again.text
    (twice,) = counts.add([(0, 7), (0, 7), (0, 8), (0, 9)])
    assert (twice.cause, twice.times) == ("sample repeated", 1)
    (skipped,) = counts.add([(1, 0), (1, 1), (1, 2), (1, 3)])
    assert (skipped.cause, skipped.times) == ("sample skipped", 3)
    assert "without sample 0 and 2 others" in skipped.text
    (late,) = counts.add([(0, 0), (1, 4), (1, 5), (1, 6)])
    assert (late.cause, late.times) == ("sample repeated", 1)
    assert counts.epochs == 0


def test_samples_that_the_order_leaves_out_and_that_were_read_are_found() -> None:
    order = msgspec.structs.replace(GLOBAL, sources=[SourceSpec("corpus", 10)], global_batch=4, remainder="drop")
    counts = SampleCounts(order, 2, whole=True)
    counts.add([(0, index) for index in range(9)])
    (found,) = counts.add([(1, 0)])
    assert (found.cause, found.times) == ("sample repeated", 1)
    assert "1 samples that its order leaves out" in found.text


def test_samples_of_which_it_is_not_known_are_neither_missed_nor_counted() -> None:
    order = msgspec.structs.replace(GLOBAL, sources=[SourceSpec("corpus", 4)], global_batch=4)
    counts = SampleCounts(order, 2, whole=True)
    assert counts.add([(0, 0), (0, 1)], [(0, 2), (0, 3)]) == []
    assert counts.add([(1, index) for index in range(4)]) == []
    assert counts.end() == []
    assert (counts.read, counts.epochs) == (6, 2)


# --- any history -------------------------------------------------------------------------------------------------

worlds = st.integers(2, 5)
orders = st.builds(
    lambda size, batch, remainder, shuffle: OrderSpec(
        "ordered", 9, [SourceSpec("corpus", size)], global_batch=batch, shuffle=shuffle, remainder=remainder
    ),
    st.integers(24, 90),
    st.integers(5, 24),
    st.sampled_from(["keep", "drop", "wrap"]),
    st.booleans(),
)
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(1, 6)),
        st.tuples(st.just("kill"), st.integers(0, 4)),
        st.tuples(st.just("back"), st.integers(1, 5)),
        st.tuples(st.just("restart"), st.tuples(st.integers(0, 4), worlds)),
    ),
    max_size=12,
)


def told(order: OrderSpec, world: int, history: list[tuple[str, object]]) -> list[RunRecords]:
    """The runs of a history; the last one ends well."""
    runs: list[RunRecords] = []
    run = FakeRun("0", world=world, order=order).run(2)
    for what, how in history:
        if what == "run" and isinstance(how, int):
            run.run(how)
        elif what == "kill" and isinstance(how, int):
            run.kill_in_update(how % run.world)
        elif what == "back" and isinstance(how, int):
            run.form(max(run.step - how, 0))
        elif isinstance(how, tuple):
            back, world = how
            runs.append(run.end(75))
            run = FakeRun(str(len(runs)), world=world, order=order, start=max(run.step - back, 0))
    return [*runs, run.run(2).end()]


@settings(max_examples=150, deadline=None)
@given(orders, worlds, happenings)
def test_any_history_of_kills_returns_and_worlds_is_proven(
    order: OrderSpec, world: int, history: list[tuple[str, object]]
) -> None:
    runs = told(order, world, history)
    proof = prove(runs, against=[FakeRun("whole", world=3, order=order).run(_length(runs)).end()])
    assert (proof.verdict, proof.findings, proof.reasons) == (Verdict.PROVEN, [], [])
    assert proof.compared == proof.steps == _length(runs)


def _length(runs: list[RunRecords]) -> int:
    return len({commit.step for _, commit in _counted(runs)})


@settings(max_examples=150, deadline=None)
@given(orders, worlds, happenings, st.data())
def test_in_any_history_one_thing_that_is_wrong_is_found(
    order: OrderSpec, world: int, history: list[tuple[str, object]], data: st.DataObject
) -> None:
    runs = told(order, world, history)
    counted = _counted(runs)
    number, victim = data.draw(st.sampled_from(counted))
    assert victim.data is not None
    read_here = victim.data
    kind = data.draw(st.sampled_from(["gone", "samples", "content", "world", "share"]))
    if kind == "content":
        lines = [record for run in runs for record in run.records]
        twice = [(n, c) for n, c in counted if sum(_same_read(c, other) for other in lines) > 1]
        if not twice:
            return
        number, victim = data.draw(st.sampled_from(twice))

    def spoil(commit: StepCommitted) -> StepCommitted | None:
        if commit is not victim:
            return commit
        match kind:
            case "gone":
                return None
            case "samples":
                return with_data(commit, samples="f" * 16)
            case "content":
                return with_data(commit, digest="f" * 16)
            case "world":
                return with_data(commit, shares=read_here.shares + 1)
            case _:
                return with_data(commit, share=(read_here.share + 1) % read_here.shares)

    runs[number] = changed(runs[number], spoil)
    proof = prove(runs)
    # A line that is missing at the end of a run that was stopped may never have been written.
    assert proof.verdict is Verdict.WRONG or (proof.verdict is Verdict.UNPROVEN and kind == "gone")


def _counted(runs: list[RunRecords]) -> list[tuple[int, StepCommitted]]:
    """The lines that count, each with the number of its run: worked out from the last backwards."""
    found: dict[tuple[int, int], tuple[int, StepCommitted]] = {}
    for number, run in enumerate(runs):
        for record in run.records:
            if isinstance(record, GenerationFormed):
                found = {key: value for key, value in found.items() if key[0] < record.step}
            elif isinstance(record, StepCommitted):
                found[record.step, record.rank] = (number, record)
    return list(found.values())


def _same_read(commit: StepCommitted, other: object) -> bool:
    if not isinstance(other, StepCommitted) or commit.data is None or other.data is None:
        return False
    return (commit.step, commit.data.share, commit.data.shares) == (other.step, other.data.share, other.data.shares)


# --- which job, and what is printed ------------------------------------------------------------------------------


def test_a_folder_a_file_and_several_are_found(tmp_path: Path) -> None:
    a, b = (_written(run, tmp_path / run.name) for run in chain_of_worlds())
    assert verify(tmp_path, [str(a), str(b)], []).verdict is Verdict.PROVEN
    alone = verify(tmp_path, [str(b)], [])
    assert (alone.runs, alone.verdict, alone.first) == (["b"], Verdict.UNPROVEN, 8)
    merged = tmp_path / "all.jsonl"
    merged.write_bytes(b"".join((a / name).read_bytes() for name in ("events.jsonl", "steps.node0.jsonl")))
    assert verify(tmp_path, [str(merged)], []).verdict is Verdict.PROVEN
    assert verify(tmp_path, [str(a)], [str(a)]).compared == 10


def test_what_has_no_records_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="there are no records in .*empty"):
        verify(tmp_path, [str(tmp_path / "empty")], [])
    with pytest.raises(UsageError, match="there is no job 'nope'"):
        verify(tmp_path, ["nope"], [])


def test_the_lines_for_people_say_what_was_seen() -> None:
    lines = proof_lines(prove(chain_of_worlds(), against=[FakeRun("whole").run(20).end()]))
    assert lines == [
        "verdict   proven: a then b has read every sample of its order once",
        "steps     0 to 19",
        "worlds    4 (steps 0 to 7), 3 (steps 8 to 19)",
        "order     ordered, seed 3, batch 24 in all, remainder wrap, shuffled: corpus of 100",
        "samples   480 read, 0 repeated, 0 skipped; 4 epochs complete",
        "against   20 steps with the same samples as in whole",
    ]
    wrong = proof_lines(prove([changed(FakeRun().run(20).end(), at(7, 2, gone))]))
    assert wrong[0] == "verdict   wrong: job"
    assert wrong[-1] == (
        "wrong     step 7, share 2, rank 2, generation 1: share missing: rank 2 has no record of it, and others have"
    )


def test_the_proof_is_json_for_programs() -> None:
    encoded = json.loads(msgspec.json.encode(prove([changed(FakeRun().run(9).end(), at(7, 2, gone))])))
    assert (encoded["verdict"], encoded["steps"]) == ("wrong", 9)
    assert encoded["findings"][0]["step"] == 7


@pytest.mark.parametrize(("steps", "text"), [([3], "step 3"), ([3, 4, 5, 9], "steps 3 to 5, 9")])
def test_steps_are_told_as_spans(steps: list[int], text: str) -> None:
    assert spans(steps) == text


def test_an_order_that_cannot_be_is_a_finding_and_no_crash() -> None:
    run = FakeRun().run(4).end()
    bad = replace(run, records=[_declaring(r, msgspec.structs.replace(GLOBAL, global_batch=3)) for r in run.records])
    assert causes(prove([bad])) == {"impossible order"}

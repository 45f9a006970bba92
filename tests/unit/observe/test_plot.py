"""`regrow plot` shows the contents of the records, once each, however the run went."""

import builtins
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.observe.observe_records import FakeJob, commit

from regrow.cli import main
from regrow.core.errors import UsageError
from regrow.core.ids import Generation, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.process.extras import install_line
from regrow.core.records import (
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    Record,
    StepCommitted,
    WorkerSpawned,
    WorldChanged,
)
from regrow.launch.plotting import plot
from regrow.observe.plot_clocks import clock_shifts, on_one_clock
from regrow.observe.plot_drawing import render
from regrow.observe.plot_series import MOST_POINTS, MOST_WINDOWS, Axis, Kind, Picture, picture
from regrow.observe.reads import RunRecords
from regrow.observe.tail import read_run


class ElasticJob:
    """Writes the records of a job that starts at 100.0 and changes its size; a step takes a second, whatever the world.

    `tokens`: of each rank and step.
    """

    def __init__(self, world: int = 1, *, tokens: float = 0.0, samples: int = 0, start: float = 100.0) -> None:
        self.now, self.step, self.generation, self.incidents = start, 0, 1, 0
        self.tokens, self.samples = tokens, samples
        self.ranks = world
        self.events: list[Record] = [JobStarted(start, JobId("job"), world, 1, 0, ["train.py"])]
        self.commits: list[StepCommitted] = []
        self.now += 2.0
        self._form()

    def _form(self) -> None:
        workers = {str(rank): WorkerId(f"w{rank}") for rank in range(self.ranks)}
        self.events.append(GenerationFormed(self.now, Generation(self.generation), StepNo(self.step), workers))

    def run(self, steps: int, *, losses: Sequence[float] = (), seconds: float = 1.0) -> "ElasticJob":
        for number in range(steps):
            self.now += seconds
            for rank in range(self.ranks):
                metrics = {"loss": losses[number] if losses else 1.0 / (1 + self.step)}
                metrics |= {"tokens": self.tokens} if self.tokens else {}
                self.commits.append(
                    StepCommitted(
                        self.now,
                        StepNo(self.step),
                        Rank(rank),
                        WorkerId(f"w{rank}"),
                        Generation(self.generation),
                        seconds,
                        metrics,
                        self.samples,
                    )
                )
            self.step += 1
        return self

    def incident(self, kind: str, ranks: int | None = None, *, pause: float = 0.5, back: int = 0) -> "ElasticJob":
        """The world stands still for `pause`, may have another size after it, and goes `back` by some steps."""
        opened, before = self.now, self.ranks
        self.incidents += 1
        place = (Generation(self.generation), StepNo(self.step), kind, list[Rank](), "why")
        self.events.append(IncidentOpened(opened, self.incidents, *place))
        self.now += pause
        self.generation, self.step, self.ranks = self.generation + 1, self.step - back, ranks or self.ranks
        sizes = (before, self.ranks) if before != self.ranks else (0, 0)
        if before != self.ranks:
            change = (kind, before, self.ranks, "why")
            self.events.append(WorldChanged(self.now, Generation(self.generation), StepNo(self.step), *change))
        self._form()
        stages = (0.0, 0.0, 0.0, 0.0, 0.0, pause)
        self.events.append(
            IncidentClosed(self.now, self.incidents, *place, "fork", 1, *stages, back, 0, opened, opened, *sizes)
        )
        return self

    def end(self) -> "ElasticJob":
        self.events.append(JobEnded(self.now, 0, ""))
        return self

    @property
    def records(self) -> list[Record]:
        return sorted([*self.events, *self.commits], key=lambda record: record.at)

    def picture(self, axis: Axis = Axis.TIME, metric: str = "loss") -> Picture:
        return picture(RunRecords("job", self.records), axis=axis, metric=metric)

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        for name, records in (("events.jsonl", self.events), ("steps.node0.jsonl", self.commits)):
            (folder / name).write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        return folder


# --- world -------------------------------------------------------------------------------------------------------


def test_the_world_over_time_is_that_of_its_generations() -> None:
    job = ElasticJob(1).run(3).incident("grow", 4).run(2).incident("shrink", 3).run(1).end()
    shown = job.picture()
    assert (shown.world.edges, shown.world.values) == ([2.0, 5.5, 8.0, 9.0], [1, 4, 3])
    assert shown.world_unit == "replicas"


def test_the_world_over_steps_changes_at_the_first_step_of_a_generation() -> None:
    shown = ElasticJob(1).run(3).incident("grow", 4).run(2).end().picture(Axis.STEP)
    assert (shown.world.edges, shown.world.values) == ([0.0, 3.0, 5.0], [1, 4])


def test_ranks_that_make_up_a_replica_together_count_as_one() -> None:
    job = ElasticJob(2).run(2)
    job.incident("grow", 4).run(2).end()
    change = next(each for each in job.events if isinstance(each, WorldChanged))
    job.events[job.events.index(change)] = msgspec.structs.replace(change, before=1, after=2)
    shown = job.picture()
    assert (shown.world.values, shown.world_unit) == ([1, 2], "replicas")


def test_without_any_change_the_world_is_in_ranks() -> None:
    shown = ElasticJob(4).run(2).end().picture()
    assert (shown.world.values, shown.world_unit) == ([4], "ranks")


def test_a_fault_that_leaves_the_size_alone_is_no_edge_of_the_world() -> None:
    shown = ElasticJob(2).run(2).incident("exit").run(2).end().picture()
    assert shown.world.values == [2]


def test_records_of_steps_alone_tell_the_world_by_who_committed() -> None:
    job = ElasticJob(1).run(2).incident("grow", 3).run(2)
    shown = picture(RunRecords("steps", job.commits))
    assert shown.world.values == [1, 3]
    assert shown.world_unit == "ranks"
    assert shown.steps == 4
    assert shown.marks == []


# --- throughput --------------------------------------------------------------------------------------------------


def test_throughput_is_tokens_of_all_ranks_a_second_and_a_pause_is_part_of_its_step() -> None:
    shown = ElasticJob(1, tokens=8).run(2).incident("grow", 2, pause=3.0).run(2).end().picture()
    assert shown.rate_unit == "tokens"
    assert (shown.rate.edges, shown.rate.values) == ([2.0, 3.0, 4.0, 8.0, 9.0], [8.0, 8.0, 4.0, 16.0])


def test_without_tokens_it_is_samples_and_without_those_steps() -> None:
    assert ElasticJob(2, samples=4).run(2).end().picture().rate_unit == "samples"
    assert ElasticJob(2, samples=4).run(2).end().picture().rate.values == [8.0, 8.0]
    shown = ElasticJob(2).run(2, seconds=0.5).end().picture()
    assert (shown.rate_unit, shown.rate.values) == ("steps", [2.0, 2.0])


def test_steps_that_ran_again_count_where_they_counted() -> None:
    job = ElasticJob(1, tokens=6).run(3).incident("exit", pause=1.0, back=2).run(3).end()
    shown = job.picture()
    assert shown.steps == 4
    # Step 0 at 3 s; steps 1 and 2 were lost, so that step 1 has taken from then until 7 s.
    assert (shown.rate.edges, shown.rate.values) == ([2.0, 3.0, 7.0, 8.0, 9.0], [6.0, 1.5, 6.0, 6.0])
    assert shown.curve.x == [3.0, 7.0, 8.0, 9.0]


def test_the_area_under_the_throughput_is_all_that_was_done() -> None:
    job = ElasticJob(1, tokens=5).run(700).incident("grow", 4).run(900).incident("exit", pause=20).run(1).end()
    for axis in Axis:
        rate = job.picture(axis).rate
        assert len(rate.values) <= MOST_WINDOWS + 4
        if axis is Axis.TIME:
            area = sum(v * (b - a) for v, a, b in zip(rate.values, rate.edges, rate.edges[1:], strict=False))
            assert area == pytest.approx(5 * 700 + 20 * 901)


def test_windows_of_a_long_run_do_not_mix_worlds() -> None:
    shown = ElasticJob(1, tokens=1).run(1003).incident("grow", 4, pause=1e-9).run(1003).end().picture()
    assert {round(value, 6) for value in shown.rate.values} == {1.0, 4.0}


def test_what_a_rank_adopted_is_no_later_for_it() -> None:
    job = ElasticJob(2, tokens=1).run(1)
    job.commits += [commit(1, 0, 104.0), commit(1, 1, 109.0, adopted=True)]
    shown = job.picture()
    assert shown.rate.edges == [2.0, 3.0, 4.0]


# --- a metric ----------------------------------------------------------------------------------------------------


def test_the_curve_is_the_mean_over_ranks_at_the_time_of_the_commit() -> None:
    job = ElasticJob(2).run(1)
    job.commits += [commit(1, 0, 104.0, loss=2.0), commit(1, 1, 104.5, loss=4.0)]
    shown = job.picture()
    assert (shown.curve.x, shown.curve.mean) == ([3.0, 4.5], [1.0, 3.0])
    assert job.picture(Axis.STEP).curve.x == [0.0, 1.0]


def test_losses_that_are_no_numbers_leave_gaps_and_are_counted(tmp_path: Path) -> None:
    folder = ElasticJob(1).run(4, losses=[3.0, 7.5, 8.5, 2.0]).end().write(tmp_path / "run")
    lines = folder / "steps.node0.jsonl"
    lines.write_text(lines.read_text().replace("7.5", '"nan"').replace("8.5", '"inf"'))
    shown = picture(read_run(folder, "run"))
    assert [math.isfinite(value) for value in shown.curve.mean] == [True, False, False, True]
    assert shown.curve.gaps == [4.0, 5.0]
    assert shown.curve.mean[3] == 2.0


def test_a_long_curve_has_few_points_that_still_show_every_extreme() -> None:
    losses = [1.0] * 5000
    losses[1234], losses[4321], losses[77] = 9.0, -9.0, math.nan
    curve = ElasticJob(1).run(5000, losses=losses).end().picture().curve
    assert len(curve.x) <= MOST_POINTS
    assert curve.each == 9
    assert (max(curve.high), min(curve.low)) == (9.0, -9.0)
    assert all(math.isfinite(value) for value in curve.mean)
    assert len(curve.gaps) == 1


def test_another_metric_is_shown_by_name_and_steps_without_it_are_left_out() -> None:
    job = ElasticJob(1).run(3)
    job.commits[1].metrics["norm"] = 4.0
    shown = job.picture(metric="norm")
    assert (shown.metric, shown.curve.x, shown.curve.mean) == ("norm", [4.0], [4.0])
    assert shown.metrics == ["loss", "norm"]


# --- incidents ---------------------------------------------------------------------------------------------------


def test_every_incident_is_marked_with_kind_and_pause() -> None:
    job = ElasticJob(1).run(2).incident("grow", 2, pause=0.25).run(2).incident("hang", pause=1.5).run(1)
    job.incident("preempt", 1).run(1).incident("shrink", 1).end()
    marks = job.picture().marks
    assert [mark.kind for mark in marks] == [Kind.GROW, Kind.FAULT, Kind.PREEMPT, Kind.SHRINK]
    assert [mark.cause for mark in marks] == ["grow", "hang", "preempt", "shrink"]
    assert (marks[0].start, marks[0].end, marks[0].pause) == (4.0, 4.25, 0.25)
    assert (marks[0].before, marks[0].after, marks[1].before, marks[1].after) == (1, 2, 0, 0)
    assert [mark.start for mark in job.picture(Axis.STEP).marks] == [2.0, 4.0, 5.0, 6.0]


def test_an_incident_that_is_not_over_lasts_to_the_end_of_the_figure() -> None:
    job = ElasticJob(1).run(2)
    job.events.append(IncidentOpened(104.5, 1, Generation(1), StepNo(2), "node", [], "lost"))
    job.events.append(JobEnded(110.0, 75, "gone"))
    (mark,) = job.picture().marks
    assert (mark.kind, mark.start, mark.end, mark.pause) == (Kind.FAULT, 4.5, 10.0, None)


# --- runs of all kinds -------------------------------------------------------------------------------------------


def test_a_job_in_which_nothing_has_run_gives_an_empty_picture() -> None:
    for records in ([], [JobStarted(5.0, JobId("job"), 2, 1, 0, [])]):
        for axis in Axis:
            shown = picture(RunRecords("job", records), axis=axis)
            assert (shown.steps, shown.world.values, shown.rate.values, shown.curve.x, shown.marks) == (
                0,
                [],
                [],
                [],
                [],
            )
            assert render(shown, "png").startswith(b"\x89PNG")


def test_a_job_that_was_resumed_begins_at_its_first_step() -> None:
    job = ElasticJob(1)
    job.step, job.events[1] = 500, GenerationFormed(102.0, Generation(1), StepNo(500), {"0": WorkerId("w0")})
    shown = job.run(3).end().picture(Axis.STEP)
    assert shown.rate.edges == [500.0, 501.0, 502.0, 503.0]
    assert shown.world.edges == [500.0, 503.0]


def test_a_torn_line_is_left_out_and_a_step_told_in_part_is_counted(tmp_path: Path) -> None:
    folder = ElasticJob(2, tokens=4).run(5).end().write(tmp_path / "run")
    lines = folder / "steps.node0.jsonl"
    text = lines.read_bytes()
    lines.write_bytes(text[:-30])
    shown = picture(read_run(folder, "run"))
    assert (shown.steps, shown.partial) == (5, 1)
    assert shown.rate.values == [8.0, 8.0, 8.0, 8.0, 4.0]


def test_records_of_machines_with_other_clocks_are_put_on_that_of_the_coordinator(tmp_path: Path) -> None:
    job = ElasticJob(2, tokens=4).run(5).end()
    job.events += [
        WorkerSpawned(100.0, WorkerId(f"w{rank}"), NodeId(f"node{rank}"), "rank", Rank(rank), Generation(1))
        for rank in range(2)
    ]
    wanted = job.picture()
    folder = tmp_path / "run"
    folder.mkdir()

    def write(name: str, records: Sequence[Record], ahead: float) -> None:
        lines = [msgspec.to_builtins(each) | {"at": each.at + ahead, "time": each.at + 5e8 + 0.1} for each in records]
        (folder / name).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    write("events.jsonl", job.events, 0.0)
    for rank, ahead in ((0, 0.0), (1, -70_000.0)):
        write(f"steps.node{rank}.jsonl", [each for each in job.commits if each.rank == rank], ahead)
    shifts = clock_shifts(folder)
    assert shifts == {"node1": pytest.approx(70_000.0)}
    run = read_run(folder, "job")
    shown = picture(RunRecords("job", on_one_clock(run.records, shifts)))
    assert shown.rate.edges == pytest.approx(wanted.rate.edges)
    assert shown.rate.values == pytest.approx(wanted.rate.values)
    assert plot(tmp_path, str(folder), out=None, axis=Axis.TIME, metric="loss")
    assert "5 steps in 7.0" in (folder / "plot.svg").read_text()


def test_the_story_of_a_real_kill_draws_as_one_fault() -> None:
    shown = picture(RunRecords("job", FakeJob().run(12, {5: 2})))
    assert [mark.kind for mark in shown.marks] == [Kind.FAULT]
    assert shown.steps == 12


# --- the figure --------------------------------------------------------------------------------------------------


def _words(svg: bytes) -> str:
    return re.sub(r"<[^>]+>", " ", svg.decode())


def test_the_figure_names_its_units_and_each_kind_of_incident_with_its_pause() -> None:
    job = ElasticJob(1, tokens=8).run(9).incident("grow", 2, pause=0.25).run(9).incident("exit", pause=1.5).run(9)
    svg = render(job.incident("shrink", 1, pause=0.125).run(3).end().picture(), "svg")
    words = _words(svg)
    for word in ("(replicas)", "(tokens/s)", "loss", "time since the start (s)", "30 steps in", "grow, 0.25 s"):
        assert word in words, word
    assert "fault, 1.50 s" in words
    assert "shrink, 0.12 s" in words
    dashes = set(re.findall(r"stroke-dasharray: ([^;\"]+)", svg.decode()))
    assert len(dashes) >= 2, "kinds can be told apart without colour"


def test_figures_of_the_same_records_are_the_same_file() -> None:
    shown = ElasticJob(1).run(9).end().picture()
    assert render(shown, "svg") == render(shown, "svg")


def test_pauses_are_written_above_all_incidents_or_above_none() -> None:
    few, many = ElasticJob(1).run(9), ElasticJob(1).run(9)
    for number in range(60):
        many.incident("grow" if number % 2 == 0 else "shrink", 2 - number % 2, pause=0.375).run(3)
    few.incident("grow", 2, pause=0.375).run(9)
    assert _words(render(few.end().picture(), "svg")).count("0.38 s") == 2  # and in the legend
    assert _words(render(many.end().picture(), "svg")).count("0.38 s") == 2  # in the legend alone


@pytest.mark.parametrize("axis", list(Axis))
def test_a_long_run_and_a_run_of_one_step_are_drawn(axis: Axis) -> None:
    for job in (ElasticJob(4, tokens=1).run(3000), ElasticJob(1).run(1), ElasticJob(1).run(2, losses=[math.nan] * 2)):
        assert len(render(job.end().picture(axis), "png")) > 10_000


# --- the command -------------------------------------------------------------------------------------------------


def test_both_files_are_written_beside_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ElasticJob(1).run(3).end().write(tmp_path / "run")
    assert main(["plot", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / "plot.png"), str(folder / "plot.svg")]
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "plot.svg").read_bytes()
    assert main(["plot", str(folder / "steps.node0.jsonl"), "--x", "step", "--out", str(tmp_path / "a.svg")]) == 0
    assert b">step<" in (tmp_path / "a.svg").read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "figure.pdf"], "end it in .png or .svg"),
        (["--out", "nowhere/figure.png"], "cannot be written"),
        (["--metric", "norm"], "there are: loss"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = ElasticJob(1).run(3).end().write(tmp_path / "run")
    assert main(["plot", str(folder), *words]) == 2
    assert said in capsys.readouterr().err


def test_where_matplotlib_is_missing_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ElasticJob(1).run(3).end().write(tmp_path / "run")
    usual = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return usual(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=re.escape(install_line("plot"))):
        plot(tmp_path, str(folder), out=None, axis=Axis.TIME, metric="loss")

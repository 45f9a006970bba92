from regrow.agent.watch import Sight, Watcher, decide
from regrow.core.board import Phase, Reading
from regrow.core.ids import WorkerId


def sight(worker: str, *, since: float = 0.0, step: int = 7, calls: int = 0, phase: Phase = Phase.COMPUTING) -> Sight:
    return Sight(WorkerId(worker), Reading(beats=1, step=step, calls=calls, generation=1, phase=phase), since)


def culprits(*sights: Sight, now: float = 100.0) -> list[str]:
    return [found.worker for found in decide(sights, bound=30.0, now=now)]


def test_whoever_issued_the_fewest_collectives_keeps_the_others_waiting() -> None:
    assert culprits(sight("a", calls=4), sight("b", calls=3), sight("c", calls=4)) == ["b"]


def test_whoever_is_a_step_behind_is_the_culprit_though_it_issued_more_collectives() -> None:
    assert culprits(sight("a", step=8, calls=1), sight("b", step=7, calls=9)) == ["b"]


def test_nobody_hangs_within_the_bound() -> None:
    assert culprits(sight("a", since=80.0), sight("b", since=75.0)) == []


def test_a_waiting_worker_is_not_blamed_while_the_one_it_waits_for_still_moves() -> None:
    assert culprits(sight("a", calls=4), sight("b", calls=3, since=95.0)) == []


def test_a_worker_that_evaluates_between_steps_is_waited_for() -> None:
    assert culprits(sight("a", step=8), sight("b", step=7, phase=Phase.OUTSIDE)) == []


def test_workers_that_recover_or_build_are_not_watched() -> None:
    assert (
        culprits(*(sight(phase.name, phase=phase) for phase in (Phase.BUILDING, Phase.RECOVERING, Phase.WAITING))) == []
    )


def test_a_stopped_process_is_the_culprit_though_it_is_ahead() -> None:
    stopped = sight("a", calls=9)._replace(stopped=True)
    assert culprits(stopped, sight("b", calls=1)) == ["a"]


def test_a_process_that_is_stopped_while_it_receives_state_hangs() -> None:
    stopped = sight("a", phase=Phase.RECOVERING)._replace(stopped=True)
    assert culprits(stopped, sight("b", calls=1)) == ["a"]
    assert culprits(stopped._replace(since=80.0)) == []


def test_all_that_are_equally_far_behind_are_named() -> None:
    assert culprits(sight("a", calls=3), sight("b", calls=3), sight("c", calls=4)) == ["a", "b"]


def test_a_standstill_is_told_again_after_every_further_bound() -> None:
    watcher = Watcher(timeout=10.0)
    reading = Reading(beats=5, step=3, calls=2, generation=1, phase=Phase.DATA)
    told = []
    for now in (0.0, 11.0, 15.0, 20.5, 21.0, 22.0, 30.9, 31.5):
        told += [now for _ in watcher.news(watcher.look({WorkerId("a"): reading}, now), now)]
    assert told == [11.0, 21.0, 31.5]


def test_a_standstill_is_told_once_and_again_after_it_moved() -> None:
    watcher = Watcher(timeout=10.0)
    reading = Reading(beats=5, step=3, calls=2, generation=1, phase=Phase.DATA)
    moved = reading._replace(beats=6)
    worker = WorkerId("a")
    told = []
    for now, shown in ((0.0, reading), (11.0, reading), (12.0, reading), (13.0, moved), (24.0, moved)):
        told.append([fact.step for fact in watcher.news(watcher.look({worker: shown}, now), now)])
    assert told == [[], [3], [], [], [3]]


def test_the_bound_follows_the_longest_recent_step_but_not_below_half_a_minute() -> None:
    watcher = Watcher(timeout=None)
    assert watcher.bound == 30.0
    watcher.step_took(8.0)
    assert watcher.bound == 80.0
    for _ in range(50):
        watcher.step_took(0.1)
    assert watcher.bound == 30.0


def test_what_is_told_says_where_and_for_how_long() -> None:
    watcher = Watcher(timeout=10.0)
    reading = Reading(beats=5, step=3, calls=2, generation=4, phase=Phase.UPDATING)
    watcher.look({WorkerId("a"): reading}, 0.0)
    (fact,) = watcher.news(watcher.look({WorkerId("a"): reading}, 12.0), 12.0)
    assert (fact.generation, fact.seconds, fact.bound) == (4, 12.0, 10.0)
    assert "updating of step 3, after 2 collectives" in fact.detail

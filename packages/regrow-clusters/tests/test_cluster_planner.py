"""The planner's laws, in clusters that do anything: machines come and go, people ask for sizes, replicas are stuck."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster.planned_cluster import PlannedCluster

from regrow_clusters.cluster.actions import DrainReplica, PlannedAction, ReleaseReplica, StartGang, StartReplica
from regrow_clusters.cluster.observed import AvoidedNode, JobSeen, JobStage, ReplicaSeen, ReplicaStage
from regrow_clusters.cluster.planner import granted_after, next_look, plan
from regrow_clusters.cluster.sizes import ElasticSpec, allowed_sizes, next_size, problems, wanted_size

R = ReplicaStage
PAIR = ElasticSpec(replica_count=2, max_replica_count=5)


def seen(*stages: ReplicaStage | None, job: JobStage = JobStage.TRAINING, granted: int = 0, at: float = 0.0) -> JobSeen:
    """A job with a replica at each place that has a stage; what has ended or is lost is safe."""
    replicas = [
        ReplicaSeen(
            f"r{place}", place, stage, at, (f"node{place}",), safe_at=at if stage in (R.LOST, R.ENDED) else None
        )
        for place, stage in enumerate(stages)
        if stage is not None
    ]
    return JobSeen(job, tuple(replicas), granted=granted or len(replicas))


@st.composite
def specs(draw: st.DrawFn) -> ElasticSpec:
    low = draw(st.integers(1, 4))
    high = low + draw(st.integers(0, 5))
    discrete: tuple[int, ...] = ()
    if draw(st.booleans()):
        discrete = tuple(sorted({low, *draw(st.sets(st.integers(low, high)))}))
    return ElasticSpec(
        replica_count=low,
        max_replica_count=high,
        replicas=draw(st.none() | st.integers(low, high)),
        replica_increment_step=1 if discrete else draw(st.integers(1, 3)),
        replica_discrete_values=discrete,
        max_pending_replicas=draw(st.integers(1, 3)),
    )


@st.composite
def observations(draw: st.DrawFn, spec: ElasticSpec) -> JobSeen:
    """Any state of a job, also those that nobody should have brought about: doubles, places beyond the maximum's."""
    replicas = []
    for number in range(draw(st.integers(0, spec.max_replica_count + 2))):
        stage = draw(st.sampled_from(R))
        safe = draw(st.none() | st.floats(0.0, 200.0)) if stage in (R.LEAVING, R.LOST, R.ENDED) else None
        replicas.append(
            ReplicaSeen(
                f"r{number}",
                draw(st.integers(0, spec.max_replica_count - 1)),
                stage,
                draw(st.floats(0.0, 100.0)),
                (f"node{number}",) if stage is not R.QUEUED else (),
                leave_by=100.0 if stage is R.LEAVING else None,
                safe_at=safe,
                to_blame=draw(st.booleans()),
                avoids=tuple(f"node{n}" for n in draw(st.sets(st.integers(0, 7)))) if stage is R.QUEUED else (),
            )
        )
    return JobSeen(
        draw(st.sampled_from(JobStage)),
        tuple(replicas),
        granted=draw(st.integers(0, spec.max_replica_count)),
        changed_at=draw(st.none() | st.floats(0.0, 100.0)),
        retry_at=draw(st.sampled_from([0.0, 150.0])),
        bad_nodes=tuple(AvoidedNode(f"node{n}", 120.0, leave=n % 2 == 0) for n in draw(st.sets(st.integers(0, 5)))),
    )


def check_laws(spec: ElasticSpec, observed: JobSeen, actions: list[PlannedAction]) -> None:
    """Check the laws that hold for any answer to any observation."""
    by_name = {each.name: each for each in observed.replicas}
    released = [each.name for each in actions if isinstance(each, ReleaseReplica)]
    drained = [each.name for each in actions if isinstance(each, DrainReplica)]
    started = [place for each in actions if isinstance(each, StartGang) for place in each.places]
    started += [each.place for each in actions if isinstance(each, StartReplica)]
    assert max(Counter([*released, *drained]).values(), default=0) <= 1
    assert all(by_name[name].safe_at is not None for name in released), "released before it was fenced"
    assert all(by_name[name].counts for name in drained), "asked to leave what leaves already"
    held = {each.place for each in observed.replicas if each.name not in released}
    assert not held & set(started) and len(set(started)) == len(started), "two for one place"
    assert all(0 <= place < spec.max_replica_count for place in started)
    if observed.stage is JobStage.TRAINING:
        here = [each for each in observed.replicas if each.stage is R.RUNNING]
        places = {each.place for each in here}
        left = {each.place for each in here if each.name not in drained}
        moved = [each for each in actions if isinstance(each, DrainReplica) and " is bad: " in each.reason]
        assert len(moved) <= 1 and all(by_name[each.name].place > 0 for each in moved)
        assert not moved or (len(here) > spec.replica_count and not any(each.waits for each in observed.replicas))
        assert len(left) >= min(len(places), spec.replica_count), "below the minimum by its own choice"
        assert len(left) + len(moved) >= min(len(places), wanted_size(spec)), "who runs is sent away for one that waits"
    anew = [by_name[each.name] for each in actions if isinstance(each, DrainReplica) and "kept away" in each.reason]
    assert all(each.stage is R.QUEUED and each.avoids for each in anew), "who has machines is asked for again"
    if observed.stage in (JobStage.OVER, JobStage.STOPPED, JobStage.BROKEN):
        assert not started


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_whatever_is_observed_the_answer_keeps_the_laws(data: st.DataObject) -> None:
    spec = data.draw(specs())
    observed = data.draw(observations(spec))
    now = data.draw(st.floats(0.0, 1000.0))
    assert problems(spec) == []
    actions = plan(spec, observed, now)
    check_laws(spec, observed, actions)
    assert plan(spec, observed, now) == actions
    assert spec.replica_count <= granted_after(spec, observed, actions) <= spec.max_replica_count


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_from_any_state_it_comes_to_the_wanted_size_and_then_does_nothing(data: st.DataObject) -> None:
    spec = data.draw(specs())
    cluster = PlannedCluster(spec, data.draw(observations(spec)), machines=spec.max_replica_count + 2)
    cluster.stage = data.draw(st.sampled_from([JobStage.NEW, JobStage.TRAINING, JobStage.BROKEN, JobStage.STOPPED]))
    cluster.settle(check_laws)
    assert len(cluster.replicas) == (0 if cluster.stage is JobStage.STOPPED else wanted_size(spec))
    assert all(each.stage is R.RUNNING for each in cluster.replicas.values())
    assert plan(spec, cluster.observe(), cluster.now) == []
    assert next_look(spec, cluster.observe(), cluster.now + 1000.0) is None


@pytest.mark.parametrize("seed", range(25))
def test_a_cluster_that_does_anything_keeps_the_laws_and_comes_to_rest(seed: int) -> None:
    chance = random.Random(seed)
    low = chance.randint(1, 3)
    spec = ElasticSpec(replica_count=low, max_replica_count=low + chance.randint(0, 4), max_pending_replicas=2)
    cluster = PlannedCluster(spec, JobSeen(JobStage.NEW), machines=chance.randint(low, low + 5))
    for _ in range(60):
        cluster.happen(chance)
        cluster.round(check_laws)
    cluster.machines = spec.max_replica_count + 2
    cluster.settle(check_laws)
    assert len(cluster.replicas) == wanted_size(cluster.spec)


def test_a_gang_is_started_whole_and_only_once() -> None:
    first = plan(PAIR, JobSeen(JobStage.NEW), 0.0)
    assert first == [StartGang((0, 1))]
    assert plan(PAIR, seen(R.QUEUED, R.QUEUED, job=JobStage.NEW), 1.0) == []


def test_a_gang_of_which_a_part_waits_for_machines_gives_them_back_in_time() -> None:
    half = seen(R.RUNNING, R.QUEUED, job=JobStage.NEW)
    assert plan(PAIR, half, 299.0) == []
    assert next_look(PAIR, half, 299.0) == 300.0
    assert [type(each) for each in plan(PAIR, half, 300.0)] == [DrainReplica, DrainReplica]


def test_one_replica_waits_at_a_time_and_the_next_one_only_after_the_snooze() -> None:
    assert plan(PAIR, seen(R.RUNNING, R.RUNNING), 0.0) == [StartReplica(2, replacement=False)]
    assert plan(PAIR, seen(R.RUNNING, R.RUNNING, R.QUEUED), 100.0) == []
    grown = msgspec.structs.replace(seen(R.RUNNING, R.RUNNING, R.RUNNING), changed_at=100.0)
    assert plan(PAIR, grown, 129.0) == []
    assert next_look(PAIR, grown, 129.0) == 130.0
    assert plan(PAIR, grown, 130.0) == [StartReplica(3, replacement=False)]


def test_a_lost_one_is_replaced_at_once_elsewhere_however_much_has_just_changed() -> None:
    lost = msgspec.structs.replace(seen(R.RUNNING, R.RUNNING, R.RUNNING), changed_at=100.0)
    gone = msgspec.structs.replace(lost.replicas[2], stage=R.LOST, safe_at=100.0, to_blame=True)
    lost = msgspec.structs.replace(lost, replicas=(*lost.replicas[:2], gone))
    assert plan(PAIR, lost, 100.0) == [
        ReleaseReplica("r2", "lost", ("node2",)),
        StartReplica(2, replacement=True, avoid=("node2",)),
    ]


def test_a_place_is_filled_again_only_when_nothing_of_the_lost_one_can_run() -> None:
    lost = ReplicaSeen("r1", 1, R.LOST, 50.0, ("node1",), safe_at=80.0, to_blame=True)
    observed = JobSeen(JobStage.TRAINING, (seen(R.RUNNING).replicas[0], lost), granted=2, changed_at=50.0)
    assert plan(PAIR, observed, 60.0) == [StartReplica(2, replacement=True, avoid=("node1",))]  # another stands in
    assert next_look(PAIR, observed, 60.0) == 80.0
    assert plan(PAIR, observed, 80.0)[:2] == [
        ReleaseReplica("r1", "lost", ("node1",)),
        StartReplica(1, replacement=True, avoid=("node1",)),
    ]


def test_bad_nodes_are_avoided_until_their_time_is_over() -> None:
    observed = msgspec.structs.replace(seen(R.RUNNING, R.RUNNING), bad_nodes=(AvoidedNode("node7", 10.0),))
    assert plan(PAIR, observed, 9.0) == [StartReplica(2, replacement=False, avoid=("node7",))]
    assert plan(PAIR, observed, 10.0) == [StartReplica(2, replacement=False)]


def waiting(*avoids: str, until: float, job: JobStage = JobStage.TRAINING) -> JobSeen:
    """A pair of which the second waits, kept away from machines; nothing is known of node7 from a time on."""
    last = ReplicaSeen("r1", 1, R.QUEUED, 5.0, avoids=avoids)
    return JobSeen(
        job, (*seen(R.RUNNING).replicas, last), granted=2, changed_at=5.0, bad_nodes=(AvoidedNode("node7", until),)
    )


def test_who_waits_is_asked_for_again_as_soon_as_nothing_is_known_of_a_machine_that_it_avoids() -> None:
    pair = ElasticSpec(2, 2)
    observed = waiting("node7", until=10.0)
    assert (plan(pair, observed, 9.0), next_look(pair, observed, 9.0)) == ([], 10.0)
    (drain,) = plan(pair, observed, 10.0)
    assert isinstance(drain, DrainReplica) and (drain.name, drain.within, drain.blame) == ("r1", 0.0, ())
    assert granted_after(pair, observed, [drain]) == 2
    left = msgspec.structs.replace(observed, replicas=observed.replicas[:1])
    assert plan(pair, left, 10.0) == [StartReplica(1, replacement=True)], "at once, whatever has just changed"
    assert plan(pair, msgspec.structs.replace(observed, retry_at=20.0), 10.0) == [], "nothing is started before"


def test_who_waits_to_grow_is_asked_for_again_at_its_place_and_nobody_else_in_its_stead() -> None:
    wish = ReplicaSeen("r2", 2, R.QUEUED, 5.0, avoids=("node7",))
    pair = seen(R.RUNNING, R.RUNNING)
    observed = msgspec.structs.replace(pair, replicas=(*pair.replicas, wish), granted=3, changed_at=5.0)
    assert [type(each) for each in plan(PAIR, observed, 6.0)] == [DrainReplica]
    left = msgspec.structs.replace(pair, granted=3, changed_at=5.0)
    assert plan(PAIR, left, 6.0) == [StartReplica(2, replacement=True)], "no growth, which would have to wait"


def test_a_gang_that_waits_is_asked_for_again_in_the_places_that_avoid_too_much() -> None:
    observed = waiting("node3", "node7", until=10.0, job=JobStage.NEW)
    assert [each.name for each in plan(PAIR, observed, 5.0) if isinstance(each, DrainReplica)] == ["r1"]
    left = msgspec.structs.replace(observed, replicas=observed.replicas[:1])
    assert plan(PAIR, left, 5.0) == [StartGang((1,), ("node7",))]


def test_who_runs_on_a_bad_node_moves_one_at_a_time_where_the_gang_is_whole_without_it() -> None:
    bad = tuple(AvoidedNode(f"node{n}", 100.0, "xid 79", leave=True) for n in range(5))
    whole = msgspec.structs.replace(seen(R.RUNNING, R.RUNNING, R.RUNNING, R.RUNNING, R.RUNNING), bad_nodes=bad)
    assert plan(PAIR, whole, 0.0) == [DrainReplica("r4", 60.0, "node4 is bad: xid 79")]
    assert plan(PAIR, whole, 100.0) == [], "its time is over"
    only_avoided = tuple(msgspec.structs.replace(each, leave=False) for each in bad)
    assert plan(PAIR, msgspec.structs.replace(whole, bad_nodes=only_avoided), 0.0) == []
    for stage in (R.QUEUED, R.STARTING, R.LEAVING):  # another one is on its way, and may find no room
        assert not drains(seen(R.RUNNING, R.RUNNING, R.RUNNING, R.RUNNING, stage), bad)
    assert not drains(msgspec.structs.replace(whole, changed_at=0.0), bad), "it has just changed"
    coordinators = bad[:1]
    assert not drains(whole, coordinators), "the coordinator stays where it is"
    assert not drains(seen(R.RUNNING, R.RUNNING), bad), "the gang is whole and no more"
    assert drains(seen(R.RUNNING, R.RUNNING, R.RUNNING), bad[1:2]) == ["r1"], "one beyond the gang stands in"


def drains(observed: JobSeen, bad: tuple[AvoidedNode, ...]) -> list[str]:
    actions = plan(PAIR, msgspec.structs.replace(observed, bad_nodes=bad), 1.0)
    return [each.name for each in actions if isinstance(each, DrainReplica)]


def test_fewer_are_wanted_the_waiting_and_the_last_leave_first_and_the_gang_stays() -> None:
    asked = msgspec.structs.replace(PAIR, replicas=2)
    actions = plan(asked, seen(R.RUNNING, R.RUNNING, R.RUNNING, R.RUNNING, R.QUEUED), 0.0)
    assert [(each.name, each.within) for each in actions if isinstance(each, DrainReplica)] == [
        ("r4", 0.0),
        ("r3", 60.0),
        ("r2", 60.0),
    ]
    assert len(actions) == 3


def test_who_stands_in_for_a_lost_one_of_the_gang_stays_until_that_runs_again() -> None:
    asked = msgspec.structs.replace(PAIR, replicas=2)
    assert plan(asked, seen(R.RUNNING, R.QUEUED, R.RUNNING), 0.0) == []
    assert [type(each) for each in plan(asked, seen(R.RUNNING, R.RUNNING, R.RUNNING), 0.0)] == [DrainReplica]


def test_scaled_down_while_one_of_the_gang_waits_as_many_run_as_are_wanted() -> None:
    asked = msgspec.structs.replace(PAIR, replicas=3)
    assert plan(asked, seen(R.RUNNING, R.QUEUED, R.RUNNING, R.RUNNING), 0.0) == []
    five = plan(asked, seen(R.RUNNING, R.QUEUED, R.RUNNING, R.RUNNING, R.RUNNING), 0.0)
    assert [each.name for each in five if isinstance(each, DrainReplica)] == ["r4"] and len(five) == 1
    back = plan(asked, seen(R.RUNNING, R.RUNNING, R.RUNNING, R.RUNNING), 0.0)
    assert [each.name for each in back if isinstance(each, DrainReplica)] == ["r3"]


def test_who_has_machines_and_does_not_run_gives_them_back_and_they_are_avoided() -> None:
    stuck = seen(R.RUNNING, R.RUNNING, R.STARTING)
    assert plan(PAIR, stuck, 299.0) == []
    assert plan(PAIR, stuck, 300.0) == [
        DrainReplica("r2", 0.0, "it did not run within 300 s", ("node2",)),
        StartReplica(3, replacement=True, avoid=("node2",)),
    ]


def test_after_failures_nothing_is_started_before_its_time() -> None:
    failing = msgspec.structs.replace(seen(R.RUNNING, R.ENDED), retry_at=40.0)
    assert plan(PAIR, failing, 39.0) == [ReleaseReplica("r1", "ended")]
    assert StartReplica(1, replacement=True) in plan(PAIR, failing, 40.0)


def test_a_job_that_is_over_keeps_what_has_ended_and_sends_the_others_away() -> None:
    actions = plan(PAIR, seen(R.ENDED, R.RUNNING, job=JobStage.OVER), 0.0)
    assert actions == [DrainReplica("r1", 60.0, "the job is over")]


def test_steps_and_discrete_values_say_which_sizes_there_are() -> None:
    stepped = ElasticSpec(replica_count=2, max_replica_count=9, replica_increment_step=3)
    assert (allowed_sizes(stepped), wanted_size(stepped), next_size(stepped, 2)) == ([2, 5, 8], 8, 5)
    assert [type(each) for each in plan(stepped, seen(R.RUNNING, R.RUNNING), 0.0)] == [StartReplica] * 3
    chosen = ElasticSpec(replica_count=2, max_replica_count=8, replica_discrete_values=(2, 4, 8), replicas=7)
    assert (wanted_size(chosen), next_size(chosen, 4)) == (4, 4)


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("replicaCount", ElasticSpec(replica_count=0, max_replica_count=1)),
        ("maxReplicaCount", ElasticSpec(replica_count=3, max_replica_count=2)),
        ("maxReplicaCount", ElasticSpec(replica_count=1, max_replica_count=5000)),
        ("replicas", ElasticSpec(replica_count=2, max_replica_count=4, replicas=5)),
        ("replicaIncrementStep", ElasticSpec(replica_count=2, max_replica_count=4, replica_increment_step=0)),
        ("replicaDiscreteValues", ElasticSpec(replica_count=2, max_replica_count=4, replica_discrete_values=(3, 4))),
        ("replicaDiscreteValues", ElasticSpec(replica_count=2, max_replica_count=4, replica_discrete_values=(2, 9))),
        ("replicaDiscreteValues", ElasticSpec(replica_count=2, max_replica_count=4, replica_discrete_values=(2, 2))),
        ("maxPendingReplicas", ElasticSpec(replica_count=2, max_replica_count=4, max_pending_replicas=0)),
        ("scalingTimeoutInSeconds", ElasticSpec(replica_count=2, max_replica_count=4, scaling_timeout_in_seconds=-1.0)),
    ],
)
def test_impossible_sizes_are_named_with_their_field_and_cure(field: str, spec: ElasticSpec) -> None:
    found = problems(spec)
    assert [each.field for each in found] == [field]
    assert found[0].message


@pytest.mark.parametrize("at", [98.72460865443988, 1_800_000_000.123457])
def test_at_the_moment_that_was_named_there_is_something_to_do_however_times_are_rounded(at: float) -> None:
    spec = ElasticSpec(1, 2)
    running = JobSeen(JobStage.TRAINING, (ReplicaSeen("a", 0, R.RUNNING, 0.0),), granted=1, changed_at=at)
    assert plan(spec, running, at) == []
    named = next_look(spec, running, at)
    assert named is not None and started_places(plan(spec, running, named)) == [1]
    stuck = ReplicaSeen("b", 1, R.STARTING, at, ("n1",))
    waiting = JobSeen(JobStage.TRAINING, (*running.replicas, stuck), granted=2, changed_at=0.0)
    named = next_look(spec, waiting, at)
    assert named is not None and any(isinstance(each, DrainReplica) for each in plan(spec, waiting, named))


def started_places(actions: list[PlannedAction]) -> list[int]:
    return [each.place for each in actions if isinstance(each, StartReplica)]

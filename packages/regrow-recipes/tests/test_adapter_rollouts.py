"""Prompts, completions and refusals of trainers that generate in their step."""

import copy
import operator
import random
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from regrow.core.errors import UsageError
from regrow.core.ids import Rank, StepNo
from regrow.hydration.copies.segment import Segment
from regrow.hydration.durable.snapshot import SegmentSource, take
from regrow.train.state.protected import ProtectedState
from regrow_recipes.adapters import private_trl
from regrow_recipes.adapters.trainer.prompts import Prompts
from regrow_recipes.adapters.trainer.rollouts import Rollouts, packed, unpacked

WORLD, ACCUMULATED, PER_GENERATION, ITERATIONS, SIZE = 2, 2, 4, 2, 3


def loader(rows: int = 9, per_generation: int = PER_GENERATION) -> Any:
    """As `GRPOTrainer.get_train_dataloader` makes it, of 4 completions a prompt, before accelerate has it."""
    trl = pytest.importorskip("trl.trainer.utils")
    sampler = trl.RepeatSampler(
        range(rows),
        mini_repeat_count=4,
        batch_size=SIZE * WORLD * per_generation // 4,
        repeat_count=ITERATIONS * per_generation,
        seed=3,
    )
    return DataLoader(list(range(rows)), batch_size=SIZE * per_generation, sampler=sampler, collate_fn=list)  # type: ignore[arg-type]


def test_each_rank_has_the_prompts_that_accelerate_deals_to_it_in_every_epoch() -> None:
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    dealt: list[list[list[int]]] = []
    for rank in range(WORLD):
        part = shard(loader(20).batch_sampler, WORLD, rank)
        dealt.append([batch for _ in range(2) for batch in part])
    half = len(dealt[0]) // 2
    assert dealt[0][:half] != dealt[0][half:]
    prompts = Prompts(loader(20), accumulated=ACCUMULATED, world=WORLD)
    for at in reversed(range(len(dealt[0]))):  # as who runs a step again, or comes in late
        step, micro = divmod(at, ACCUMULATED)
        for rank in range(WORLD):
            assert prompts(step, rank * ACCUMULATED + micro) == dealt[rank][at], (at, rank)


def test_orders_and_epochs_that_no_step_can_have_are_refused() -> None:
    plain: Any = DataLoader(list(range(9)), sampler=RandomSampler(range(9)))  # type: ignore[arg-type]
    for given, text in [
        (plain, "RandomSampler"),
        (loader(5), "5 prompts, and a generation needs 6"),
        (loader(9, per_generation=1), "prompts of two epochs"),
    ]:
        with pytest.raises(UsageError, match=text):
            Prompts(given, accumulated=5, world=WORLD)


def test_completions_come_back_with_their_exact_bits() -> None:
    tokens = torch.arange(12).view(4, 3)
    made: list[dict[str, Any]] = [
        {"ids": tokens[:2], "advantages": torch.tensor([float("nan"), -0.0]), "items": torch.tensor(7), "images": [1]},
        {"ids": tokens[2:], "advantages": torch.tensor([1e-40, 2.0], dtype=torch.bfloat16), "num_images": None},
    ]
    back = unpacked(packed(made), "cpu")
    assert [sorted(each) for each in back] == [sorted(each) for each in made]
    assert packed(back) == packed(made)
    assert back[0]["items"].shape == () and back[1]["advantages"].dtype is torch.bfloat16


def trainer(**more: Any) -> Any:
    """As far as rollouts know a trainer."""
    logs: dict[str, Any] = {"prompt": ["a"], "completion": ["b"], "advantages": [0.5]}
    logs |= {"rewards": defaultdict(list, good=[1.0]), "extra": defaultdict(list)}
    args = SimpleNamespace(gradient_accumulation_steps=2, steps_per_generation=2, device="cpu")
    known = {"_step": 4, "_buffered_inputs": None, "_metrics": {"train": {"step_time": [0.1, 0.2]}}, "_logs": logs}
    more = {"reward_funcs": [len]} | more
    pending = {"_pending_extra_logs": {"x": [1]}, "_pending_metrics": {}, "_entropy_window_stats": torch.ones(2)}
    state = SimpleNamespace(global_step=2)
    return SimpleNamespace(args=args, state=state, num_iterations=2, log_completions=True, **known | pending | more)


def test_a_body_that_is_given_up_leaves_nothing_and_finds_the_completions_that_it_began_with() -> None:
    session: Any = SimpleNamespace(rank=0, world_size=1)
    holder = trainer(entropy_coef=0.1, _last_world_entropy=float("inf"))
    rollouts = Rollouts(holder, session)
    rollouts.begin()
    holder._buffered_inputs = [{"ids": torch.tensor([1])}]
    rollouts.share(2)
    assert holder._metrics["train"]["step_time"] == [pytest.approx(0.3)]
    before = rollouts.state_dict()
    holder._step, holder.entropy_coef, holder._buffered_inputs = 6, 0.2, [{"ids": torch.tensor([2])}]
    holder._logs["completion"].append("c")
    rollouts.load_state_dict(before)
    rollouts.begin()
    assert holder._buffered_inputs == [{"ids": torch.tensor([1])}]
    assert (holder._step, holder.entropy_coef, holder._logs["completion"]) == (4, 0.1, ["b"])
    assert holder._entropy_window_stats is None and not holder._pending_extra_logs


def test_rewards_that_count_in_an_attribute_or_say_a_state_go_back_with_a_step() -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls, self.seen, self.address = 1, [1], "of this rank"

        def score(self) -> None:
            self.calls += 1
            self.last = "late"

    class Saying(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": list(self.seen)}

        def load_state_dict(self, received: dict[str, Any]) -> None:
            self.seen = list(received["seen"])

    def plain() -> None:
        """Functions have attributes too."""

    counting, saying = Counting(), Saying()
    plain.calls = 1  # type: ignore[attr-defined]
    holder = trainer(reward_funcs=[counting.score, saying, plain, torch.nn.Linear(1, 1), len])
    rollouts = Rollouts(holder, SimpleNamespace(rank=0, world_size=1))  # type: ignore[arg-type]
    before = rollouts.state_dict()
    counting.score()
    saying.seen.append(2)
    plain.calls = 2  # type: ignore[attr-defined]
    rollouts.load_state_dict(before)
    assert vars(counting) == {"calls": 1, "seen": [1], "address": "of this rank"}
    counting.score()
    assert rollouts.state_dict()["rewards"] == [{"calls": 2, "last": "late"}, {"seen": [1]}, {}]
    assert saying.seen == [1] and vars(plain) == {"calls": 1}


class Doubting:
    """A worker, as far as doubts know one."""

    def __init__(self, doubts: list[str]) -> None:
        self.doubts = doubts

    def note_of_script(self, text: str, *, doubts: bool = False) -> None:
        """Keep it."""
        assert doubts
        self.doubts.append(text)


class Holding:
    """An object of a script's, with something in it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Listing:
    """A reward that keeps what it has seen."""

    def __init__(self, **more: Any) -> None:
        self.best: dict[str, list[int]] = {"a": [1]}
        self.newest = self.best["a"]
        self.late: Any = None
        self.table = dict.fromkeys(range(5_000), 1)
        vars(self).update(more)

    def score(self) -> None:
        self.newest.append(2)
        self.best["b"] = []
        self.late = [1]
        vars(self).setdefault("more", set()).add(3)


def test_lists_and_dictionaries_of_a_reward_go_back_with_what_runs_again_and_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listing = Listing()
    inner, before = listing.newest, dict(vars(listing))
    holder = trainer(reward_funcs=[listing.score])
    rollouts = Rollouts(holder, SimpleNamespace(rank=0, world_size=1))  # type: ignore[arg-type]
    for _ in range(2):  # is given up, and runs again
        rollouts.begin()
        assert vars(listing) == before and listing.best == {"a": [1]} and listing.best["a"] is listing.newest is inner
        saved = rollouts.state_dict()
        listing.score()
        assert (listing.best, listing.late) == ({"a": [1, 2], "b": []}, [1])
        rollouts.load_state_dict(saved)
        assert listing.late == [1], "state is put back between steps too, where nothing runs again"
    done = listing.newest[:]
    rollouts.enter("between", 2)  # an evaluation, which a fault ends when this rank is in the next step already
    saved = rollouts.state_dict()
    listing.score()
    holder.state.global_step = 3
    rollouts.begin()
    listing.score()
    rollouts.load_state_dict(saved)
    rollouts.enter("between", 2)
    assert listing.newest == done and listing.newest is listing.best["a"]
    (told,) = (each.getMessage() for each in caplog.records)
    assert told.startswith("the reward Listing changes best, late, more, newest; ") and "are restored" in told


@pytest.mark.parametrize("more", [{"index": Holding(1)}, {"newest": [1] * 2_000}], ids=["of another kind", "large"])
def test_lists_of_a_reward_beside_what_cannot_go_back_are_left_and_named(
    more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    listing = Listing(**more)
    doubts: list[str] = []
    session: Any = SimpleNamespace(rank=0, world_size=1, _worker=Doubting(doubts))
    rollouts = Rollouts(trainer(reward_funcs=[listing.score]), session)
    rollouts.begin(rehearsal=True)
    listing.score()
    rollouts.begin()
    assert listing.newest[-1] == 2 and listing.best["b"] == []
    (told,) = (each.getMessage() for each in caplog.records)
    assert "newest" in told and "are neither restored" in told and doubts == []
    listing.score()
    rollouts.begin()
    (doubt,) = doubts
    assert "continues after a fault with a different" in doubt and "newest" in doubt


def test_a_process_that_receives_the_state_without_a_rewards_lists_says_so() -> None:
    def process(number: int, *, rehearses: bool = False) -> tuple[Listing, Any, Rollouts]:
        listing = Listing()
        holder = trainer(reward_funcs=[listing.score])
        holder.state.global_step = number
        rollouts = Rollouts(holder, session)
        rollouts.begin(rehearsal=rehearses)
        return listing, holder, rollouts

    doubts: list[str] = []
    session: Any = SimpleNamespace(rank=0, world_size=1, _worker=Doubting(doubts))
    listing, holder, survivor = process(0)
    assert survivor.state_dict()["left"] == [[]]
    listing.score()
    holder.state.global_step = 1
    saved = survivor.state_dict()
    survivor.begin()
    survivor.load_state_dict(saved)  # is given up, and runs again
    survivor.begin()
    survivor.enter("between", 1)
    assert doubts == [], "a survivor has its own"
    _, other, newcomer = process(1, rehearses=True)
    newcomer.load_state_dict(saved)
    newcomer.begin(rehearsal=True)
    assert doubts == [], "in a proof nothing is lost"
    newcomer.begin()
    (told,) = doubts
    assert told.startswith("the reward Listing continues after a fault with a different best, late, more, newest: ")
    other.state.global_step = 2
    newcomer.begin()
    assert doubts == [told]


def add(thing: Any) -> None:
    thing += 1


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (torch.zeros(2), add),
        (np.zeros(2), add),
        (Holding([torch.zeros(1)]), lambda thing: add(thing.value[0])),
        ({"a": Holding(1)}, lambda thing: vars(thing["a"]).update(value=2)),
        ([0] * 5_000, lambda thing: operator.setitem(thing, 4_000, 1)),
        (random.Random(1), lambda thing: thing.random()),
        (np.random.default_rng(1), lambda thing: thing.random()),
    ],
    ids=["tensor", "array", "object", "objects", "large", "generator", "numpy's"],
)
def test_all_that_a_reward_changes_and_nobody_is_told_is_seen(value: Any, change: Callable[[Any], Any]) -> None:
    def judge(held: Any) -> private_trl.Judge:
        (made,) = private_trl.Judge.all_of(trainer(reward_funcs=[Holding(held)]))
        return made

    survivor, lazy = judge(value), Holding(None)
    assert survivor.enter("step", 0) == "" and survivor.left() == []
    assert survivor.enter("step", 1) == ""
    change(value)
    assert survivor.left() == ["value"]
    assert "with a different value" in survivor.enter("step", 1), "the step runs again, with what it had changed"
    assert "with a different value" in judge(copy.deepcopy(value)).enter("step", 1, left=["value"])
    (late,) = private_trl.Judge.all_of(trainer(reward_funcs=[lazy]))
    lazy.value = torch.nn.Linear(1, 1)
    assert late.left() == [], "a newcomer loads it too"


def test_completions_that_no_later_step_needs_are_not_exchanged() -> None:
    session: Any = SimpleNamespace(rank=0, world_size=1)
    holder = trainer()
    holder.num_iterations = 1
    rollouts = Rollouts(holder, session)
    rollouts.begin()
    holder._buffered_inputs = [{"ids": torch.tensor([1])}]
    rollouts.share(2)
    assert rollouts.state_dict()["completions"] == {}


def ids(holder: Any) -> list[Any]:
    return [each["ids"].tolist() for each in holder._buffered_inputs]


def test_completions_travel_as_tensors_roll_back_and_fit_a_newcomer_of_another_size() -> None:
    """Plain values go to a newcomer in one message of 64 MiB at most, for which a usual generation is too large."""

    def generated(size: int) -> tuple[Any, Rollouts, ProtectedState]:
        holder = trainer()
        rollouts = Rollouts(holder, SimpleNamespace(rank=0, world_size=1))  # type: ignore[arg-type]
        state = ProtectedState([], {"trainer": rollouts})
        state.state_at = StepNo(3)
        if size:
            generate(holder, rollouts, size)
        return holder, rollouts, state

    def generate(holder: Any, rollouts: Rollouts, size: int, first: int = 7) -> None:
        rollouts.begin()
        holder._buffered_inputs = [{"ids": torch.arange(first, first + size)}]
        holder._logs["completion"][-1] = "text " * size
        rollouts.share(2)

    holder, rollouts, state = generated(300_000)
    assert len(state.inventory(StepNo(3)).python) < 5_000
    state.begin()
    for size, first in ((300_000, 8), (10, 7), (400_000, 7), (300_000, 9)):  # as many bytes, fewer, more, and again
        generate(holder, rollouts, size, first)
        assert not state.rollback()
        rollouts.begin()
        assert ids(holder) == [list(range(7, 300_007))] and len(holder._logs["completion"][-1]) == 1_500_000
    segment = Segment.create()
    take(segment, state, StepNo(3), Rank(0), "all")
    kept = SegmentSource(segment, StepNo(3))
    digest = state.digest()
    for size in (0, 10, 300_000, 500_000):
        newcomer, other, receiver = generated(size)
        for name, tensor in receiver.prepare(kept.inventory).items():
            tensor.copy_(kept.tensor(name))
        receiver.finish()
        other.begin()
        assert ids(newcomer) == ids(holder) and receiver.digest() == digest


def test_logged_completions_that_are_no_text_are_refused() -> None:
    holder = trainer()
    holder._logs["prompt"] = [object()]
    with pytest.raises(UsageError, match="log_completions=False"):
        Rollouts(holder, SimpleNamespace(rank=0, world_size=1)).state_dict()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"use_vllm": True, "vllm_mode": "server"}, "vllm_mode='server'"),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "vllm_mode='colocate'"),
        ({"use_transformers_continuous_batching": True}, "continuous_batching"),
    ],
)
def test_other_engines_are_refused_by_name(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        private_trl.refuse_engines(SimpleNamespace(**asked))
    private_trl.refuse_engines(SimpleNamespace(use_vllm=False))


@pytest.mark.parametrize("name", ["rollout_func", "environment_factories"])
def test_rollouts_of_ones_own_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=name[:10]):
        private_trl.refuse_rollouts(SimpleNamespace(**{name: print}))
    private_trl.refuse_rollouts(SimpleNamespace())

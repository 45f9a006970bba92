"""Prompts, completions and refusals of trainers that generate in their step."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from regrow.core.errors import UsageError
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
    return SimpleNamespace(args=args, num_iterations=2, log_completions=True, **known | pending | more)


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


def test_completions_that_no_later_step_needs_are_not_exchanged() -> None:
    session: Any = SimpleNamespace(rank=0, world_size=1)
    holder = trainer()
    holder.num_iterations = 1
    rollouts = Rollouts(holder, session)
    rollouts.begin()
    holder._buffered_inputs = [{"ids": torch.tensor([1])}]
    rollouts.share(2)
    assert rollouts.state_dict()["completions"] == []


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

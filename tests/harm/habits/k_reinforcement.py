"""Reinforcement learning, whose steps change environments, observations and buffers of each rank's own."""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from tests.harm.frame import Trial, backward, ddp, mlp, mse
from tests.harm.habits.j_forms import Vector, Walk
from tests.harm.table import DRAWS, habit
from torch import nn

COPIES = ("--buddy-every", "1")
EVERYWHERE = ("reset:0:1", "rollout:2:3", "rollout:1:5", "update:0:6")


def games(t: Trial) -> Vector:
    """Environments of this rank, in a library's vector, without a word on their state."""
    return Vector([Walk(10 * t.session.rank + at) for at in range(3)])


def rollout(t: Trial, step: Any, net: nn.Module, envs: Vector, seen: np.ndarray) -> tuple[list[Any], list[float]]:
    """Five steps of all environments, from the observation `seen` on."""
    inputs, rewards = [], []
    for at in range(5):
        inputs.append(torch.from_numpy(seen.copy()))
        with torch.no_grad():
            mean = net(inputs[-1]).squeeze(1)
            actions = (mean + torch.randn_like(mean)).tolist()
        seen, reward = envs.step(actions)
        rewards += reward
        if at == 2:
            t.strike("rollout", step)
    return inputs, rewards


def updates(t: Trial, step: Any, net: nn.Module, optimizer: Any, inputs: list[Any], rewards: list[float]) -> None:
    """Three updates on one rollout, the second of which may be the last thing that a rank does."""
    for at in range(3):
        loss = mse(net(torch.cat(inputs)).squeeze(1), torch.tensor(rewards, dtype=torch.float32))
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        if at == 1:
            t.strike("update", step)


@habit(
    "PPO with a vector of each rank's own environments, whose classes have no `state_dict`, reset in some bodies",
    instead='`protect(envs=envs, part=f"rank{session.rank}")` and `--buddy-every 1`',
    flags=COPIES,
    strikes=EVERYWHERE,
    fixed="has another part of the state than",
)
def ppo_of_each_rank(t: Trial) -> dict[str, Any]:
    envs, net = games(t), ddp(mlp())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    t.session.protect(net, optimizer)
    t.session.protect(envs=envs, part=f"rank{t.session.rank}")
    for step in t.steps():
        with step:
            if step.number % 4 == 1:
                envs.reset()
                t.strike("reset", step)
            inputs, rewards = rollout(t, step, net, envs, envs.seen)
            step.log(reward=sum(rewards))
            updates(t, step, net, optimizer, inputs, rewards)
    return {"model": net, "optimizer": optimizer, "seen": envs.seen.tolist()}


@habit(
    "the same, the observation that the next body begins with in a variable of the script's",
    refused="changes arrays in `seen` (ndarray: seen), which is not protected",
    instead="`memory = types.SimpleNamespace(seen=...)`, protected with the environments",
    flags=COPIES,
)
def observation_in_a_variable(t: Trial) -> dict[str, Any]:
    envs, net = games(t), ddp(mlp())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    t.session.protect(net, optimizer)
    t.session.protect(envs=envs, part=f"rank{t.session.rank}")
    seen = envs.reset().copy()
    for step in t.steps():
        with step:
            inputs, rewards = rollout(t, step, net, envs, seen)
            seen = envs.seen.copy()
            updates(t, step, net, optimizer, inputs, rewards)
    return {"model": net}


class Move(NamedTuple):
    """One step of an environment."""

    seen: np.ndarray
    action: float
    reward: float
    after: np.ndarray


class Replay:
    """Moves to be drawn from, the oldest of which are forgotten, in the form of torch's tutorial."""

    def __init__(self, capacity: int) -> None:
        self.moves: deque[Move] = deque(maxlen=capacity)

    def push(self, *move: Any) -> None:
        self.moves.append(Move(*move))

    def sample(self, count: int) -> list[Move]:
        return random.sample(self.moves, count)


@habit(
    "DQN with a replay buffer of named tuples, a target network, and one environment on each rank",
    instead='`protect(env=env, replay=replay, memory=SimpleNamespace(seen=...), part=f"rank{session.rank}")` and '
    "`--buddy-every 1`: what a body reads of the body before is protected too",
    flags=COPIES,
    strikes=EVERYWHERE,
    fixed="has another part of the state than",
)
def dqn_with_a_replay_buffer(t: Trial) -> dict[str, Any]:
    env, replay = Walk(t.session.rank), Replay(12)
    net, target = mlp(1, 8, 2), mlp(1, 8, 2)
    ranked = ddp(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    memory = SimpleNamespace(seen=env.reset())
    t.session.protect(ranked, optimizer, target=target)
    t.session.protect(env=env, replay=replay, memory=memory, part=f"rank{t.session.rank}")
    for step in t.steps():
        with step:
            if step.number % 4 == 1:
                memory.seen = env.reset()
                t.strike("reset", step)
            for at in range(4):
                best = int(net(torch.from_numpy(memory.seen)).argmax())
                action = float(best if random.random() > 0.3 else random.randrange(2))
                after, reward, done = env.step(action)
                replay.push(memory.seen, action, reward, after)
                memory.seen = env.reset() if done else after
                if at == 2:
                    t.strike("rollout", step)
            for at in range(3):
                moves = replay.sample(4)
                values = ranked(torch.from_numpy(np.stack([each.seen for each in moves])))
                with torch.no_grad():
                    ahead = target(torch.from_numpy(np.stack([each.after for each in moves]))).max(1).values
                wanted = torch.tensor([each.reward for each in moves], dtype=torch.float32) + 0.9 * ahead
                optimizer.zero_grad()
                backward(mse(values.gather(1, torch.tensor([[int(each.action)] for each in moves])).squeeze(1), wanted))
                optimizer.step()
                if at == 1:
                    t.strike("update", step)
            if step.number % 3 == 2:
                target.load_state_dict(net.state_dict())
            env.step(0.5)  # behind the last update
            step.log(reward=sum(each.reward for each in moves))
    return {
        "model": net,
        "target": target,
        "place": env.place.tolist(),
        "moves": [each.reward for each in replay.moves],
    }


TOKENS, GROUP, ANSWER = 12, 4, 5


class Writer(nn.Module):
    """A language model: each token follows from the sum of those before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.out = nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the token behind each place."""
        return self.out(self.embedding(tokens).cumsum(1).tanh())  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """The tokens, and as many more."""
        for _ in range(count):
            following = torch.multinomial(self(tokens)[:, -1].softmax(-1), 1)
            tokens = torch.cat([tokens, following], 1)
        return tokens


def said(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the answers' tokens."""
    logits = net(tokens)[:, -ANSWER - 1 : -1].log_softmax(-1)
    return logits.gather(-1, tokens[:, -ANSWER:].unsqueeze(-1)).squeeze(-1)  # type: ignore[no-any-return]


@habit(
    "GRPO with generation of its own: groups of answers, a reward by a function, three updates on one generation",
    strikes=("generate:2:3", "generate:0:5", "reward:1:1", "reward:2:9", "update:0:6", "update:1:11"),
    differs=DRAWS,
)
def grpo_by_its_own_generation(t: Trial) -> dict[str, Any]:
    writer = Writer()
    net = ddp(writer)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-2)
    t.session.protect(net, optimizer)
    for step in t.steps():
        with step as (inputs, _):
            questions = (inputs[:, :2].abs() * 5).long().clamp(max=TOKENS - 1).repeat_interleave(GROUP, 0)
            begun = writer.generate(questions, ANSWER // 2)
            t.strike("generate", step)
            tokens = writer.generate(begun, ANSWER - ANSWER // 2)
            reward = (tokens[:, -ANSWER:] % 2 == 0).float().mean(1)
            t.strike("reward", step)
            groups = reward.reshape(-1, GROUP)
            gain = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
            with torch.no_grad():
                before = said(writer, tokens)
            for at in range(3):
                ratio = (said(net, tokens) - before).exp()
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
                if at == 1:
                    t.strike("update", step)
            step.log(reward=reward.mean(), loss=loss)
    return {"model": net, "optimizer": optimizer, "tokens": tokens}

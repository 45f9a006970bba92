"""Stand-in for a library: several environments that are stepped at once."""

import numpy as np


class VectorCart:
    def __init__(self, count: int, seed: int = 0) -> None:
        self.np_random = np.random.default_rng(seed)
        self.state = np.zeros((count, 2))

    def reset(self) -> np.ndarray:
        self.state = self.np_random.uniform(-1, 1, self.state.shape)
        return self.state.copy()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.state[:, 1] += 0.1 * action + self.np_random.normal(0, 0.02, len(action))
        self.state[:, 0] += 0.1 * self.state[:, 1]
        out = np.abs(self.state[:, 0]) > 2
        self.state[out] = self.np_random.uniform(-1, 1, (int(out.sum()), 2))
        return self.state.copy(), 1.0 - np.abs(self.state[:, 0])

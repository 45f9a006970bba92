"""Protected state for the random generators of Megatron-Core beside torch's. Run on megatron-core 0.16.1.

All other state of a Megatron training is protected without an adapter; `docs/adopt.md` has the lines.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Generators"]


class Generators:
    """States of Megatron's tracker, from which dropout inside a parallel region draws.

    Ranks of a tensor-parallel group have different states: protect it under the same `part` as the model.
    """

    def __init__(self) -> None:
        self._random: Any = importlib.import_module("megatron.core.tensor_parallel.random")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of each state, by the name that Megatron gives it."""
        states = self._random.get_cuda_rng_tracker().get_states()
        return {name: self._random.convert_cuda_rng_state(state).clone() for name, state in states.items()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Restore states that `state_dict` returned."""
        tracker = self._random.get_cuda_rng_tracker()
        graphs = self._random.is_graph_safe_cuda_rng_tracker(tracker)
        tracker.set_states(
            {
                name: self._random.convert_cuda_rng_state(state.clone(), to_graphable=graphs)
                for name, state in state_dict.items()
            }
        )

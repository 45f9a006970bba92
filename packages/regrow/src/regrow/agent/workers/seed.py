"""Start values of a forked worker."""

from typing import NamedTuple

from regrow.agent.workers.zygote_messages import SpawnRequest


class WorkerSeed(NamedTuple):
    """Start values of a forked worker. `middle`: the process between it and the zygote, which is about to end."""

    request: SpawnRequest
    descriptors: list[int]
    inherited: dict[str, str]
    agent: int
    middle: int

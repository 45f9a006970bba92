"""The conformance suite of the transport seam: ours beside torch's gloo, in real processes."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.comm_cases import CASES, LARGE, compare, data
from tests.process.comm_scripts import echo, mirrored, point_to_point, through_torch, uneven_halves
from tests.process.comm_world import Seat, as_bytes, play
from tests.unit.test_agent_contract import config

from regrow.agent.store import StoreServer
from regrow.comm import collectives

SITES = pytest.mark.parametrize(("size", "tcp"), [(2, False), (3, False), (4, False), (3, True)])


def conform(seat: Seat) -> dict[str, list[bytes]]:
    """Every case twice on ours and once on gloo; what ours answered."""
    collectives.PIECE_BYTES = 4096
    first, again = seat.transport("first"), seat.transport("again")
    gloo = seat.gloo()
    answers = {}
    for name, case in CASES.items():
        answer = case(seat.ours(first), seat.rank, seat.size)
        answers[name] = as_bytes(answer)
        assert answers[name] == as_bytes(case(seat.ours(again), seat.rank, seat.size)), f"{name}: another run, other bits"
        compare(name, answer, case(gloo, seat.rank, seat.size))
    return answers

"""Mistakes of a user, or gaps of the machine: one clear message, the right exit code, nothing left behind."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site
from tests.process.warm import MOUNT

BODY = """
import sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import regrow

torch.set_num_threads(1)
session = regrow.init()
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model, optimizer)
inputs = torch.randn(64, {width})
loader = DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True, num_workers={workers})
for step in session.steps(loader, until=8):
    with step as (x,):
        {inside}
        model(x).sum().backward()
        optimizer.step()
        {updated}
        optimizer.zero_grad()
    {after}
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


def script(
    here: Site,
    *,
    inside: str = "pass",
    updated: str = "pass",
    after: str = "pass",
    width: int = 4,
    workers: int = 0,
) -> str:
    return here.script(BODY.format(inside=inside, updated=updated, after=after, width=width, workers=workers))


def run(here: Site, name: str) -> "subprocess.CompletedProcess[str]":
    return here.regrow("run", "--job", "wrong", "--nproc-per-node", "2", name)


def assert_told_once(done: "subprocess.CompletedProcess[str]", error: str) -> None:
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert told.count(error) == 1, told
    assert told.count("Traceback (most recent call last)") == 1, told
    assert "src/regrow/" not in told, told


@pytest.mark.parametrize("text", ["no such colour", r"no file caf\udce9.jpg, a name of Latin 1"])
def test_an_error_in_the_body_is_tried_once_more_and_then_shown_once_with_rank_and_step(here: Site, text: str) -> None:
    failing = f"if step.number == 3 and session.rank == 1: raise ValueError('{text}')"
    done = run(here, script(here, inside=failing))
    assert_told_once(done, f"ValueError: {text}")
    assert "rank 1 failed at step 3, the same error twice" in done.stderr
    assert "train.py" in done.stderr


def test_an_error_after_the_update_on_all_ranks_is_shown_once_and_no_state_is_called_lost(here: Site) -> None:
    done = run(here, script(here, updated="if step.number >= 3: colour = no_such_colour"))
    assert_told_once(done, "NameError: name 'no_such_colour' is not defined")
    assert "lost" not in done.stderr


WRONG_CALL = "torch.distributed.all_to_all_single(torch.empty(3), torch.empty(3)) if step.number == 3 else None"
WRONG_SHAPE = (
    "torch.distributed.all_gather([torch.empty(2), torch.empty(5)], torch.empty(2)) if step.number == 3 else None"
)


@pytest.mark.parametrize("call", [WRONG_CALL, WRONG_SHAPE])
def test_a_collective_that_is_called_wrongly_ends_the_job_with_its_traceback(here: Site, call: str) -> None:
    done = run(here, script(here, inside=call))
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert told.count("Traceback (most recent call last)") == 1, told
    assert "at step 3, the same error" in told
    assert "train.py" in told


def test_an_error_between_two_steps_is_shown_once(here: Site) -> None:
    failing = "if step.number == 3 and session.rank == 0 and not step.rehearsal: raise ValueError('no such colour')"
    done = run(here, script(here, after=failing))
    assert_told_once(done, "ValueError: no such colour")
    assert "rank 0 failed" in done.stderr


def test_a_batch_of_the_wrong_shape_is_shown_once(here: Site) -> None:
    done = run(here, script(here, width=5))
    assert_told_once(done, "RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_an_error_that_does_not_come_back_costs_one_retry(here: Site) -> None:
    mark = here.folder / "mark"
    failing = f"fail_once({str(mark)!r}) if step.number == 3 and session.rank == 1 else None"
    helper = (
        "def fail_once(path):\n"
        "    import pathlib\n"
        "    if not pathlib.Path(path).exists():\n"
        "        pathlib.Path(path).touch()\n"
        "        raise OSError('a moment')\n"
    )
    text = helper + BODY.format(inside=failing, updated="pass", after="pass", width=4, workers=0)
    done = run(here, here.script(text))
    assert done.returncode == 0, done.stderr
    assert mark.exists()
    assert "the same step runs again" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount of its own needs root")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_full_shared_memory_folder(here: Site, workers: int) -> None:
    name = script(here, workers=workers)
    fill = "mount -t tmpfs -o size=64k none /dev/shm && head -c 65536 /dev/zero > /dev/shm/full"
    done = here.regrow("run", "--job", "full", "--nproc-per-node", "2", name, **{MOUNT: fill})
    told = done.stdout + done.stderr
    if workers == 0:
        assert done.returncode == 0, told
    else:
        assert done.returncode == 1, told
        assert "No space left on device" in told or "shared memory" in told, told
    assert "src/regrow/" not in told, told


COLLECTIVE_LOADER = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import regrow

class Shard:
    def __iter__(self):
        state = torch.get_rng_state()
        if {shares}:
            dist.broadcast(state, src=0)
        for number in range(100):
            yield torch.full((4,), float(number))

torch.set_num_threads(1)
session = regrow.init()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model, optimizer)
for step in session.steps(Shard(), until=4):
    with step as x:
        if {shares} or step.number:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not step.rehearsal:
            print("trained", step.number)
"""


def test_a_loader_that_calls_collectives_is_refused_by_name_before_the_first_step(here: Site) -> None:
    done = run(here, here.script(COLLECTIVE_LOADER.format(shares=True)))
    assert done.returncode == 1
    assert "Shard calls broadcast while it fetches a batch" in done.stderr
    assert "loader.base_dataloader" in done.stderr
    assert "trained" not in done.stdout


def test_a_body_without_an_update_is_told_at_once_and_trained(here: Site) -> None:
    done = run(here, here.script(COLLECTIVE_LOADER.format(shares=False)))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the rehearsed body made no update") == 1


def test_python_state_that_no_newcomer_could_be_sent_is_said_before_the_first_step(here: Site) -> None:
    big = BODY.replace(
        "session.protect(model, optimizer)",
        """
class Notes:
    def state_dict(self):
        return {{"text": "x" * (70 << 20)}}
    def load_state_dict(self, state):
        pass
session.protect(model, optimizer, notes=Notes())
""",
    ).replace("until=8", "until=2")
    name = here.script(big.format(inside="pass", updated="pass", after="pass", width=4, workers=0))
    done = run(here, name)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "in one message of at most" in line]
    assert len(said) == 1 and "notes" in said[0], done.stderr

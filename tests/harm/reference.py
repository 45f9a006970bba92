"""Habits without regrow (torch.distributed over gloo), and alone: each in fresh processes, forked from this warm one.

`python -m tests.harm.reference FOLDER` takes kinds and names of habits on standard input, one of each a line, says each
line when it is done, and leaves a folder of it: `plain`, a world without regrow; `single`, the same with one rank;
`alone`, the script as `python train.py` runs it; `still`, a world without regrow on the data of a global batch.
"""

import atexit
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # what torch imports at the first optimizer: once here instead of in each process
import torch.distributed as dist
from tests.harm.frame import LONGER, SIZES, PlainSession, Trial, begin, play
from tests.harm.table import Habit, named

PATIENCE_S = 100.0
RANKS = {"plain": 3, "single": 1, "alone": 1, "still": SIZES[0]}


def run_plain(habit: Habit, folder: Path, kind: str, rank: int) -> None:
    """One rank of a world without regrow."""
    world = RANKS[kind]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    trial = Trial(PlainSession(), folder, habit.until)
    if kind == "still":
        trial.until, trial.world = habit.until * LONGER, kind
    play(habit.run, trial)
    dist.barrier()  # the group is not destroyed: torch's gloo may hang in its destructors


def run_alone(habit: Habit, folder: Path, _: int) -> None:
    """The script as `python train.py` runs it."""
    play(habit.run, begin(folder, until=habit.until))


def forked(folder: Path, work: Callable[[], None]) -> int:
    """A process of its own; what it says goes to a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    log = os.open(folder / f"log.{os.getpid()}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(PATIENCE_S - 10, file=2)
    try:
        work()
        atexit._run_exitfuncs()
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here, and its log says why
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pids: list[int], deadline: float) -> bool:
    """Wait for the processes; True if all ended well in time. Late ones are killed."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids) and not any(codes.values()) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                codes |= {pid: status} if ended else {}
        time.sleep(0.01)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    return list(codes.values()) == [0] * len(pids)


def refer(kind: str, habit: Habit, root: Path) -> None:
    """Run a habit without regrow, or alone."""
    folder = root / kind / habit.name
    folder.mkdir(parents=True)
    play_one = partial(run_alone, habit, folder) if kind == "alone" else partial(run_plain, habit, folder, kind)
    pids = [forked(folder, partial(play_one, rank)) for rank in range(RANKS[kind])]
    if wait(pids, time.monotonic() + PATIENCE_S):
        (folder / "ok").touch()


def main() -> None:
    """Run what standard input names, to its end."""
    torch.set_num_threads(1)
    with open(0, "rb", buffering=0) as asked:  # a fork must not take a line along
        for line in iter(asked.readline, b""):
            kind, name = line.decode().split()
            refer(kind, named(name), Path(sys.argv[1]))
            os.write(1, line)


if __name__ == "__main__":
    main()

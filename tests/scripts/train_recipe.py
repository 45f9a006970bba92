"""A recipe's training as `regrow train` starts it, which tells besides what its final state is.

And whether any file of weights of the model was opened while this process lived. The kernel is asked (inotify), since
safetensors opens its files outside Python, where no audit hook sees it. And how much of a processor this process took
until the first step that it was in had been made.
"""

import argparse
import ctypes
import json
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from pacing import pause  # type: ignore[import-not-found]  # beside this script
from placing import DEVICE  # type: ignore[import-not-found]  # makes the tests' own known to torch

from regrow.devices import accelerators
from regrow_recipes.recipes import training
from regrow_recipes.recipes.schema import Run

parser = argparse.ArgumentParser()
parser.add_argument("--run", type=Path, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--pace", type=float, default=0.0, help="seconds a step lasts more, until there is a file `hurry`")
parser.add_argument("--strike", type=int, default=-1, metavar="RANK", help="killed once before its first step")
options = parser.parse_args()

IN_OPEN, EVENT = 0x20, struct.Struct("iIII")


def watch_opens(folder: str) -> int:
    """A descriptor on which the kernel tells of each file of a folder that is opened from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    told: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if told < 0 or libc.inotify_add_watch(told, folder.encode(), IN_OPEN) < 0:
        raise OSError(ctypes.get_errno(), "inotify", folder)
    return told


def opened(told: int) -> set[str]:
    """The names of those that were."""
    try:
        events = os.read(told, 1 << 20)
    except BlockingIOError:
        return set()
    names, at = set(), 0
    while at < len(events):
        length = EVENT.unpack_from(events, at)[3]
        at += EVENT.size + length
        names.add(events[at - length : at].rstrip(b"\0").decode())
    return names


def slowly(line: str) -> None:
    """Print the line of a step, and let the others wait."""
    print(line, flush=True)
    if line.startswith("step "):
        step = int(line.removeprefix("step ").partition("/")[0])
        pause(options.pace, step - 1, options.steps)


fill, due = vars(training)["fill"], vars(training)["_due"]
built: list[float] = []


def struck(found: torch.Tensor, *rest: Any) -> None:
    """Work out what the model said before, where this process is not killed now."""
    mark = options.out.with_suffix(".struck")
    if int(os.environ["RANK"]) == options.strike and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    fill(found, *rest)


def noted(*asked: int) -> Any:
    """True if something is due after a step; after the first one, the processor time is noted."""
    if not built:
        built.append(time.process_time())
    return due(*asked)


vars(training).update(say=slowly, fill=struck, _due=noted)
run = msgspec.json.decode(options.run.read_bytes(), type=Run)
told = watch_opens(run.recipe.model.path)
session = training.train(msgspec.structs.replace(run, steps=options.steps))
if accelerators.choose(session.local_rank).type != DEVICE.type:
    raise RuntimeError(f"this recipe has not trained on {DEVICE}")
report = {"digest": session.digest(), "rank": session.rank}
options.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(report))

weights = sorted(name for name in opened(told) if name.endswith(".safetensors"))
options.out.with_suffix(f".opened.{session.rank}").write_text("\n".join(weights))
options.out.with_suffix(f".built.{session.rank}").write_text(str(built[0]))

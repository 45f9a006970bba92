"""Surroundings of a step: collectives of one's own, threads, processes, signals."""

import atexit
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from tests.harm.frame import Trial, backward, ddp, mlp, mse
from tests.harm.table import DRAWS, habit


def train(t: Trial, before: Any = None, after: Any = None, late: Any = None) -> dict[str, Any]:
    """The plain loop; `before` the update, `after` it, `late`: after the body, where the step has happened."""
    model = ddp(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            backward(loss)
            numbers = before(step, loss.detach()) if before else {}
            optimizer.step()
            numbers |= after(step, loss.detach()) if after else {}
            step.log(loss=loss, **numbers)
        if late and step.committed:
            late(step, loss.detach())
    return {"model": model, "optimizer": optimizer}


@habit("`all_reduce(loss)` before the update, logged")
def loss_reduced_before_the_update(t: Trial) -> dict[str, Any]:
    def mean(_: Any, loss: torch.Tensor) -> dict[str, Any]:
        dist.all_reduce(shared := loss.clone())
        return {"mean": shared / dist.get_world_size()}

    return train(t, before=mean)


@habit("`all_reduce(loss)` after the update, in the body, logged")
def loss_reduced_after_the_update(t: Trial) -> dict[str, Any]:
    def mean(_: Any, loss: torch.Tensor) -> dict[str, Any]:
        dist.all_reduce(shared := loss.clone())
        return {"mean": shared / dist.get_world_size()}

    return train(t, after=mean)


@habit("a `barrier` in the body")
def barrier(t: Trial) -> dict[str, Any]:
    def wait(*_: Any) -> dict[str, Any]:
        dist.barrier()
        return {}

    return train(t, before=wait)


@habit(
    "objects gathered in the body (`all_gather_object`, `broadcast_object_list`)",
    differs="what it logs is a sum over the ranks",
)
def objects_gathered(t: Trial) -> dict[str, Any]:
    def gather(step: Any, loss: torch.Tensor) -> dict[str, Any]:
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, {"step": step.number, "loss": float(loss)})
        told = [sum(each["loss"] for each in everybody)]
        dist.broadcast_object_list(told, src=0)
        return {"total": told[0]}

    return train(t, before=gather)


@habit("a group of one's own, made at the top and used in the body")
def group_of_ones_own(t: Trial) -> dict[str, Any]:
    first = max(1, dist.get_world_size() - 1)
    group = dist.new_group(list(range(first)))

    def share(_: Any, loss: torch.Tensor) -> dict[str, Any]:
        shared = loss.clone()
        if t.session.rank < first:
            dist.all_reduce(shared, group=group)
        return {"shared": shared}

    return train(t, before=share)


@habit(
    "an integer mean (`ReduceOp.AVG` has none under gloo: a sum, divided)",
    differs="what it logs is a sum over the ranks",
)
def integer_sum(t: Trial) -> dict[str, Any]:
    def count(step: Any, _: torch.Tensor) -> dict[str, Any]:
        dist.all_reduce(seen := torch.tensor(4 + t.session.rank + step.number))
        return {"seen": int(seen) // dist.get_world_size()}

    return train(t, before=count)


@habit("a thread that takes metrics from a queue")
def logging_thread(t: Trial) -> dict[str, Any]:
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    lines: list[str] = []

    def write() -> None:
        while (line := waiting.get()) is not None:
            lines.append(line)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    kept = train(t, late=lambda step, loss: waiting.put(f"{step.number} {float(loss)}"))
    waiting.put(None)
    thread.join(10)
    return kept


@habit("a subprocess in the body and between steps (`git`, `nvidia-smi`)")
def subprocesses(t: Trial) -> dict[str, Any]:
    def ask(*_: Any) -> dict[str, Any]:
        said = subprocess.run([sys.executable, "-S", "-c", "print(3)"], capture_output=True, check=True, timeout=60)
        return {"said": float(said.stdout)}

    return train(t, before=ask, late=ask)


@habit("`os.fork` in the body, and its child waited for")
def forks(t: Trial) -> dict[str, Any]:
    def fork(*_: Any) -> dict[str, Any]:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        return {"code": float(os.waitpid(pid, 0)[1])}

    return train(t, before=fork)


def _save(path: str, loss: float) -> None:
    with open(path, "a") as file:
        file.write(f"{loss}\n")


@habit("`multiprocessing` saves in the background, between steps")
def background_process(t: Trial) -> dict[str, Any]:
    def save(step: Any, loss: torch.Tensor) -> None:
        if step.number % 5 == 0 and t.session.is_main:
            child = multiprocessing.get_context("fork").Process(
                target=_save, args=(str(t.folder / "saved"), float(loss))
            )
            child.start()
            child.join(30)

    return train(t, late=save)


@habit("handlers of SIGTERM and SIGUSR1 of one's own")
def signal_handlers(t: Trial) -> dict[str, Any]:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: asked.append(number))

    def ask(*_: Any) -> dict[str, Any]:
        asked.clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        return {"asked": float(len(asked))}

    return train(t, before=ask)


@habit("`atexit`")
def at_exit(t: Trial) -> dict[str, Any]:
    def leave() -> None:
        (t.folder / f"left.{t.session.rank}").touch()

    atexit.register(leave)
    return train(t)


@habit("`sys.exit(0)` after the loop, and a `try`/`finally` around it")
def exits_by_itself(t: Trial) -> dict[str, Any]:
    try:
        return train(t)
    finally:
        if dist.is_initialized():
            dist.barrier()


@habit("`destroy_process_group` at the end")
def destroys_the_group(t: Trial) -> dict[str, Any]:
    kept = train(t)
    if "regrow" in type(t.session).__module__:
        dist.destroy_process_group()
    return kept


@habit("`torch.use_deterministic_algorithms`, and a seed set at the top")
def deterministic(t: Trial) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(123)
    return train(t)


@habit("`torch.manual_seed(step)` in the body", differs=DRAWS)
def seeded_in_the_body(t: Trial) -> dict[str, Any]:
    model = ddp(mlp(1, 8, 1, torch.nn.Dropout(0.3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            torch.manual_seed(step.number)
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}

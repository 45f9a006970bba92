"""A standby that waits before the script: it imports modules on order, and then gets its rank."""

import os
import queue
import sys
import threading
import time

from regrow.agent.workers.imports import import_ahead
from regrow.agent.workers.link import WorkerLink, placed
from regrow.core.config import publish_rank
from regrow.core.errors import AgentGone
from regrow.core.exit_codes import LOST_AGENT
from regrow.core.ids import NO_STATE
from regrow.core.messages import facts, orders
from regrow.core.messages.observations import ProveAlive, WorkerAlive
from regrow.core.messages.vocabulary import Role
from regrow.core.process.stage_times import StageClock

_StandbyOrder = orders.StartScript | orders.ImportModules | orders.ReleaseWorker


def await_start(link: WorkerLink, argv: list[str]) -> None:
    """Wait for the order with this worker's rank; ends by `SystemExit` if it is released instead.

    Args:
        argv: the script's `sys.argv`, which modules may read while they are imported.
    """
    received: queue.SimpleQueue[_StandbyOrder] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, received), name="regrow-waiting", daemon=True).start()
    link.send(facts.WorkerReady(link.env.worker, NO_STATE, "", ""))
    while True:
        match received.get():
            case orders.StartScript() as order:
                _take_place(link, order)
                return
            case orders.ImportModules(modules=modules, environment=environment):
                sys.argv = list(argv)
                unfit, why = import_ahead(modules, environment)
                link.send(facts.ModulesImported(link.env.worker, unfit, why))
                if unfit:
                    _await_end(received)
            case orders.ReleaseWorker():
                raise SystemExit(0)


def _listen(link: WorkerLink, received: "queue.SimpleQueue[_StandbyOrder]") -> None:
    """Take orders until one ends the wait, also while modules are being imported."""
    try:
        for order in link.orders():
            match order:
                case ProveAlive():
                    link.send(WorkerAlive(link.env.worker))
                case orders.StartScript():
                    link.send(WorkerAlive(link.env.worker))
                    received.put(order)
                    return  # Later orders are for the code that runs the script.
                case orders.ReleaseWorker():
                    received.put(order)
                    return
                case orders.ImportModules():
                    received.put(order)
                case _:
                    continue  # No other order concerns a worker without groups and state.
    except AgentGone:
        pass
    os._exit(LOST_AGENT)


def _await_end(received: "queue.SimpleQueue[_StandbyOrder]") -> None:
    """Wait until this process is ended, as it has imported a module that only the script should import."""
    while not isinstance(received.get(), orders.ReleaseWorker):
        continue
    raise SystemExit(0)


def _take_place(link: WorkerLink, order: orders.StartScript) -> None:
    world = order.world or link.env.world
    env = placed(
        link.env,
        role=Role.JOINER,
        rank=order.rank,
        local_rank=order.local_rank,
        world=world,
        generation=order.generation,
    )
    link.take_place(env)
    link.stages = StageClock(time.monotonic())
    os.environ.update(env.variables())
    publish_rank(order.rank, order.local_rank, world)

"""The workers of this node: from the order to spawn one until all processes that it left are ended."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterable

from regrow.agent.committed_steps import LastSeen
from regrow.agent.memory_kills import MemoryKills
from regrow.agent.node_data import NodeData
from regrow.agent.output import OutputPump
from regrow.agent.workers import room
from regrow.agent.workers.compile_caches import read_mounts
from regrow.agent.workers.environment import SpawnRequests, one_thread_each, path_entry
from regrow.agent.workers.fencing import kill_sessions, own_trackers, sweep_orphans, trackers_of
from regrow.agent.workers.worker import Worker
from regrow.agent.workers.zygote_client import AGAIN_S, TRIES, ZygoteClient
from regrow.core.config import AgentConfig, inherited_environment
from regrow.core.ids import NO_STATE, Instant, Seconds, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.replacements import ReplacementUnproven
from regrow.core.messages.unions import AgentFact, WorkerFact
from regrow.core.messages.vocabulary import ErrorReport, Role

_END_S: Seconds = 5.0
_TIDY_S: Seconds = 1.0
"""Time for the resource tracker of a dead worker to remove its leftovers."""
_BURY_S: Seconds = 0.01  # The search through all processes waits until the worker's end is reported.
_log = logging.getLogger("regrow.agent")


class NodeWorkers:
    """Forks workers by a zygote, reports their ends, and ends everything that they leave. It makes no decisions.

    Args:
        config: configuration of the agent.
        store: returns the address at which this node's keys are served.
        output: receives the workers' output.
        report: sends a fact to the coordinator.
        on_fact: called with every fact that a worker sends.
        ended: called for each worker that has ended.
        others: returns this agent's other children, which are reaped elsewhere.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        store: Callable[[], str],
        output: OutputPump,
        report: Callable[[AgentFact], None],
        on_fact: Callable[[Worker, WorkerFact], None],
        ended: Callable[[LastSeen], None],
        others: Callable[[], Iterable[int | None]],
    ) -> None:
        inherited = inherited_environment()
        self._spawn_requests = SpawnRequests(config, inherited, read_mounts())
        self._says = self._spawn_requests.said
        self._store, self._output, self._report = store, output, report
        self._on_fact, self._ended, self._others = on_fact, ended, others
        self._workers: dict[WorkerId, Worker] = {}
        self._waiting: dict[WorkerId, asyncio.TimerHandle] = {}
        """Workers that could not be spawned for lack of resources, until the next attempt."""
        self._dead_leaders: set[int] = set()
        self._held = False
        self._just_died: set[int] = set()
        """Dead leaders whose resource trackers may still end by themselves."""
        self._memory = MemoryKills()
        self._zygote = ZygoteClient(
            self,
            preload=config.preload,
            path_entry=path_entry(config.script),
            one_thread=one_thread_each(config, inherited),
            guarded=self._pids,
        )
        self.data = NodeData(
            config,
            output=output,
            request=lambda order: self._spawn_requests.request(order, store=store()),
            spawn=self._zygote.spawn,
            report=report,
            bury=self._bury_soon,
        )
        """The node's data cache; its producers are forked like workers."""

    def start(self) -> None:
        """Start the zygote."""
        self._zygote.start()

    def get(self, worker: WorkerId) -> Worker | None:
        """The worker of this name; None if it has ended or is unknown."""
        return self._workers.get(worker)

    def watched(self) -> list[Worker]:
        """The workers that have a process and are not being ended."""
        return [worker for worker in self._workers.values() if worker.pid and not worker.doomed]

    def hold(self) -> None:
        """Keep workers alive until the agent ends them, as a signal may have been sent to all processes of the job."""
        self._held = True
        for worker in self._workers.values():
            worker.board.hold()

    def spawn(self, order: orders.SpawnWorker) -> None:
        """Order a worker from the zygote. If too many files are open for one more, this is tried again a few times."""
        if order.worker in self._workers or order.worker in self._waiting:
            _log.warning("worker %s is not spawned: it exists", order.worker)
        elif order.role is Role.PROVER and (why := room.refusal(self._pids_of_ranks(), order.node)):
            self._report(ReplacementUnproven(order.worker, order.generation, order.rank, why))
            self._never_began(order.worker)
        else:
            self._try(order, 1)

    def _try(self, order: orders.SpawnWorker, tries: int) -> None:
        self._waiting.pop(order.worker, None)
        try:
            request = self._spawn_requests.request(order, store=self._store())
            worker = Worker(order, on_fact=self._on_fact)
            theirs, ours = worker.descriptors()
        except OSError as error:  # The node goes on with its present workers.
            self._refused(order, tries, error)
            return
        self._workers[worker.id] = worker
        if self._held:
            worker.board.hold()
        self._output.add(worker.id, worker.rank if worker.shown else None, ours, headed=True)
        self._zygote.spawn(request, theirs)

    def _refused(self, order: orders.SpawnWorker, tries: int, error: OSError) -> None:
        reason = f"the node cannot start worker {order.worker}: {error.strerror or error}"
        if tries < TRIES:
            _log.warning("%s; it is tried again", reason)
            again = asyncio.get_running_loop().call_later(AGAIN_S, self._try, order, tries + 1)
            self._waiting[order.worker] = again
        else:
            self._never_began(order.worker, ErrorReport("OSError", reason, f"{reason}\n"))

    def call_off(self, worker: WorkerId) -> None:
        """Give up a worker that could not be spawned so far."""
        if (again := self._waiting.pop(worker, None)) is not None:
            again.cancel()
            self._never_began(worker)

    async def fence(self, worker: Worker, order: orders.FenceWorker) -> None:
        """End a worker for certain, after dumping its stacks if the order asks for them."""
        worker.doomed = True
        if order.dump_stacks:
            self._output.hush(worker.id)
            self._output.head(worker.id, f"worker {worker.id} is fenced: {order.reason}; its stacks")
            with contextlib.suppress(OSError):  # The kernel may refuse the query.
                await worker.dump_stacks()
        worker.kill()

    # --- life and end of workers ---------------------------------------------------------------------------------

    def worker_spawned(self, worker: WorkerId, pid: int) -> None:
        """Take the zygote's report that it has forked a worker or a producer."""
        self._dead_leaders.discard(pid)
        self._just_died.discard(pid)
        if self.data.spawned(worker, pid):
            return
        found = self._workers[worker]
        self._output.head(worker, f"worker {worker}, rank {found.rank}, generation {found.generation}, pid {pid}")
        self._report(facts.WorkerStarted(worker, pid))
        if self._says:
            self._report(facts.WorkerNoted(worker, self._says))
            self._says = ""
        found.started(pid, self._worker_ended)
        self.sweep()

    def spawn_failed(self, worker: WorkerId, error: ErrorReport) -> None:
        """Take the zygote's report that it could not fork a process, and report a worker that ended at once."""
        if self.data.spawn_failed(worker, error):
            return
        self._output.keep(worker, error.traceback)
        self._forget(self._workers[worker])
        self._never_began(worker, error)

    def _forget(self, worker: Worker) -> None:
        del self._workers[worker.id]
        worker.close()
        self._output.finish(worker.id)

    def _never_began(self, worker: WorkerId, error: ErrorReport | None = None) -> None:
        if error is not None:
            self._report(facts.WorkerFailed(worker, error, NO_STATE))
        self._report(facts.WorkerExited(worker, 1, time.monotonic()))

    def dying(self, worker: Worker) -> None:
        """Report a worker whose end the kernel has begun; `_worker_ended` follows when it can be reaped."""
        with contextlib.suppress(OSError):  # The kernel may refuse the query; `_worker_ended` reports it then.
            if not worker.reported_exit and (end := worker.dying()) is not None:
                self._report_exit(worker, *end)

    def _worker_ended(self, worker: Worker) -> None:
        if worker.id not in self._workers:
            return  # The worker was forgotten at the agent's end.
        code, at = worker.reap()
        if not worker.reported_exit:
            self._report_exit(worker, code, at)
        del self._workers[worker.id]
        self._ended(LastSeen(worker.id, worker.rank_in, at, worker.staged, worker.shown_batch, worker.committed))
        self._output.head(worker.id, f"worker {worker.id} ended with code {code}")
        self._output.finish(worker.id)
        if worker.pid is not None:
            self._bury_soon(worker.pid)

    def _report_exit(self, worker: Worker, code: int, at: Instant) -> None:
        worker.reported_exit, memory = True, not worker.doomed and self._memory.explains(code)
        self._report(facts.WorkerExited(worker.id, code, at, memory, worker.left))

    def _bury_soon(self, pid: int) -> None:
        self._dead_leaders.add(pid)
        self._just_died.add(pid)
        asyncio.get_running_loop().call_later(_BURY_S, self._bury, pid)

    def _bury(self, pid: int) -> None:
        """End processes that a dead worker left outside its process group."""
        if pid not in self._dead_leaders:
            return  # A new worker has the same process id.
        loop = asyncio.get_running_loop()
        try:
            trackers = trackers_of(pid) if pid in self._just_died else []
            kill_sessions([pid], spared=trackers)
        except OSError:  # Too many files are open for the search.
            loop.call_later(AGAIN_S, self._bury, pid)
            return
        self._just_died.discard(pid)
        if trackers:
            self._just_died.add(pid)
            loop.call_later(_TIDY_S, self._tidied, pid)
        self.sweep()
        self._zygote.forget(pid)

    def _tidied(self, pid: int) -> None:
        self._just_died.discard(pid)
        self._bury(pid)

    def _pids_of_ranks(self) -> list[int]:
        return [worker.pid for worker in self._workers.values() if worker.pid is not None and worker.shown]

    def _pids(self) -> list[int]:
        """Process ids of workers and producers."""
        return [worker.pid for worker in self._workers.values() if worker.pid is not None] + self.data.pids

    def sweep(self) -> None:
        """Reap a child that has ended, unless it is reaped elsewhere, and end leftovers of dead workers."""
        if self._zygote.busy:
            return  # A worker whose id is not known yet looks like an orphan; the next SIGCHLD repeats this.
        kept = {*self._pids(), *filter(None, (self._zygote.pid, *self._others()))}
        with contextlib.suppress(OSError):  # The next SIGCHLD repeats this.
            sweep_orphans(kept, self._dead_leaders, spared=self._just_died)

    # --- the end -------------------------------------------------------------------------------------------------

    async def end(self, grace: Seconds) -> None:
        """End all workers: request their end, wait `grace`, kill those left. Their exits are reported."""
        for worker_id in list(self._waiting):
            self.call_off(worker_id)
        for worker in self._workers.values():
            if grace > 0 and worker.board.has_own_end and not worker.proves:
                worker.signal(signal.SIGTERM)
                worker.signal(signal.SIGCONT)
            elif grace > 0:
                worker.kill()  # As SIGTERM would by default; the worker's `Shield` leaves that to the agent.
        await self._wait_empty(grace)
        for worker in list(self._workers.values()):
            worker.kill()
        await self._zygote.close()
        for worker in [worker for worker in self._workers.values() if worker.pid is None]:
            self._forget(worker)
            self._never_began(worker.id)
        await self._wait_empty(_END_S)
        await self.data.close()

    async def close(self) -> None:
        """End the zygote and the producers, and forget workers that the kernel has not ended yet.

        `end_children` reaps these. May be called after `end`.
        """
        with contextlib.suppress(ProcessLookupError):
            await self._zygote.close()
        await self.data.close()
        deadline = time.monotonic() + _TIDY_S
        while own_trackers() and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        for worker in list(self._workers.values()):
            self._forget(worker)

    async def _wait_empty(self, within: Seconds) -> None:
        deadline = time.monotonic() + within
        while self._workers and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

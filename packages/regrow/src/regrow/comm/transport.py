"""Transports under regrow's groups: a socket mesh for tensors in host memory, NCCL, or local answers (echo).

A transport is formed once and never reused: after a fault it is halted, and another one is formed.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from regrow.comm.algorithms.rounds import DIRECT
from regrow.comm.collective_thread import CollectiveThread
from regrow.comm.collectives import Collectives
from regrow.comm.socket_mesh import SocketMesh
from regrow.comm.torch_private.internals import Work
from regrow.core.errors import CollectiveMisuse, GenerationHalted, RegrowError
from regrow.core.ids import Seconds
from regrow.devices.accelerators import await_stream, is_accelerator

RUN_S: Seconds = 1800.0
"""Default time limit of one collective: torch's own for tensors in host memory."""


class Transport(Protocol):
    """Runs the collectives of one group in one generation."""

    def form(self, deadline: Seconds) -> None:
        """Connect to all peers. Raises `GenerationHalted` if halted meanwhile, `DeadlineExceeded` if it is too slow."""
        ...

    def call(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], done: Callable[[], None] | None = None
    ) -> Any:
        """Run a method of a process group by name. `done` is called when the answer is there, before the work ends."""
        ...

    def halt(self) -> None:
        """End every call that is blocked in this transport, from any thread, at once."""
        ...

    def broke(self) -> bool:
        """True if a collective of this transport has failed."""
        ...

    def misuse(self) -> CollectiveMisuse | None:
        """The first error in the script's own calls, if a collective has failed because of one."""
        ...

    def set_timeout(self, seconds: Seconds) -> None:
        """Set the time limit of later collectives."""
        ...

    def start_coalescing(self, device: torch.device) -> bool:
        """Join the calls that follow into one, until `end_coalescing`; False if this transport needs no joining."""
        ...

    def end_coalescing(self, device: torch.device) -> Work | None:
        """The work of the calls since `start_coalescing`; None: this transport is halted."""
        ...

    def give_up_coalescing(self) -> None:
        """Drop the calls since `start_coalescing`, because one has failed. Called by the thread that began them."""
        ...

    def close(self) -> None:
        """Free the resources of a halted transport."""
        ...


class MeshTransport:
    """Collectives over a mesh of sockets, for tensors in host memory; tensors on devices are copied there and back.

    Args:
        run_s: time limit of one collective, in seconds.
        most_direct: largest group size in which each rank exchanges with each.
    """

    def __init__(self, mesh: SocketMesh, run_s: Seconds = RUN_S, most_direct: int = DIRECT) -> None:
        self._mesh = mesh
        self._collectives = Collectives(mesh, run_s, most_direct)
        self._threads: dict[tuple[str, int], CollectiveThread] = {}
        self._lock = threading.Lock()
        self._calling = threading.local()
        self._failed = False
        self._misuse: CollectiveMisuse | None = None

    def form(self, deadline: Seconds) -> None:
        """Listen for the other ranks; each connection is made when it is first needed."""
        try:
            self._mesh.form()
        except (OSError, RegrowError) as error:
            if self._mesh.halted:
                raise GenerationHalted("halted while its groups were formed") from error
            raise

    def halt(self) -> None:
        """Shut down all connections, including those that are still being made."""
        self._mesh.halt()

    def broke(self) -> bool:
        """True if a collective has failed."""
        return self._failed

    def misuse(self) -> CollectiveMisuse | None:
        """The first error in the script's own calls."""
        return self._misuse

    def set_timeout(self, seconds: Seconds) -> None:
        """Set the time limit of later collectives."""
        self._collectives.deadline = seconds

    def start_coalescing(self, device: torch.device) -> bool:
        """False: sends and receives run concurrently here."""
        return False

    def end_coalescing(self, device: torch.device) -> Work | None:
        """None: no calls were coalesced."""
        return None

    def give_up_coalescing(self) -> None:
        """No calls were coalesced."""

    def close(self) -> None:
        """End the threads and close the connections."""
        with self._lock:
            threads, self._threads = list(self._threads.values()), {}
        for thread in threads:
            thread.end()
        self._mesh.close()

    def call(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], done: Callable[[], None] | None = None
    ) -> Any:
        """Run one method of `ProcessGroup`; `done` is called in the thread that runs the method."""
        method = _METHODS.get(name)
        if method is None:
            raise CollectiveMisuse(
                f"{name} is not supported on CPU tensors", hint="see regrow.comm.transport for what is"
            )
        device = device_of(args)
        if device is not None and is_accelerator(device):
            await_stream(device)  # another thread reads the tensors, and does not wait for this thread's stream
        self._calling.done, self._calling.device = done, device
        return method(self, *args, **options)

    # --- the methods of ProcessGroup ---------------------------------------------------------------------------

    def _thread(self, kind: str, peer: int = -1) -> CollectiveThread:
        with self._lock:
            key = (kind, peer)
            if key not in self._threads:
                self._threads[key] = CollectiveThread(f"regrow-{kind}", self._note_failure)
            return self._threads[key]

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, CollectiveMisuse) and not self._failed:
            self._misuse = error
        self._failed = True

    def _run(self, call: Callable[[Collectives], Any], result: Any) -> Work:
        return self._submit(self._thread("collectives"), lambda: call(self._collectives), result)

    def _submit(self, thread: CollectiveThread, call: Callable[[], Any], result: Any) -> Work:
        done: Callable[[], None] | None = self._calling.done
        device: torch.device | None = self._calling.device

        def run() -> Any:
            source = call()
            if device is not None and is_accelerator(device):
                await_stream(device)  # copies on the device are only enqueued, and readers do not know this stream
            if done is not None:
                done()
            return source

        return thread.submit(run, result)

    def _all_reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else torch.distributed.ReduceOp.SUM
        return self._run(lambda run: _each(lambda tensor: run.all_reduce(tensor, op), tensors), tensors)

    def _broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        root = opts.rootRank
        return self._run(lambda run: _each(lambda tensor: run.broadcast(tensor, root), tensors), tensors)

    def _all_gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._run(lambda run: _each(run.all_gather, outputs, inputs), outputs)

    def _all_gather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        by_input = [list(of_all_ranks) for of_all_ranks in zip(*outputs, strict=True)]
        return self._run(lambda run: _each(run.all_gather, by_input, inputs), outputs)

    def _all_gather_into(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self._run(lambda run: run.all_gather(self._rows(output), given), [output])

    def _all_gather_into_many(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        rows = [self._rows(output) for output in outputs]
        return self._run(lambda run: _each(run.all_gather, rows, inputs), outputs)

    def _reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        op = opts.reduceOp
        return self._run(lambda run: _each(lambda o, i: run.reduce_scatter(o, i, op), outputs, inputs), outputs)

    def _reduce_scatter_from(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Work:
        return self._reduce_scatter([output], [self._rows(given)], opts)

    def _reduce_scatter_from_many(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        return self._reduce_scatter(outputs, [self._rows(given) for given in inputs], opts)

    def _tree_reduce(self, nodes: list[torch.Tensor], count: int, scale: float) -> Work:
        return self._run(lambda run: run.tree_reduce(nodes, count, scale), nodes[:1])

    def _reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        op, root = opts.reduceOp, opts.rootRank
        return self._run(lambda run: _each(lambda tensor: run.reduce(tensor, root, op), tensors), tensors)

    def _gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        root = opts.rootRank
        wanted = outputs or [[] for _ in inputs]
        return self._run(lambda run: _each(lambda o, i: run.gather(o, i, root), wanted, inputs), outputs)

    def _scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        root = opts.rootRank
        given = inputs or [[] for _ in outputs]
        return self._run(lambda run: _each(lambda o, i: run.scatter(o, i, root), outputs, given), outputs)

    def _all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._run(lambda run: run.all_to_all(outputs, inputs), outputs)

    def _all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> Work:
        outputs = list(torch.split(output, out_splits)) if out_splits else self._rows(output)
        inputs = list(torch.split(given, in_splits)) if in_splits else self._rows(given)
        return self._run(lambda run: run.all_to_all(outputs, inputs), [output])

    def _barrier(self, opts: Any = None) -> Work:
        return self._run(lambda run: run.barrier(), [])

    def _send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        return self._submit(self._thread("send", peer), lambda: self._collectives.send(tensors, peer, tag), tensors)

    def _recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        thread = self._thread("receive", peer)
        return self._submit(thread, lambda: self._collectives.receive(tensors, peer, tag), tensors)

    def _recv_any(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        return self._submit(self._thread("receive"), lambda: self._collectives.receive_any(tensors, tag), tensors)

    def _rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        size = self._mesh.size
        rows = tensor.view(-1) if tensor.is_contiguous() else tensor
        count = rows.shape[0] if rows.dim() else 1
        if count % size:
            raise CollectiveMisuse(f"{count} elements cannot be dealt out to {size} ranks", hint="pad the tensor")
        return list(rows.tensor_split(size)) if count else [rows] * size


def device_of(args: Iterable[Any]) -> torch.device | None:
    """Device of the first tensor of a call; None if there is none."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
        if isinstance(arg, list) and (found := device_of(arg)) is not None:
            return found
    return None


_METHODS: dict[str, Callable[..., Work]] = {
    "allreduce": MeshTransport._all_reduce,
    "allreduce_coalesced": MeshTransport._all_reduce,
    "broadcast": MeshTransport._broadcast,
    "allgather": MeshTransport._all_gather,
    "_allgather_base": MeshTransport._all_gather_into,
    "all_gather_single": MeshTransport._all_gather_into,
    "allgather_into_tensor_coalesced": MeshTransport._all_gather_into_many,
    "all_gather_single_coalesced": MeshTransport._all_gather_into_many,
    "allgather_coalesced": MeshTransport._all_gather_coalesced,
    "reduce_scatter": MeshTransport._reduce_scatter,
    "_reduce_scatter_base": MeshTransport._reduce_scatter_from,
    "reduce_scatter_single": MeshTransport._reduce_scatter_from,
    "reduce_scatter_tensor_coalesced": MeshTransport._reduce_scatter_from_many,
    "reduce_scatter_single_coalesced": MeshTransport._reduce_scatter_from_many,
    "tree_reduce": MeshTransport._tree_reduce,
    "reduce": MeshTransport._reduce,
    "gather": MeshTransport._gather,
    "scatter": MeshTransport._scatter,
    "alltoall": MeshTransport._all_to_all,
    "alltoall_base": MeshTransport._all_to_all_single,
    "all_to_all_single": MeshTransport._all_to_all_single,
    "barrier": MeshTransport._barrier,
    "send": MeshTransport._send,
    "recv": MeshTransport._recv,
    "recv_anysource": MeshTransport._recv_any,
}


def _each(call: Callable[..., None], *lists: Any) -> None:
    for items in zip(*lists, strict=True):
        call(*items)

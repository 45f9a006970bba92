"""World-invariant mode: the same bits for any number of replicas.

The gradient of each micro-batch is computed separately, on every rank by the same operations on the same data with the
same random numbers, and all are added in one tree that depends on the number of micro-batches only
(`regrow.step.dealing`). No wrapper of a model reduces anything: DDP and the replicate dimension of HSDP are bypassed.
The sums over ranks of parameters without FSDP overlap with the last backward, those of HSDP follow it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from regrow.comm.collectives import PIECE_BYTES
from regrow.comm.torch_private import ddp, fsdp_gradients
from regrow.comm.torch_private.fsdp_gradients import ShardSums
from regrow.comm.torch_private.internals import Work
from regrow.comm.tree_sum import start_tree_reduce, tree_reduce
from regrow.core.errors import UsageError
from regrow.hydration.shards import is_distributed
from regrow.step.dealing import Counter, MicroBatchRange
from regrow.train.gradients.allocation import keep_freed_memory
from regrow.train.gradients.wrappers import Modules
from regrow.train.state.naming import RUNNING_STATISTICS
from regrow.train.state.protected import ProtectedState

_ALIGN_BYTES = 64
_NONE = -1
_HINT = "leave invariant mode, or"


class TreeSummed:
    """Adds the gradients of a rank's micro-batches like a binary counter, and those of all ranks along the tree.

    Each parameter's gradient is added as soon as it is computed, so only the values of partial nodes are kept: at most
    2 log2 of the number of this rank's micro-batches. A parameter that no micro-batch uses gets a gradient of zeros.

    Args:
        count: micro-batches of a step.
        shard_size: number of ranks over which FSDP shards; it does not change with the number of replicas.

    Raises:
        UsageError: a part of the model cannot have the same bits in all worlds.
    """

    def __init__(self, state: ProtectedState, modules: Modules, *, count: int, shard_size: int) -> None:
        refuse_what_varies(modules)
        self._state, self._modules = state, modules
        self._count, self._shard_size = count, shard_size
        self._sums: list[ShardSums] = []
        self._flat: list[list[Counter[torch.Tensor]]] = []
        self._plain = [each for each in state.parameters() if each.requires_grad and not is_distributed(each)]
        self._counters: list[Counter[torch.Tensor]] = [Counter(count, _added) for _ in self._plain]
        self._accumulating = [_accumulation_of(each) for each in self._plain]
        """Nodes kept alive with their hooks, as autograd keeps them only as long as a graph exists."""
        for at, parameter in enumerate(self._plain):
            self._accumulating[at].register_prehook(partial(self._comes, at, parameter))
            parameter.register_post_accumulate_grad_hook(partial(self._came, at))  # type: ignore[no-untyped-call]
        self._index = _NONE
        self._last_of = [_NONE] * len(self._plain)
        self._joins = [False] * len(self._plain)
        """True if the gradient that is being computed is added to its neighbour's."""
        self._queue: _Queue | None = None
        self._replicas: dist.ProcessGroup | None = ddp.group_of(modules.replicated)
        ddp.take_over_buffers(modules.replicated)
        keep_freed_memory()
        if modules.sharded:
            fsdp_gradients.prepare(modules.sharded, shard_size)
        else:
            self._check_owners()

    def divides_by(self, shares: int) -> int:
        """The shard size, as FSDP takes the mean over its shard dimension; all other reductions are sums."""
        if self._replicas is None and not self._modules.sharded and shares > 1:
            self._replicas = dist.group.WORLD
        if self._replicas is None and self._plain and shares > 1:
            raise UsageError(
                f"a parameter of shape {list(self._plain[0].shape)} is neither DDP's nor FSDP's: nothing sums it up",
                hint="call fully_shard on the root of the model too",
            )
        for group in [self._replicas, *(each.replicas for each in self._sums)]:
            if group is not None and group.size() * self._shard_size != shares:
                raise UsageError(
                    f"gradients are summed over {group.size()} replicas, but the data is dealt out to "
                    f"{shares // self._shard_size}",
                    hint="give session.steps data= the mesh of the ranks that read data of their own",
                )
        return self._shard_size

    def start(self, share: MicroBatchRange) -> None:
        """Begin a step with empty sums."""
        self._clear()
        self._state.drop_gradients()
        self._buffers = self._versions()

    def open(self, index: int, *, last: bool) -> None:
        """Keep DDP from reducing."""
        self._index = index
        ddp.synchronize(self._modules.replicated, False)

    def expect(self, scale: float) -> None:
        """From now on, sum gradients over ranks as the last backward completes them."""
        if self._replicas is not None and self._replicas.size() > 1:
            self._queue = _Queue(self._chunks(PIECE_BYTES), partial(self._sum_up, scale, self._replicas))

    def close(self, index: int) -> None:
        """Add FSDP's gradients, and zeros for unused parameters."""
        for at, parameter in enumerate(self._plain):
            if self._last_of[at] != index:
                parameter.grad = None
                self._push(at, torch.zeros_like(parameter, requires_grad=False))
        self._index = _NONE
        if not self._modules.sharded:
            return
        if not self._sums:
            self._sums = fsdp_gradients.sums_of(self._modules.sharded)
            self._check_owners()
        for at, sums in enumerate(self._sums):
            flats = sums.take()
            if at == len(self._flat):
                self._flat.append([Counter(self._count, _added) for _ in flats])
            for counter, flat in zip(self._flat[at], flats, strict=True):
                counter.push(index, flat)

    def finish(self, scale: float) -> None:
        """Sum the gradients over ranks along the tree, and multiply the sums by `scale`."""
        changed = next((name for name, v in self._versions().items() if self._buffers.get(name) != v), None)
        if changed is not None:
            raise UsageError(
                f"the buffer {changed} was written to in the body: what it holds would depend on which rank computed "
                "which micro-batch",
                hint=f"{_HINT} keep it constant while training",
            )
        for sums, counters in zip(self._sums, self._flat, strict=True):
            sums.put([tree_reduce(_values(each), self._count, scale, sums.replicas) for each in counters])
        if self._queue is None:
            for parameter, counter in zip(self._plain, self._counters, strict=True):
                parameter.grad = tree_reduce(_values(counter), self._count, scale, None)
        else:
            for summed in self._queue.begun:
                for at, gradient in summed.wait():
                    self._plain[at].grad = gradient
        self._clear()

    def abandon(self) -> None:
        """Drop all sums, and let DDP reduce again."""
        self._clear()
        ddp.synchronize(self._modules.replicated, True)

    def _check_owners(self) -> None:
        known = {id(parameter) for sums in self._sums for parameter in sums.parameters}
        for parameter in self._state.parameters():
            if parameter.requires_grad and is_distributed(parameter) and id(parameter) not in known:
                raise UsageError(
                    f"a parameter of shape {list(parameter.shape)} is a DTensor that FSDP does not manage",
                    hint=f"{_HINT} do without tensor parallelism",
                )

    def _clear(self) -> None:
        self._index, self._queue = _NONE, None
        self._last_of, self._joins = [_NONE] * len(self._plain), [False] * len(self._plain)
        for counter in itertools.chain(self._counters, *self._flat):
            counter.clear()

    # --- parameters without FSDP -------------------------------------------------------------------------------

    def _comes(self, at: int, parameter: torch.Tensor, _: object) -> None:
        """Put the neighbour's sum into `grad`, before a backward adds to a parameter's gradient.

        The backward adds to that sum while the new gradient is in the CPU's cache, and frees the gradient at once.
        """
        if self._index not in (_NONE, self._last_of[at]):
            neighbour = self._counters[at].neighbour(self._index)
            parameter.grad, self._joins[at] = neighbour, neighbour is not None

    def _came(self, at: int, parameter: torch.Tensor) -> None:
        """Called after a backward has added to a parameter's gradient: take the gradient over into the sums."""
        gradient = parameter.grad
        if self._index == _NONE or gradient is None:
            return
        shape = list(parameter.shape)
        if gradient.is_sparse:
            raise UsageError(f"the gradient of a parameter of shape {shape} is sparse", hint=f"{_HINT} use dense ones")
        if self._last_of[at] == self._index:
            raise UsageError(
                f"the gradient of a parameter of shape {shape} came in two parts in one backward",
                hint=f"{_HINT} use checkpoint(use_reentrant=False)",
            )
        parameter.grad = None
        self._push(at, gradient, added=self._joins[at])

    def _push(self, at: int, gradient: torch.Tensor, *, added: bool = False) -> None:
        self._last_of[at], self._joins[at] = self._index, False
        self._counters[at].push(self._index, gradient, added=added)
        if self._queue is not None:
            self._queue.done(at)

    def _chunks(self, limit: int) -> list[list[int]]:
        """Indices of parameters in groups of one dtype and device and about `limit` bytes, the last ones first.

        This is roughly the order in which a backward reaches them, and is the same on all ranks.
        """
        chunks: list[list[int]] = []
        size = 0
        for at in reversed(range(len(self._plain))):
            parameter = self._plain[at]
            first = self._plain[chunks[-1][0]] if chunks else parameter
            alike = (parameter.dtype, parameter.device) == (first.dtype, first.device)
            if not chunks or size + parameter.nbytes > limit or not alike:
                chunks.append([])
                size = 0
            chunks[-1].append(at)
            size += parameter.nbytes
        return chunks

    def _sum_up(self, scale: float, group: dist.ProcessGroup, chunk: list[int]) -> "_Summed":
        nodes = [_values(self._counters[at]) for at in chunk]
        for at in chunk:
            self._counters[at].clear()  # so that its memory is freed
        with torch.no_grad():
            places, flats = _flattened(nodes)
        # The layout that gradients have without other ranks, since the order of a norm's sum may depend on it.
        likes = [torch.empty_like(first, device="meta") for first, *_ in nodes]
        return _Summed(chunk, places, likes, flats[0], start_tree_reduce(flats, self._count, scale, group))

    def _versions(self) -> dict[str, int]:
        modules: list[torch.nn.Module] = [*self._modules.replicated, *self._modules.plain]
        return {name: buffer._version for module in modules for name, buffer in torch.nn.Module.named_buffers(module)}


@dataclass(frozen=True)
class _Summed:
    """Gradients of some parameters, which are being summed over all ranks.

    likes: meta tensors with the gradients' layouts. total: flat tensor of the sums; each begins at its place.
    """

    chunk: list[int]
    places: list[int]
    likes: list[torch.Tensor]
    total: torch.Tensor
    work: Work | None

    def wait(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Wait for the sums; yield each parameter's index and its gradient. Raises what collectives raise."""
        if self.work is not None:
            self.work.wait()
        for at, start, like in zip(self.chunk, self.places, self.likes, strict=True):
            gradient = self.total[start : start + like.numel()].view(like.shape)
            if not like.is_contiguous():
                gradient = torch.empty_like(like, device=gradient.device).copy_(gradient)
            yield at, gradient


class _Queue:
    """Begins to sum one chunk of parameters after another, in an order that is the same on all ranks.

    Args:
        chunks: indices of parameters.
        begin: begins to sum a chunk whose gradients are all complete.
    """

    def __init__(self, chunks: list[list[int]], begin: Callable[[list[int]], _Summed]) -> None:
        self._chunks, self._begin = chunks, begin
        self._missing = [len(chunk) for chunk in chunks]
        self._chunk_of = {at: number for number, chunk in enumerate(chunks) for at in chunk}
        self.begun: list[_Summed] = []

    def done(self, at: int) -> None:
        """Note that the gradient of one parameter is complete."""
        self._missing[self._chunk_of[at]] -= 1
        while len(self.begun) < len(self._chunks) and not self._missing[len(self.begun)]:
            self.begun.append(self._begin(self._chunks[len(self.begun)]))


def _accumulation_of(parameter: torch.Tensor) -> Any:
    """The autograd node that adds to a parameter's `grad` in every graph; `torch.autograd.grad` does not run it."""
    with torch.enable_grad():
        made: Any = parameter.view_as(parameter).grad_fn
    return made.next_functions[0][0]


def _added(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


def _values(counter: Counter[torch.Tensor]) -> list[torch.Tensor]:
    return [value for _, value in counter.nodes]


def _flattened(nodes: Sequence[Sequence[torch.Tensor]]) -> tuple[list[int], list[torch.Tensor]]:
    """Nodes of several parameters as one: the aligned start of each parameter, and a flat tensor for each node."""
    align = _ALIGN_BYTES // nodes[0][0].element_size()
    places, end = [], 0
    for first, *_ in nodes:
        places.append(end)
        end += -(-first.numel() // align) * align
    flats = [nodes[0][0].new_empty(end) for _ in nodes[0]]
    for start, stop, values in zip(places, [*places[1:], end], nodes, strict=True):
        for flat, value in zip(flats, values, strict=True):
            flat[start : start + value.numel()].view(value.shape).copy_(value)
            flat[start + value.numel() : stop].zero_()
    return places, flats


def refuse_what_varies(modules: Modules) -> None:
    """Raise `UsageError` for parts of a model that cannot be bitwise the same in all worlds."""
    roots: list[torch.nn.Module] = [*modules.replicated, *modules.plain]
    for root in roots:
        for name, module in root.named_modules():
            if isinstance(module, RUNNING_STATISTICS) and module.track_running_stats and module.training:
                raise UsageError(
                    f"{name or 'the model'} is a {type(module).__name__} whose running statistics change in training: "
                    "they would depend on which rank computed which micro-batch, and in what order",
                    hint=f"{_HINT} use LayerNorm or GroupNorm, or track_running_stats=False",
                )
    if torch.get_num_threads() != 1 and not torch.accelerator.is_available():
        raise UsageError(
            f"{torch.get_num_threads()} threads compute on this rank: some kernels add in an order that depends on it",
            hint="call torch.set_num_threads(1) after regrow.init(), or do not change what that has set",
        )

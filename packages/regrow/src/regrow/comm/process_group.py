"""A process group of the script, as `torch.distributed` and DDP use it."""

from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from regrow.comm import checking, nccl
from regrow.comm.echo import EchoTransport
from regrow.comm.flight import FLIGHT
from regrow.comm.observers import POINT_TO_POINT, AskedCollective, CallTaker, Done, Moments, Tape
from regrow.comm.past_calls import PastCalls
from regrow.comm.set_up import SetUp
from regrow.comm.torch_private import internals
from regrow.comm.torch_private.internals import ProcessGroup, Work
from regrow.comm.torch_private.nccl_group import BACKEND, Wanted
from regrow.comm.transport import MeshTransport, Transport, device_of
from regrow.comm.work import NO_TIMEOUT, joint_work
from regrow.core.early_reads import EarlyReads, PlaceInWorld
from regrow.core.errors import GenerationHalted
from regrow.core.ids import Generation, Seconds
from regrow.devices import accelerators, nvidia

_COLLECTIVES = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class Owner(Protocol):
    """All groups of the worker, as one group uses them: an interface of `regrow.comm.groups.Groups`."""

    generation: Generation
    halted: bool
    refused: bool
    refused_call: str
    in_flight: bool
    draining: bool
    moments: Moments
    early: EarlyReads | None
    tape: Tape | None
    between: CallTaker | None
    set_up: SetUp | None
    past: PastCalls | None

    def destroy(self, group: "RegrowGroup") -> None:
        """Call the functions that wait for the end of a group which the script destroys, then forget the group."""
        ...

    def drop(self, group: "RegrowGroup") -> None:
        """Forget a group, and free its resources."""
        ...


class RegrowGroup(ProcessGroup):
    """A process group that forwards calls to a transport, which can be replaced.

    DDP and all functions of `torch.distributed` hold this object; they never see the transport.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, groups: Owner, wanted: Wanted, rank: int, *, run_s: Seconds, devices: bool = True) -> None:
        size = len(wanted.ranks)
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._groups = groups
        self._name = wanted.name
        self.wanted, self.devices = wanted, devices
        self.ranks = list(wanted.ranks)
        self.run_s = run_s
        """Time limit of one collective."""
        self.key = wanted.name
        """Name of the group in the store: the same on all of its ranks, and unique in a generation."""
        self.number = 0
        """Number of this group among this worker's groups, in the order in which the script made them."""
        self.sign = 0
        """The group's `key` as a number."""
        self.calls = 0
        """Number of collectives in this generation, without sends and receives; the same on all ranks."""
        self._place, self._count = rank, size
        self.transport: Transport | None = None
        self.echo: EchoTransport | None = None
        """Answers in place of the transport, while it is set."""
        self._coalescing: list[Work] | None = None
        self._coalesced_by: Transport | None = None

    @property
    def place(self) -> int:
        """This worker's rank in the group, read by regrow; a read by the script, `rank`, is noted."""
        return self._place

    def take_rank(self, rank: int) -> None:
        """Take another rank of the group."""
        self._place = rank

    def resize(self, ranks: list[int]) -> None:
        """Replace the ranks of the group; `take_rank` sets this worker's own."""
        self.ranks, self._count = ranks, len(ranks)

    def rank(self) -> int:
        """This worker's rank in the group."""
        if self._groups.early is not None:
            self._groups.early.note(PlaceInWorld.RANK, "get_rank()")
        return self._place

    def size(self) -> int:
        """Number of ranks in the group."""
        if self._groups.early is not None:
            self._groups.early.note(PlaceInWorld.WORLD, "get_world_size()")
        return self._count

    def getRank(self) -> int:
        """This worker's rank in the group."""
        return self.rank()

    def getSize(self) -> int:
        """Number of ranks in the group."""
        return self.size()

    def name(self) -> str:
        """The backend's name."""
        return BACKEND

    def getBackendName(self) -> str:
        """The backend's name."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The group's name in torch's registry."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in accelerators.kinds() if kind != nvidia.KIND or nccl.available()]

    def _get_backend(self, device: torch.device) -> Any:
        """Backend of a device: this group itself, for every device."""
        return self

    def forget_coalescing(self) -> None:
        """Drop the calls that are being coalesced, because their generation is over or one of them has failed."""
        transport, self._coalescing, self._coalesced_by = self._coalesced_by, None, None
        if transport is not None:
            transport.give_up_coalescing()

    @property
    def groups_sends(self) -> bool:
        """True if the sends and receives of a batch must be issued together to avoid a deadlock."""
        return self.echo is None and isinstance(self.transport, nccl.NcclTransport)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []
        transport = self.transport if self.echo is None else None
        self._coalesced_by = transport if transport is not None and transport.start_coalescing(device) else None

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        transport, self._coalesced_by = self._coalesced_by, None
        if transport is None:
            return joint_work(works)
        work = transport.end_coalescing(device)
        if work is None:
            raise GenerationHalted(f"generation {self._groups.generation} is over")
        set_up = self._groups.set_up
        return work if set_up is None or self.echo is not None else set_up.together(work)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. Raises `DeadlineExceeded`; the coordinator reports which ranks are missing."""
        work: Work = self.forward("barrier", (), {})
        work.wait(timeout or NO_TIMEOUT)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of later collectives."""
        self.run_s = timeout.total_seconds()
        transport = self.transport
        if transport is not None:
            transport.set_timeout(self.run_s)

    _set_default_timeout = set_timeout
    """The same method under the name by which `torch.distributed` calls it."""

    def shutdown(self) -> None:
        """Forget the group, which the script destroys: it is not formed again."""
        self._groups.destroy(self)

    def abort(self) -> None:
        """Forget the group and free its resources, as `shutdown` does."""
        self._groups.drop(self)

    def forward(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run one method on the transport. Raises `GenerationHalted` at once if the generation is over.

        Raises `CollectiveMisuse` before anything is sent, if the call cannot be right.
        """
        try:
            return self._forward(name, args, options)
        except BaseException:
            if self._coalesced_by is not None:
                self.forget_coalescing()  # torch's manager does not close the batch that it has opened
            raise

    def _forward(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.devices and nccl.on_device(args):
            nccl.refuse_captured(name, args)
        else:
            checking.check(name, args, options, self._count)
        for notify in self._groups.moments.called:
            notify(name, self._count)
        between = self._groups.between
        if between is not None and self._coalescing is None and name not in POINT_TO_POINT:
            work = between.work_of(
                AskedCollective(name, self._count, self.echo is not None, self._answer, args, options)
            )
            if work is not None:
                return work
        return self._answer(name, args, options)

    def _answer(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.echo is not None:
            past = self._groups.past
            answered = past.answer(self, name, args, options) if past is not None else None
            if answered is not None:
                return self._kept(answered)
            return self._kept(self.echo.call(name, args, options, self._recorded(name, args, options)))
        set_up = self._groups.set_up
        if set_up is None:
            return self._kept(self._call(name, args, options))
        return self._kept(set_up.answer(self, name, args, options, lambda: self._call(name, args, options)))

    def _recorded(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Done | None:
        tape, past = self._groups.tape, self._groups.past
        taped = tape.record(self.number, self._place, name, args, options) if tape is not None else None
        noted = past.record(self, name, args, options) if past is not None and self.echo is None else None
        if taped is None or noted is None:
            return taped or noted
        return lambda: (taped(), noted())[-1]

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        groups, transport = self._groups, self.transport
        if (groups.halted and not groups.draining) or transport is None:
            groups.refused, groups.refused_call = True, name
            raise GenerationHalted(f"{name}: generation {groups.generation} is over")
        moments = groups.moments
        for notify in moments.starts:
            notify(self, name, args, options)
        if name not in POINT_TO_POINT:
            self.calls += 1
        FLIGHT.name(f"{name} on {self.key}")
        groups.in_flight = groups.in_flight or _enqueued(transport, args)
        result = transport.call(name, args, options, self._recorded(name, args, options))
        for received in moments.answered:
            received(name)
        return result

    def _kept(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


def _enqueued(transport: Transport, args: tuple[Any, ...]) -> bool:
    """True if a call may still run on a device after a wait for its work; never for calls on the socket mesh."""
    device = None if isinstance(transport, MeshTransport) else device_of(args)
    return device is not None and accelerators.is_accelerator(device)


def _forwarding(name: str) -> Callable[..., Work]:
    def method(self: RegrowGroup, *args: Any, **options: Any) -> Work:
        result: Work = self.forward(name, args, options)
        return result

    method.__name__ = name
    method.__doc__ = f"`ProcessGroup.{name}`, on whatever transport the group has now."
    return method


for _name in _COLLECTIVES:
    setattr(RegrowGroup, _name, _forwarding(_name))
# `torch.compile` around DDP meets these methods when DDP's reducer calls them, and cannot trace into a group.
internals.keep_from_compiler(*(each for each in vars(RegrowGroup).values() if isinstance(each, FunctionType)))


def send_together(operations: list[dist.P2POp]) -> list[Work] | None:
    """Issue a batch of sends and receives as one call, if necessary; None: separate calls are right."""
    asked: dist.ProcessGroup | None = operations[0].group  # torch's annotation does not allow for the default group
    device = operations[0].tensor.device
    group = dist.group.WORLD if asked is None else asked
    if not isinstance(group, RegrowGroup) or not nccl.serves(device) or not group.groups_sends:
        return None
    return internals.coalesced(group, device, operations)


class EchoScope:
    """Context in which all groups answer locally, whatever happens to their transports. Scopes may be nested."""

    def __init__(self, groups: list[RegrowGroup]) -> None:
        self._groups = groups
        self._outer: dict[RegrowGroup, EchoTransport | None] = {}

    def __enter__(self) -> None:
        self._outer = {group: group.echo for group in self._groups}
        for group in self._groups:
            group.echo = EchoTransport(group.rank(), group.size())

    def __exit__(self, *_: object) -> None:
        for group in self._groups:
            group.echo = self._outer.get(group)

"""The `regrow` backend of `torch.distributed`: groups that stay while what is under them is re-formed."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from regrow.comm import nccl, private
from regrow.comm.echo import EchoTransport
from regrow.comm.mesh import Mesh, Site
from regrow.comm.private import ProcessGroup, Work
from regrow.comm.store import AgentStore
from regrow.comm.transport import MeshTransport, Transport
from regrow.core.errors import GenerationHalted
from regrow.core.ids import Generation, Seconds

BACKEND = "regrow"

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


@dataclass(frozen=True)
class Formation:
    """What a worker needs to form its groups of one generation."""

    generation: Generation
    rank: int
    world: int
    store: str
    site: Site


class RegrowGroup(ProcessGroup):
    """A process group that forwards to a transport, which can be replaced under it.

    DDP and every function of `torch.distributed` hold this object; they never see the transport.
    """

    def __init__(self, groups: "Groups", name: str, ranks: list[int], rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._groups = groups
        self._name = name
        self.ranks = ranks
        self.key = name
        """What it is called in the store: the same on all of its ranks, and never used twice in a generation."""
        self._place, self._count = rank, size
        self.transport: Transport | None = None
        self.echo: EchoTransport | None = None
        """While set, it answers instead of the transport."""

    def seat(self, rank: int) -> None:
        """Take another rank of the group."""
        self._place = rank

    def rank(self) -> int:
        """This worker's rank in the group."""
        return self._place

    def size(self) -> int:
        """How many ranks the group has."""
        return self._count

    def getRank(self) -> int:
        """This worker's rank in the group."""
        return self._place

    def getSize(self) -> int:
        """How many ranks the group has."""
        return self._count

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
        return [torch.device("cpu")] + ([torch.device("cuda")] if nccl.available() else [])

    def forward(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run one method on the transport. Raises `GenerationHalted` at once when the generation is over."""
        if self.echo is not None:
            return self.echo.call(name, args, options)
        groups, transport = self._groups, self.transport
        if (groups.halted and not groups.draining) or transport is None:
            groups.refused = True
            raise GenerationHalted(f"{name}: generation {groups.generation} is over")
        if groups.on_collective is not None:
            groups.on_collective(name)
        result = transport.call(name, args, options)
        if groups.after_collective is not None:
            groups.after_collective(name)
        return result


def _forwarding(name: str) -> Callable[..., Work]:
    def method(self: RegrowGroup, *args: Any, **options: Any) -> Work:
        result: Work = self.forward(name, args, options)
        return result

    method.__name__ = name
    method.__doc__ = f"`ProcessGroup.{name}`, on whatever transport the group has now."
    return method


for _name in _COLLECTIVES:
    setattr(RegrowGroup, _name, _forwarding(_name))


class Groups:
    """All groups of this worker: made in the script's order, halted and re-formed together."""

    def __init__(self) -> None:
        self.generation = Generation(0)
        self.halted = False
        self.refused = False
        """Whether a collective was refused since the generation was formed."""
        self.draining = False
        """While set, collectives of a halted generation are run on what had arrived before the halt."""
        self.on_collective: Callable[[str], None] | None = None
        self.after_collective: Callable[[str], None] | None = None
        self._groups: list[RegrowGroup] = []
        self._made: Counter[str] = Counter()
        self._formation: Formation | None = None
        self._store: AgentStore | None = None
        self._lock = threading.Lock()

    # --- making groups -----------------------------------------------------------------------------------------

    def install(self, *, rank: int, world: int, formation: Formation | None, form_s: Seconds) -> None:
        """Register the backend and make the default group.

        Args:
            rank: this worker's rank, provisional for a standby.
            world: ranks in the world.
            formation: the generation to form for real; None: an echo world, until `form` is called.
            form_s: deadline for forming one group, in seconds.
        """
        self._form_s = form_s
        if not hasattr(private.Backend, BACKEND.upper()):
            private.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
        global _current
        _current = self
        if formation is not None:
            self._open(formation)
        hook = sys.excepthook
        dist.init_process_group(BACKEND, store=private.HashStore(), rank=rank, world_size=world)
        sys.excepthook = hook  # torch's prints a traceback of its own; under an agent the script's error is shown once

    def make(self, name: str, ranks: list[int], rank: int, size: int) -> RegrowGroup:
        """A new group of the script's, on an echo transport or on the present generation."""
        group = RegrowGroup(self, name, ranks or list(range(size)), rank, size)
        # Ranks are in different groups, so a count of their own would not mean the same one to all of them.
        group.key = f"{name}.{self._made[name]}"
        self._made[name] += 1
        self._groups.append(group)
        self._give_transport(group)
        return group

    def _give_transport(self, group: RegrowGroup) -> None:
        formation, store = self._formation, self._store
        if formation is None or store is None:
            group.transport = EchoTransport(group.size())
            return
        mesh = MeshTransport(Mesh(store, f"mesh/{group.key}", group.rank(), group.size(), formation.site))
        transport: Transport = mesh
        if nccl.available():
            keys = private.PrefixStore(f"nccl/{group.key}", store)
            transport = nccl.NcclTransport(mesh, keys, group.rank(), group.size())
        with self._lock:
            if self.halted:
                raise GenerationHalted(f"generation {self.generation} was halted while its groups were formed")
            group.transport = transport
        transport.form(self._form_s)

    def _open(self, formation: Formation) -> None:
        store = AgentStore(formation.store, formation.site.token, f"g{formation.generation}/")
        with self._lock:
            self._store, self._formation = store, formation
            self.generation, self.halted, self.refused = formation.generation, False, False

    # --- re-forming --------------------------------------------------------------------------------------------

    def form(self, formation: Formation, is_halted: Callable[[], bool]) -> Seconds:
        """Form every group anew, in the order in which the script made them; returns the seconds it took.

        Raises `GenerationHalted` when `halt` is called meanwhile, or was before (`is_halted`).
        """
        started = time.monotonic()
        self.retire()
        self._open(formation)
        if is_halted():
            self.halt()
        for group in self._groups:
            if formation.rank in group.ranks:
                group.seat(group.ranks.index(formation.rank))
            self._give_transport(group)
        return time.monotonic() - started

    def serves(self, generation: Generation) -> bool:
        """Whether the groups stand in this generation already: those of the first workers form while they build."""
        return self._formation is not None and self.generation == generation and not self.halted

    def halt(self) -> None:
        """End all that is blocked in a collective, and refuse new ones. From any thread."""
        with self._lock:
            self.halted = True
            transports = [group.transport for group in self._groups if group.transport is not None]
            store = self._store
        if store is not None:
            store.close()
        for transport in transports:
            transport.halt()

    def retire(self) -> None:
        """Halt and free the transports and the store of the generation that was."""
        with self._lock:
            transports = [group.transport for group in self._groups if group.transport is not None]
            for group in self._groups:
                group.transport = None
            store, self._store = self._store, None
        for transport in transports:
            transport.halt()
            transport.close()
        if store is not None:
            store.close()

    def broke(self) -> bool:
        """Whether a collective has failed in this generation."""
        return any(group.transport.broke() for group in self._groups if group.transport is not None)

    # --- rehearsing --------------------------------------------------------------------------------------------

    def echo(self) -> "EchoScope":
        """Within this, every group answers locally."""
        return EchoScope(self._groups)

    def close(self) -> None:
        """End all transports and leave `torch.distributed`."""
        self.halt()
        self.retire()
        if dist.is_initialized():
            dist.destroy_process_group()


_current: Groups | None = None


def _create(options: Any, _: object) -> RegrowGroup:
    if _current is None:
        raise GenerationHalted("the regrow backend serves only processes that called regrow.init()")
    ranks = list(options.global_ranks_in_group)
    return _current.make(options.group_id, ranks, options.group_rank, options.group_size)


class EchoScope:
    """Lets all groups answer locally, whatever happens to their transports meanwhile."""

    def __init__(self, groups: list[RegrowGroup]) -> None:
        self._groups = groups

    def __enter__(self) -> None:
        for group in self._groups:
            group.echo = EchoTransport(group.size())

    def __exit__(self, *_: object) -> None:
        for group in self._groups:
            group.echo = None

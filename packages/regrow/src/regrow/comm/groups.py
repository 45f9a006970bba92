"""The `regrow` backend of `torch.distributed`: groups that persist while their transports are re-formed."""

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from regrow.comm import nccl
from regrow.comm.echo import EchoTransport
from regrow.comm.group_ranks import RankInWorld, fixed, moved, spans
from regrow.comm.links import Links, Site
from regrow.comm.observers import CallObserver, CallTaker, Moments, Tape
from regrow.comm.past_calls import PastCalls
from regrow.comm.process_group import EchoScope, RegrowGroup, send_together
from regrow.comm.refusing_store import RefusingStore
from regrow.comm.set_up import SetUp
from regrow.comm.socket_mesh import SocketMesh
from regrow.comm.store import AgentStore
from regrow.comm.torch_private import expected_names, group_backends, internals
from regrow.comm.torch_private.nccl_group import BACKEND, Wanted
from regrow.comm.transport import MeshTransport, Transport
from regrow.core.early_reads import EarlyReads
from regrow.core.errors import CollectiveMisuse, GenerationHalted, StateError, UsageError
from regrow.core.ids import Generation, Seconds
from regrow.devices import accelerators


@dataclass(frozen=True)
class Formation:
    """The data from which a worker forms its groups of one generation."""

    generation: Generation
    rank: int
    world: int
    store: str
    site: Site


class Groups:
    """All groups of this worker: made in the script's order, halted and re-formed together."""

    def __init__(self) -> None:
        self.generation = Generation(0)
        self.halted = False
        self.refused = False
        """True if a collective was refused since the generation was formed."""
        self.refused_call = ""
        """Name of the last refused collective."""
        self.in_flight = False
        """True if a collective may still run on a device: one was enqueued since the last wait for the device."""
        self.draining = False
        """While True, collectives of a halted generation run on data that had arrived before the halt."""
        self.moments = Moments()
        """Methods of observers, by the moment at which they are called; see `observers`."""
        self.tape: Tape | None = None
        """Records each collective of a body, whether peers or this process answer it."""
        self.early: EarlyReads | None = None
        """Notes reads of a group's rank or size by the script, while these may still change."""
        self.on_leaving: Callable[[], None] | None = None
        """Called before the script destroys the group of all ranks."""
        self.between: CallTaker | None = None
        """Gets each collective first, and may answer it in place of the peers; None: no such object."""
        self.set_up: SetUp | None = None
        """Handles the script's collectives until its loop; None after that."""
        self.past: PastCalls | None = None
        """Records answers between two steps, and repeats them for a worker that reaches that code later."""
        self.in_hook = ""
        """Name of the script's hook that is running, which may run less often on a replaced rank; else empty."""
        self.unit = 1
        """Number of ranks in one replica."""
        self._observers: tuple[CallObserver, ...] = ()
        self._groups: list[RegrowGroup] = []
        self._followers: list[object] = []
        self._inside: list[object] = []
        self._rank_in_world = RankInWorld(0, 1)
        self._made: Counter[tuple[int, ...]] = Counter()
        self._count = 0
        self._formation: Formation | None = None
        self._store: AgentStore | None = None
        self._lone = RefusingStore()  # torch does not keep the Python part of a store alive
        self._lock = threading.Lock()

    @property
    def observers(self) -> tuple[CallObserver, ...]:
        """Observers of all collectives, in the order in which they are notified; see `comm/observers.py`."""
        return self._observers

    @observers.setter
    def observers(self, observers: tuple[CallObserver, ...]) -> None:
        self._observers, self.moments = observers, Moments.of(observers)

    # --- making groups -----------------------------------------------------------------------------------------

    def install(self, *, rank: int, world: int, formation: Formation | None, form_s: Seconds) -> None:
        """Register the backend and make the default group.

        Args:
            rank: this worker's rank, provisional for a standby.
            world: number of ranks in the world.
            formation: the generation to connect to; None: answer locally until `form` is called.
            form_s: deadline for forming one group, in seconds.

        Raises `UsageError` if this torch lacks names that regrow uses.
        """
        expected_names.check()
        self._form_s = form_s
        self._rank_in_world = RankInWorld(rank, world)
        if not hasattr(internals.Backend, BACKEND.upper()):
            internals.Backend.register_backend(BACKEND, _create, extended_api=True, devices=accelerators.kinds())
            group_backends.serve(RegrowGroup)
            internals.serve_by(RegrowGroup, set_timeout=RegrowGroup.set_timeout, send_together=send_together)
        global _current
        _current = self
        if formation is not None:
            self._open(formation)
        hook = sys.excepthook
        dist.init_process_group(BACKEND, store=self._lone, rank=rank, world_size=world)
        sys.excepthook = hook  # torch's hook adds a traceback of its own; an agent shows the script's error once

    def make(self, wanted: Wanted, rank: int, *, run_s: Seconds, devices: bool = True) -> RegrowGroup:
        """Make a group for the script, which answers locally or belongs to the present generation.

        Args:
            wanted: its name, its ranks in the world, and options.
            rank: this worker's rank in the group.
            run_s: time limit of one of its collectives, in seconds.
            devices: True: tensors on devices use their own library (NCCL); False: all tensors use the socket mesh.
        """
        self._refuse_in_hook("makes")
        group = RegrowGroup(self, wanted, rank, run_s=run_s, devices=devices)
        group.number, self._count = self._count, self._count + 1
        self._name_in_store(group)
        self._groups.append(group)
        self._give_transport(group)
        return group

    def _name_in_store(self, group: RegrowGroup) -> None:
        # Ranks are in different groups, so a common counter would differ between them; and torch's names of groups
        # depend on the world in which they were made.
        ranks = tuple(group.ranks)
        group.key = f"{xxhash.xxh3_64_hexdigest(repr(ranks).encode())}.{self._made[ranks]}"
        self._made[ranks] += 1
        group.sign, group.calls = xxhash.xxh3_64_intdigest(group.key.encode()) or 1, 0

    def _give_transport(self, group: RegrowGroup) -> None:
        formation, store = self._formation, self._store
        if formation is None or store is None:
            group.transport = EchoTransport(group.rank(), group.size())
            return
        links = Links(store, f"mesh/{group.key}", group.rank(), group.size(), formation.site, group.ranks)
        mesh = MeshTransport(SocketMesh(links), group.run_s)
        transport: Transport = mesh
        if group.devices and nccl.available():
            keys = internals.PrefixStore(f"nccl/{group.key}", store)
            wanted = replace(group.wanted, ranks=group.ranks)
            transport = nccl.NcclTransport(mesh, keys, group.rank(), group.size(), run_s=group.run_s, wanted=wanted)
        with self._lock:
            if self.halted:
                raise GenerationHalted(f"generation {self.generation} was halted while its groups were formed")
            group.transport = transport
        transport.form(self._form_s)

    def destroy(self, group: RegrowGroup) -> None:
        """Forget a group that the script destroys, after calling `on_leaving` if it is the default group."""
        self._refuse_in_hook("destroys")
        if self.on_leaving is not None and self._groups and group is self._groups[0]:
            self.on_leaving()
        self.drop(group)

    def _refuse_in_hook(self, does: str) -> None:
        if self.in_hook:
            raise UsageError(
                f"{self.in_hook} {does} a group of torch.distributed, which a rank that is replaced would not have "
                "done as often",
                hint="make groups before it, in the script itself: they are formed anew by themselves",
            )

    def drop(self, group: RegrowGroup) -> None:
        """Forget a group, and free its resources."""
        with self._lock:
            for known in (self._groups, self._followers, self._inside):
                if group in known:
                    known.remove(group)
            transport, group.transport = group.transport, None
        if transport is not None:
            transport.halt()
            transport.close()

    def _open(self, formation: Formation) -> None:
        store = AgentStore(formation.store, formation.site.token, f"g{formation.generation}/")
        with self._lock:
            self._store, self._formation = store, formation
            self.generation, self.halted, self.refused = formation.generation, False, False

    # --- re-forming --------------------------------------------------------------------------------------------

    def form(self, formation: Formation, is_halted: Callable[[], bool]) -> Seconds:
        """Form every group anew, in the order in which the script made them; returns the duration in seconds.

        Raises `GenerationHalted` when `halt` is called meanwhile, or was called before (`is_halted`).
        """
        started = time.monotonic()
        self.retire()
        if nccl.available():
            accelerators.give_back_memory()  # connections need memory beside torch's, which may have kept all of it
        self._open(formation)
        if is_halted():
            self.halt()
        self._made.clear()
        self._follow(RankInWorld(formation.rank, formation.world))
        for group in self._groups:
            if formation.rank not in group.ranks:
                raise StateError(
                    f"this worker was built for another rank: rank {formation.rank} is not in its group of ranks "
                    f"{group.ranks}",
                    hint="a rank whose groups differ from its neighbours' must be filled by a worker built for it",
                )
            group.take_rank(group.ranks.index(formation.rank))
            self._name_in_store(group)
            self._give_transport(group)
        return time.monotonic() - started

    def take_rank(self, rank: int, world: int) -> None:
        """Take this rank, possibly in a world of another size, in all groups that have it; for local answers only."""
        self._follow(RankInWorld(rank, world))
        for group in self._groups:
            if rank in group.ranks:
                group.take_rank(group.ranks.index(rank))

    def _follow(self, rank_in_world: RankInWorld) -> None:
        """Give all groups their ranks in a world of another size, or for another rank of this worker."""
        before, self._rank_in_world = self._rank_in_world, rank_in_world
        for group in self._groups:
            follows = self._follows(group)
            if before == rank_in_world or fixed(group.ranks, before, self.unit, follows=follows):
                continue
            if follows is None:
                # In a world of one replica the group could not be recognized any more.
                known = self._followers if spans(group.ranks, before, self.unit) else self._inside
                known.append(group)
            group.resize(moved(group.ranks, before, rank_in_world, self.unit, follows=follows))
            internals.name_ranks(group, group.ranks)

    def let_follow(self, across: Iterable[object], inside: Iterable[object]) -> None:
        """Declare which groups contain ranks of all replicas (`across`), and which are inside one replica.

        The ranks of a group do not show that while there is only one replica.
        """
        self._followers.extend(across)
        self._inside.extend(inside)

    def _follows(self, group: RegrowGroup) -> bool | None:
        if group is self._groups[0] or any(group is each for each in self._followers):
            return True
        return False if any(group is each for each in self._inside) else None

    def take_over(self, between: CallTaker) -> None:
        """Let `between` get each collective first, and let `between.past` record the answers."""
        self.between, self.past = between, between.past

    def fixed(self) -> str:
        """Reason why the world of these groups cannot change its size, for people; empty if it can."""
        reasons = (
            fixed(each.ranks, self._rank_in_world, self.unit, follows=self._follows(each)) for each in self._groups
        )
        return next((reason for reason in reasons if reason), "")

    @property
    def count(self) -> int:
        """Number of groups to which this worker belongs."""
        return len(self._groups)

    def vote(self) -> None:
        """Wait until every rank of the world has called this in this generation. Raises errors of collectives."""
        self._groups[0].forward("barrier", (), {}).wait()

    def least(self, mine: torch.Tensor) -> torch.Tensor:
        """Elementwise minimum of all ranks' tensors, which have one size. Raises errors of collectives."""
        gathered, options = mine.clone(), internals.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._groups[0].forward("allreduce", ([gathered], options), {}).wait()
        return gathered

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in the order of ranks; all have one size. Raises errors of collectives."""
        world = self._groups[0]
        gathered = [torch.empty_like(mine) for _ in range(world.size())]
        world.forward("allgather", ([gathered], [mine]), {}).wait()
        return gathered

    def serves(self, generation: Generation) -> bool:
        """True if the groups already belong to this generation: the first workers form theirs while they build."""
        return self._formation is not None and self.generation == generation and not self.halted

    def halt(self) -> None:
        """End every call that is blocked in a collective, and refuse new ones. From any thread."""
        with self._lock:
            self.halted = True
            transports = [group.transport for group in self._groups if group.transport is not None]
            store = self._store
        if store is not None:
            store.close()
        for transport in transports:
            transport.halt()

    def retire(self) -> None:
        """Halt the former generation, and free its transports and its store."""
        with self._lock:
            transports = [group.transport for group in self._groups if group.transport is not None]
            for group in self._groups:
                group.transport = None
                group.forget_coalescing()
            store, self._store = self._store, None
        # Calls that were being coalesced when the step was abandoned: torch would add later calls to them.
        internals.calls_being_coalesced().clear()
        for transport in transports:
            transport.halt()
        for transport in transports:
            transport.close()
        if store is not None:
            store.close()

    def broke(self) -> bool:
        """True if a collective has failed in this generation."""
        return any(group.transport.broke() for group in self._groups if group.transport is not None)

    def misuse(self) -> CollectiveMisuse | None:
        """The first error in the script's own calls that made a collective of this generation fail."""
        transports = [group.transport for group in self._groups if group.transport is not None]
        return next((error for transport in transports if (error := transport.misuse()) is not None), None)

    # --- rehearsing --------------------------------------------------------------------------------------------

    def echo(self) -> "EchoScope":
        """Context in which every group answers locally."""
        return EchoScope(self._groups)

    def close(self) -> None:
        """End all transports and leave `torch.distributed`."""
        self.halt()
        self.retire()
        if dist.is_initialized():
            dist.destroy_process_group()


_current: Groups | None = None


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """Context in which collectives are not recorded for newcomers, which skip the code that calls them."""
    groups = _current
    if groups is None:
        yield
        return
    noting, groups.set_up = groups.set_up, None
    try:
        yield
    finally:
        groups.set_up = noting


def _create(options: Any, given: object) -> RegrowGroup:
    if _current is None:
        raise GenerationHalted("the regrow backend serves only processes that called regrow.init()")
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    devices = group_backends.asked_for_devices()
    wanted = Wanted(options.group_id, ranks, given)
    return _current.make(wanted, options.group_rank, run_s=options.timeout.total_seconds(), devices=devices)

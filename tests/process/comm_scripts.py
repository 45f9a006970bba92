"""Bodies of the processes of a world, beyond the cases that are compared one by one."""

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.process import comm_calls
from tests.process.comm_cases import CASES, LARGE, compare, data
from tests.process.comm_world import Seat, as_bytes
from torch.distributed import distributed_c10d as c10d
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from regrow.comm import collectives
from regrow.comm.algorithms import pairwise, rounds
from regrow.comm.echo import EchoTransport
from regrow.comm.groups import Formation, Groups
from regrow.comm.torch_private.internals import AllreduceOptions
from regrow.core.errors import CollectiveMisuse
from regrow.core.ids import Generation


def conform(seat: Seat) -> dict[str, list[bytes]]:
    """Every case twice on ours, in small pieces, and once on gloo; returns what ours answered."""
    collectives.PIECE_BYTES = 4096
    first, again = seat.transport("first"), seat.transport("again")
    gloo = seat.gloo()
    answers = {}
    for name, case in CASES.items():
        answer = case(seat.ours(first), seat.rank, seat.size)
        answers[name] = as_bytes(answer)
        assert answers[name] == as_bytes(case(seat.ours(again), seat.rank, seat.size)), f"{name} gave other bits again"
        compare(name, answer, case(gloo, seat.rank, seat.size))
    return answers


def conform_in_pairs(seat: Seat) -> dict[str, list[bytes]]:
    """The same where on one machine all but the smallest tensors go to one partner after the other, in pieces."""
    rounds.PAIRED_BYTES, pairwise.STEP_BYTES, collectives.WHOLE_BYTES = 64, 4096, 0
    ways = ("all_reduce", "reduce_scatter", "all_gather")
    taken: set[str] = set()

    def noted(way: str) -> Callable[..., None]:
        plain = getattr(pairwise.Pairwise, way)

        def go(*args: Any) -> None:
            taken.add(way)
            plain(*args)

        return go

    for way in ways:
        setattr(pairwise.Pairwise, way, noted(way))
    answers = conform(seat)
    assert taken == (set() if seat.tcp else set(ways))
    return answers


def point_to_point(seat: Seat) -> list[torch.Size]:
    """Everyone sends everyone else large and small tensors, both directions at once, beside a collective."""
    transport = seat.transport("p2p")
    others = [peer for peer in range(seat.size) if peer != seat.rank]
    got = {peer: [torch.zeros(LARGE), torch.zeros(()), torch.zeros(0), torch.zeros(7, 5).t()] for peer in others}
    given = [[data(torch.float32, tuple(tensor.shape), seat.rank, 9) for tensor in got[peer]] for peer in others]
    works = [transport.call("send", (tensors, peer, 3), {}) for peer, tensors in zip(others, given, strict=True)]
    total = torch.ones(LARGE)
    works.append(transport.call("allreduce", ([total],), {}))
    works += [transport.call("recv", (got[peer], peer, 3), {}) for peer in others]
    for work in works:
        work.wait()
    assert torch.equal(total, torch.full((LARGE,), float(seat.size)))
    for peer, tensors in got.items():
        for tensor in tensors:
            assert torch.equal(tensor, data(torch.float32, tuple(tensor.shape), peer, 9))
    return [tensor.shape for tensor in got[others[0]]]


def beyond_gloo(seat: Seat) -> None:
    """gloo has no all-to-all of lists and no stacked gather, so what must come is worked out here."""
    transport, size, rank = seat.transport("lists"), seat.size, seat.rank
    given = [data(torch.float32, (rank + peer, 3), rank, peer) for peer in range(size)]
    got = [torch.zeros(rank + peer, 3) for peer in range(size)]
    transport.call("alltoall", (got, given), {}).wait()
    for peer, tensor in enumerate(got):
        assert torch.equal(tensor, data(torch.float32, (rank + peer, 3), peer, rank))
    stacked = torch.zeros(size, 2, 3)
    transport.call("_allgather_base", (stacked, torch.full((2, 3), float(rank))), {}).wait()
    assert [row.unique().tolist() for row in stacked] == [[float(peer)] for peer in range(size)]


def wrong_tag(seat: Seat) -> str:
    """Rank 1 awaits another tag than rank 0 sends."""
    transport = seat.transport("tags")
    if seat.rank == 0:
        transport.call("send", ([torch.ones(3)], 1, 5), {}).wait()
        return ""
    try:
        transport.call("recv", ([torch.zeros(3)], 0, 6), {}).wait()
    except CollectiveMisuse as error:
        return str(error)
    return "nothing was raised"


def echo(seat: Seat) -> None:
    """All cases in a world of one: exactly what gloo answers."""
    transport, gloo = EchoTransport(0, 1), seat.gloo()
    for name, case in CASES.items():
        answer = case(lambda method, *args: transport.call(method, args, {}).wait(), 0, 1)
        compare(name, answer, case(gloo, 0, 1))


def through_torch(seat: Seat, address: str | None) -> dict[str, Any]:
    """A script on `torch.distributed`, on the regrow backend where a store's address is given, else on gloo."""
    groups = Groups()
    if address is None:
        dist.init_process_group("gloo", store=seat.store("pg"), rank=seat.rank, world_size=seat.size)
    else:
        formation = Formation(Generation(1), seat.rank, seat.size, address, seat.site)
        groups.install(rank=seat.rank, world=seat.size, formation=formation, form_s=30.0)
    found = _script(seat.rank, seat.size)
    if address is not None:
        before = dict(found)
        groups.halt()
        again = Formation(Generation(2), seat.rank, seat.size, address, seat.site)
        groups.form(again, lambda: False)
        assert _collectives(seat.rank, seat.size) == {key: before[key] for key in _collectives(seat.rank, seat.size)}
        groups.close()
        assert not dist.is_initialized()
    return found


def _script(rank: int, size: int) -> dict[str, Any]:
    return {**_collectives(rank, size), **_objects(rank, size), **_subgroups(rank, size)}


def _collectives(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tensors = [torch.full((number + 1,), float(rank + number)) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    found["async"] = [tensor.tolist() for tensor in tensors], [work.is_completed() for work in works]
    total = torch.arange(5.0) * rank
    future = dist.all_reduce(total, op=dist.ReduceOp.MAX, async_op=True).get_future()
    found["future"] = [value.tolist() for value in future.wait()]
    rows = torch.zeros(size * 4)
    dist.all_gather_into_tensor(rows, torch.full((4,), float(rank)))
    part = torch.zeros(3)
    dist.reduce_scatter_tensor(part, torch.arange(3.0 * size) + rank)
    swapped = torch.zeros(size)
    dist.all_to_all_single(swapped, torch.arange(float(size)) + 10 * rank)
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(50_000)
    ops = [
        dist.P2POp(dist.isend, torch.full((50_000,), float(rank)), right),
        dist.P2POp(dist.irecv, got, left),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.barrier()
    return {**found, "base": [rows.tolist(), part.tolist(), swapped.tolist()], "ring": got.sum().item()}


def _objects(rank: int, size: int) -> dict[str, Any]:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    sent: list[Any] = [("from", rank)] if rank == size - 1 else [None]
    dist.broadcast_object_list(sent, src=size - 1)
    onto: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object([rank], onto, dst=0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {peer}" for peer in range(size)] if rank == 0 else None, src=0)
    passed: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([{"deep": [1, 2]}], dst=1)
    elif rank == 1:
        dist.recv_object_list(passed, src=0)
    return {"objects": [gathered, sent, onto, mine, passed]}


def _subgroups(rank: int, size: int) -> dict[str, Any]:
    found = []
    for ranks in ([0], list(range(1, size)), list(range(0, size, 2)), list(range(1, size, 2)), [size - 1, 0]):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = torch.tensor([float(rank), 1.0])
            dist.all_reduce(tensor, group=group)
            dist.broadcast(tensor, src=ranks[-1], group=group)
            found.append((dist.get_rank(group), tensor.tolist()))
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return {"subgroups": found, "after": total.tolist()}


def sums(seat: Seat) -> bytes:
    """A sum whose order matters, in pieces, and that of its first elements, which go whole: the bits that both give."""
    tensor = data(torch.float32, (LARGE,), seat.rank) * 10.0 ** (8 * seat.rank)
    few = tensor[:1000].clone()
    assert few.nbytes * (seat.size - 1) <= collectives.WHOLE_BYTES < tensor.nbytes * (seat.size - 1)
    call = seat.ours(seat.transport("sums"))
    for each in (tensor, few):
        call("allreduce", [each], AllreduceOptions())
    assert as_bytes([few]) == as_bytes([tensor[:1000].clone()])
    return as_bytes([tensor])[0]


def calls_on_gloo(seat: Seat) -> dict[str, list[Any]]:
    """Answers of torch's own groups, and their shapes."""
    dist.init_process_group("gloo", store=seat.store("calls"), rank=seat.rank, world_size=seat.size)
    place = comm_calls.Places(seat.rank)
    found = {name: case(place) for name, case in comm_calls.CASES.items()}
    return {name: [comm_calls.plain(value), comm_calls.shapes(value)] for name, value in found.items()}


def calls_on_ours(seat: Seat, address: str, alone: bool) -> dict[str, Any]:
    """The same on ours, formed twice. Alone: built as a newcomer is, with all calls answered locally at first."""
    groups = Groups()
    formations = (Formation(Generation(at), seat.rank, seat.size, address, seat.site) for at in itertools.count(1))
    groups.install(rank=seat.rank, world=seat.size, formation=None if alone else next(formations), form_s=30.0)
    place = comm_calls.Places(seat.rank)
    found: dict[str, Any] = {"shapes": {}, "first": {}, "again": {}, "groups": groups.count}
    with groups.echo():
        for name, case in comm_calls.CASES.items():
            found["shapes"][name] = comm_calls.shapes(case(place))
    for turn in ("first", "again"):
        if alone or turn == "again":
            groups.halt()
            found["seconds"] = groups.form(next(formations), lambda: False)
        for name, case in comm_calls.CASES.items():
            found[turn][name] = comm_calls.plain(case(place))
    groups.close()
    return found


def objects_alone(seat: Seat) -> list[Any]:
    """Objects that a newcomer gets in place of the others'; an answer that cannot be unpickled would end it."""
    Groups().install(rank=seat.rank, world=seat.size, formation=None, form_s=30.0)
    sent = ["mine", seat.rank]
    dist.broadcast_object_list(sent, src=1)
    passed: list[Any] = ["mine", threading.Lock()]  # a placeholder may be what cannot be pickled
    if seat.rank != 1:
        dist.recv_object_list(passed, src=1)
    mine: list[Any] = ["placeholder"]
    dist.scatter_object_list(mine, [("for", to) for to in range(seat.size)] if seat.rank == 1 else None, src=1)
    return [sent, ["mine", None] if seat.rank == 1 else passed, mine[0]]


def refusals(seat: Seat, address: str) -> dict[str, str]:
    """Errors of groups that cannot do what is asked."""
    groups, said = Groups(), {}
    first = Formation(Generation(1), seat.rank, seat.size, address, seat.site)
    groups.install(rank=seat.rank, world=seat.size, formation=first, form_s=30.0)
    pair, destroyed = dist.new_group([0, 1]), dist.new_group([0, 1])

    def ask(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  the test reads it
            said[name] = f"{type(error).__name__}: {error}"

    if seat.rank == 0:  # rank 1 has not called it yet
        work = dist.all_reduce(torch.ones(3), group=pair, async_op=True)
        ask("timeout", lambda: work.wait(timedelta(seconds=0.05)))
    dist.barrier()
    if seat.rank == 1:
        dist.all_reduce(torch.ones(3), group=pair)
    else:
        work.wait()
    ask("elsewhere", lambda: dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl"))
    plain = dist.new_group([0, 1], backend="gloo")
    dist.monitored_barrier(plain)
    dist.destroy_process_group(destroyed)
    inner = torch.zeros(2, requires_grad=True)
    with groups.echo():
        stage = PipelineStage(torch.nn.Linear(2, 2), seat.rank, 2, torch.device("cpu"), group=pair)
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.sum())
        given = () if seat.rank else (inner.repeat(4, 1),)
        ask("pipeline", lambda: schedule.step(*given, target=torch.zeros(4)))
    dist.barrier(pair)
    groups.halt()
    groups.form(Formation(Generation(2), seat.rank, seat.size, address, seat.site), lambda: False)
    summed = torch.ones(1)
    dist.all_reduce(summed, group=plain)
    said["gloo"], said["left"] = f"{dist.get_backend(plain)} {summed.item():g}", str(groups.count)
    if seat.rank == 0:
        groups.halt()
        elsewhere = Formation(Generation(3), 2, 2, address, seat.site)
        ask("another rank", lambda: groups.form(elsewhere, lambda: False))
    return said


def timeouts(seat: Seat, address: str) -> dict[str, str]:
    """Error of the one rank that calls a collective of a group; the other waits for it in a group of the usual time.

    The groups: made with a timeout, also in the next generation, and given one later.
    """
    groups, said = Groups(), {}
    formations = (Formation(Generation(at), seat.rank, seat.size, address, seat.site) for at in (1, 2))
    groups.install(rank=seat.rank, world=seat.size, formation=next(formations), form_s=30.0)
    made = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    given = dist.new_group([0, 1])
    c10d._set_pg_timeout(timedelta(seconds=0.3), given)

    def ask(name: str, group: dist.ProcessGroup | None) -> None:
        if seat.rank == 0:
            try:
                dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(timedelta(seconds=15))
            except RuntimeError as error:
                said[name] = str(error)
        dist.barrier()

    ask("made", made)
    ask("given", given)
    groups.halt()
    groups.form(next(formations), lambda: False)
    ask("made again", made)
    ask("given again", given)
    return said

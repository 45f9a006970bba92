"""Checks of the stand-in: `python -m tests.standin.checks` runs all and reports how each ended.

They run in a process of their own, since a device that torch has once heard of is there for all later tests. Each
check is a function whose name reads as a sentence, and `tests/unit/whole/test_standin.py` has a test for each.
"""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

CHECKS: dict[str, Callable[[], None]] = {}
DEVICE, BROKEN = "standin:0", 2
LIMIT_S = 20.0


def check(run: Callable[[], None]) -> Callable[[], None]:
    """A function that shows something."""
    CHECKS[run.__name__] = run
    return run


def _ones(count: int = 4) -> Any:
    import torch

    made = torch.ones(count, device=DEVICE)
    torch.accelerator.synchronize()
    return made


@check
def operators_run_late_and_an_event_says_when() -> None:
    import torch

    x, late = _ones(), torch.Event("standin")
    with STEERING.gate():
        y = x + 1
        late.record()
        assert not late.query()
        assert not torch.accelerator.current_stream().query()
    late.synchronize()
    assert late.query()
    assert y.tolist() == [2.0] * 4


@check
def a_copy_to_pinned_memory_is_late_and_one_from_ordinary_memory_has_what_was_there_at_the_call() -> None:
    import torch

    x, there, source = _ones(), torch.zeros(4, pin_memory=True), torch.ones(4)
    with STEERING.gate():
        there.copy_(x * 7, non_blocking=True)
        assert there.tolist() == [0.0] * 4
        staged = source.to(DEVICE, non_blocking=True)
        source.fill_(5.0)
    torch.accelerator.synchronize()
    assert there.tolist() == [7.0] * 4
    assert staged.tolist() == [1.0] * 4


@check
def what_another_stream_reads_before_it_is_there_is_nan() -> None:
    import torch

    x, other = _ones(), torch.Stream(device="standin")
    torch.accelerator.synchronize()
    with STEERING.gate():
        late = x * 3
        with other:
            early = late + 1
            assert bool(early.isnan().all())
        made = torch.accelerator.current_stream().record_event()
    with other:
        made.wait()
        assert (late + 1).tolist() == [4.0] * 4


@check
def memory_that_was_freed_is_used_again_unless_its_other_stream_was_recorded_or_waited_for() -> None:
    import torch

    for how in ("neither", "recorded", "waited for"):
        x, other, own = _ones(), torch.Stream(device="standin"), torch.accelerator.current_stream()
        used = x * 3
        torch.accelerator.synchronize()
        with other, STEERING.gate():
            late = used + 1
            if how == "recorded":
                used.record_stream(other)
            del used
            if how == "waited for":  # as FSDP2 waits between what frees gradients and the next on their stream
                own.wait_stream(other)
            with own:
                torch.empty(4, device="standin")
            if how == "neither":
                own.synchronize()
        with other:
            assert bool(late.isnan().all()) is (how == "neither")
        torch.accelerator.synchronize()


@check
def a_collective_over_the_processor_ends_when_its_results_are_on_the_device() -> None:
    import torch

    from regrow.comm.transport import MeshTransport

    closed: list[int] = []

    def exchange(*_: object, **__: object) -> None:
        closed.append(STEERING._call("close_gate", 0))  # the thread's stream stands before the copies to the device

    mesh: Any = SimpleNamespace(rank=0, size=1, ranks=[0], one_machine=False, exchange=exchange, close=lambda: None)
    transport = MeshTransport(mesh)
    given, output, other = _ones(), torch.empty(4, device=DEVICE), torch.Stream(device="standin")
    work: Any = transport.call("_allgather_base", (output, given), {})
    early = work._promise.ended.wait(0.3)
    STEERING._call("open_gate", *closed)
    work.wait()
    with other:
        assert output.tolist() == [1.0] * 4
    transport.close()
    assert not early, "a reader on another stream would be too early"


@check
def memory_comes_back_when_the_stream_has_come_to_where_it_was_freed() -> None:
    import torch

    x = _ones(1 << 16)
    live, held = STEERING.live(), STEERING.held()
    with STEERING.gate():
        y = x * 2
        del y
        assert STEERING.live() == live
        assert STEERING.held() >= held + x.nbytes
    torch.accelerator.synchronize()
    assert STEERING.held() == held


@check
def a_full_queue_holds_who_launches_and_events_need_no_room() -> None:
    import torch

    x, done = _ones(), threading.Event()

    def launch() -> None:
        for _ in range(12):
            x.add_(1)
        done.set()

    STEERING.queue_limit(8)
    try:
        launching = threading.Thread(target=launch)
        with STEERING.gate():
            launching.start()
            while STEERING.depth() < 9:  # the gate, and as many launches as there is room for
                pass
            assert not done.wait(0.1)
            torch.Event("standin").record()
        launching.join(LIMIT_S)
        assert done.is_set()
        assert x.tolist() == [13.0] * 4
    finally:
        STEERING.queue_limit(1024)


@check
def a_wait_for_the_device_is_told_as_such_and_uses_little_of_a_processor() -> None:
    import time

    import torch

    from regrow.comm.flight import FLIGHT
    from regrow.train.worker.accelerator import Devices

    x, shown, used = _ones(), [], [0.0]
    waiting = threading.Event()

    def show(count: int, oldest: str) -> None:
        shown.append((count, oldest))
        waiting.set()

    def wait() -> None:
        before = time.thread_time()
        Devices([torch.device(DEVICE)]).wait()
        used[0] = time.thread_time() - before

    FLIGHT.show = show
    try:
        with STEERING.gate():
            x.add_(1)
            # The gate is on this thread's stream, and a new thread has the same one.
            thread = threading.Thread(target=wait)
            thread.start()
            assert waiting.wait(LIMIT_S)
            time.sleep(2.0)  # not for an event: it is what the wait may cost that is seen
        thread.join(LIMIT_S)
    finally:
        FLIGHT.show = None
    assert shown == [(1, "the device"), (0, "")]
    assert used[0] < 0.2 * 2.0, used


@check
def work_on_any_stream_of_the_device_is_shown_as_a_wait_of_who_stands_still() -> None:
    import torch

    from regrow.comm.flight import UNKNOWN, Flights
    from regrow.comm.on_device.waits import SHOWN_AFTER_S, STILL_S, DeviceWaits
    from regrow.core.messages.observations import DEVICE as THE_DEVICE

    flights, shown = Flights(), [(0, "")]
    flights.show = lambda count, oldest: shown.append((count, oldest))
    waits = DeviceWaits(flights, torch.accelerator.synchronize)
    waits.body_beats = lambda: 1
    x, other = _ones(), torch.Stream(device="standin")
    waits.enqueues(x.device)
    waits.look(0.0)
    with other, STEERING.gate():
        x.add_(1)
        waits.look(STILL_S)
        assert shown[-1] == (UNKNOWN, "")
        waits.look(STILL_S + SHOWN_AFTER_S)
        assert shown[-1] == (1, THE_DEVICE)
    assert waits._asking is not None
    waits._asking.join(LIMIT_S)
    waits.look(STILL_S + SHOWN_AFTER_S + 1)
    assert shown[-1] == (0, "")


@check
def a_graph_that_records_is_seen() -> None:
    import torch

    from regrow.devices import accelerators

    device = torch.device(DEVICE)
    assert not accelerators.is_capturing(device)
    with torch.get_device_module(device).capture():
        assert accelerators.is_capturing(device)
    assert not accelerators.is_capturing(torch.device("cpu"))


@check
def what_the_host_waits_for_is_counted() -> None:
    x = _ones()
    before, launched = STEERING.waits(), STEERING.launches()
    x.add_(1).mul_(2)
    assert STEERING.waits() == before
    assert STEERING.launches() == launched + 2
    assert x[0].item() == 4.0
    assert STEERING.waits() == before + 1


@check
def the_first_error_of_a_device_is_its_last_and_another_device_goes_on() -> None:
    import torch

    x = torch.ones(4, device=f"standin:{BROKEN}")
    STEERING.fail(BROKEN)
    for call in (lambda: x + 1, lambda: torch.ones(2, device=x.device), lambda: torch.accelerator.synchronize(BROKEN)):
        for _ in range(2):
            try:
                call()
            except torch.AcceleratorError as error:
                assert "device-side assert triggered" in str(error)
            else:
                raise AssertionError("a broken device answered")
    assert _ones().tolist() == [1.0] * 4


@check
def a_generator_draws_what_the_processors_does_and_can_be_put_back() -> None:
    import torch

    here, there = torch.Generator().manual_seed(3), torch.Generator(DEVICE).manual_seed(3)
    assert torch.equal(torch.rand(9, generator=here), torch.rand(9, device=DEVICE, generator=there).cpu())
    state = there.get_state()
    first = torch.rand(9, device=DEVICE, generator=there)
    there.set_state(state)
    assert torch.equal(first.cpu(), torch.rand(9, device=DEVICE, generator=there).cpu())


class Training:
    """Parameters, running statistics, state of an optimizer and of a scaler, and a generator, all on the device."""

    def __init__(self, device: str) -> None:
        import torch
        from torch import nn

        from regrow.core.ids import StepNo
        from regrow.train.state.protected import ProtectedState

        torch.manual_seed(0)
        self.device = device
        layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(32), nn.Linear(32, 4)]
        self.model: Any = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=64.0, growth_interval=2)
        self.noise = torch.Generator(device)
        self.state = ProtectedState([self.model, self.optimizer, self.noise], {"scaler": self.scaler})
        self.state.state_at = StepNo(0)

    def forward(self, step: int) -> Any:
        import torch

        from regrow.data.seeding import seed_everything

        numbers = torch.Generator().manual_seed(step)
        seed_everything(7, step)
        self.state.reseed(7, step)
        x = torch.randn(8, 16, generator=numbers).to(self.device)
        x = x + 0.1 * torch.rand(x.shape, generator=self.noise, device=self.device)
        target = torch.randint(4, (8,), generator=numbers).to(self.device)
        return torch.nn.functional.cross_entropy(self.model(x), target)

    def step(self, step: int) -> Any:
        loss = self.forward(step)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach().cpu()


def _everything(training: Training) -> list[Any]:
    moments = [each for state in training.optimizer.state.values() for each in state.values()]
    return [each.cpu() for each in [*training.model.state_dict().values(), *moments]]


@check
def a_training_with_dropout_statistics_a_scaler_and_noise_is_the_processors_bit_for_bit() -> None:
    import torch

    here, there = Training("cpu"), Training(DEVICE)
    losses = [[training.step(step) for step in range(6)] for training in (here, there)]
    assert all(map(torch.equal, *losses))
    assert all(map(torch.equal, _everything(here), _everything(there)))
    assert here.scaler.state_dict() == there.scaler.state_dict()
    assert here.scaler.get_scale() != 64.0


@check
def dropout_on_the_device_follows_the_step_in_another_process_too() -> None:
    import torch

    from regrow.data.seeding import seed_everything

    drawn = []
    for before in (0, 5):  # as many numbers as a newcomer has not drawn
        torch.rand(1 + before, device=DEVICE)
        seed_everything(3, 11)
        drawn.append(torch.nn.functional.dropout(_ones(64), 0.5).cpu())
    assert torch.equal(*drawn)


@check
def a_protected_generator_on_the_device_is_seeded_for_each_step() -> None:
    import torch

    training, drawn = Training(DEVICE), []
    for step in (4, 5, 4):
        training.state.reseed(7, step)
        drawn.append(torch.rand(9, device=DEVICE, generator=training.noise).cpu())
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


@check
def where_the_devices_generator_stands_is_compared_in_a_shadow() -> None:
    import torch

    from regrow.data.seeding import seed_everything
    from regrow.train.proving import recorder

    def found() -> dict[str, int]:
        return {name: digest() for name, digest in recorder._generators()}

    seed_everything(3, 11)
    before = found()
    assert found() == before
    torch.rand(1, device=DEVICE)
    after = found()
    assert [name for name in before if before[name] != after[name]] == ["the device's generator"]


@check
def rollback_puts_back_buffers_and_parameters_on_the_device() -> None:
    training = Training(DEVICE)
    training.step(0)
    before = training.state.digest()
    training.state.begin()
    training.scaler.scale(training.forward(1)).backward()
    assert training.state.digest() != before, "running statistics"
    training.state.rollback()
    assert training.state.digest() == before


@check
def what_an_update_changed_is_undone_whole_with_the_optimizers_state_and_the_scalers() -> None:
    training = Training(DEVICE)
    for step in range(2):
        training.step(step)
    before, scale = training.state.digest(), training.scaler.state_dict()
    kept = training.state.capture()
    for step in range(2, 5):
        training.step(step)
    assert training.scaler.state_dict() != scale
    training.state.restore(kept)
    assert training.state.digest() == before
    assert training.scaler.state_dict() == scale


@check
def a_newcomer_receives_all_of_it_and_goes_on_as_its_holder() -> None:
    import torch

    from regrow.core.ids import StepNo

    holder, newcomer = Training(DEVICE), Training("standin:1")
    for step in range(3):
        holder.step(step)
    holder.state.state_at = StepNo(3)
    inventory = holder.state.inventory(StepNo(3))
    for name, tensor in newcomer.state.prepare(inventory).items():
        tensor.detach().copy_(holder.state.tensor(name).detach())
    newcomer.state.finish()
    torch.accelerator.synchronize(1)
    assert newcomer.state.digest() == holder.state.digest()
    assert torch.equal(holder.step(3), newcomer.step(3))
    assert newcomer.state.digest() == holder.state.digest()


@check
def a_reader_of_state_on_a_stream_of_its_own_does_not_wait_for_what_the_script_has_enqueued() -> None:
    import torch

    from regrow.devices.stream_points import StreamPoint
    from regrow.hydration.memory import BUFFERS, Outgoing
    from regrow.hydration.plan import ByteSpan

    state = torch.arange(1000, device=DEVICE) + 1  # late, and what is read before it is there is poison
    turned = state.reshape(10, 100).t()
    spans = [ByteSpan(name, at, 800) for name in ("state", "turned") for at in range(0, 8000, 800)]
    chunks = [(span,) for span in spans[:-1]] + [(ByteSpan("here", 0, 24), spans[-1], ByteSpan("there", 0, 24))]
    elsewhere = torch.arange(3, device="standin:1") + 7
    torch.accelerator.synchronize(1)
    assert len(chunks) > BUFFERS + 1, "buffers are used again"
    behind = StreamPoint([torch.device(DEVICE)])
    table = {"state": state, "turned": turned, "here": torch.arange(3), "there": elsewhere}
    outgoing = Outgoing(table.__getitem__, 1600, behind)
    with STEERING.gate():
        state * 2
        heard = b"".join(bytes(data) for data in outgoing.read_all(chunks))
    values = torch.frombuffer(bytearray(heard), dtype=torch.int64)
    here = torch.arange(1000) + 1
    turned_here = here.reshape(10, 100).t().reshape(-1)
    expected = [here, turned_here[:-100], torch.arange(3), turned_here[-100:], torch.arange(3) + 7]
    assert torch.equal(values, torch.cat(expected))


@check
def state_that_arrives_is_copied_on_a_stream_of_its_own_from_buffers_in_turn() -> None:
    import torch

    from regrow.hydration.memory import BUFFERS, Incoming, Landing
    from regrow.hydration.plan import ByteSpan

    state = torch.zeros(1000, dtype=torch.int64, device=DEVICE) + 1  # late: what arrives has to come behind it
    here, elsewhere = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64, device="standin:1")
    chunks: list[tuple[ByteSpan, ...]] = [(ByteSpan("state", at, 800),) for at in range(0, 7200, 800)]
    chunks.append((ByteSpan("here", 0, 24), ByteSpan("state", 7200, 800), ByteSpan("elsewhere", 0, 24)))
    assert len(chunks) > BUFFERS + 1, "buffers are used again"
    values = torch.arange(1006)
    sent = [values[at : at + 100] for at in range(0, 900, 100)] + [values[900:]]
    landing = Landing(Incoming({"state": state, "here": here, "elsewhere": elsewhere}), 1600)
    with STEERING.gate():
        state * 2  # the script's stream is held from here on
        for chunk, data in zip(chunks, sent, strict=True):
            room = landing.room(chunk)
            room[:] = data.numpy().view("uint8").data
            landing.land(chunk)
        landing.await_landed()
    assert here.tolist() == [900, 901, 902]
    assert torch.equal(state.cpu(), torch.cat((values[:900], values[903:1003])))
    assert elsewhere.tolist() == [1003, 1004, 1005]


@check
def a_chunk_is_received_while_the_device_still_copies_the_one_before() -> None:
    import torch

    from regrow.hydration.memory import BUFFERS, Incoming, Landing
    from regrow.hydration.plan import ByteSpan

    state = torch.zeros(BUFFERS + 1, dtype=torch.uint8, device=DEVICE)
    chunks = [(ByteSpan("state", at, 1),) for at in range(BUFFERS + 1)]
    with STEERING.gate():
        state.add_(1)  # what arrives has to wait for this
        landing, done = Landing(Incoming({"state": state}), 16), threading.Event()

        def rest() -> None:
            landing.room(chunks[-1])[:] = bytes([7 + BUFFERS])
            done.set()

        for at, chunk in enumerate(chunks[:-1]):
            landing.room(chunk)[:] = bytes([7 + at])
            landing.land(chunk)
        thread = threading.Thread(target=rest)
        thread.start()
        assert not done.wait(0.1), "its buffer is still being copied from"
    assert done.wait(LIMIT_S)
    thread.join()
    landing.land(chunks[-1])
    landing.await_landed()
    assert state.tolist() == [7 + at for at in range(BUFFERS + 1)]


@check
def a_verified_copy_is_of_the_states_size_and_page_locked_nowhere() -> None:
    from regrow.core.ids import StepNo
    from regrow.train.state.fingerprints import digest_tensors
    from regrow.train.state.verified import VerifiedCopy

    training = Training(DEVICE)
    for step in range(3):
        training.step(step)
    state, copy = training.state, VerifiedCopy(training.state)
    state.state_at = StepNo(3)
    inventory = state.inventory(StepNo(3))
    tensors = {entry.name: state.tensor(entry.name).detach().cpu() for entry in inventory.entries}
    copy.take(StepNo(3), digest_tensors(inventory.entries, tensors, frozenset()), frozenset())
    copy.check()
    assert copy.nbytes == inventory.nbytes
    assert not any(tensor.is_pinned() for tensor in copy._tensors.values())
    before = state.digest()
    training.step(3)
    assert state.digest() != before
    copy.restore()
    assert state.digest() == before


@check
def a_body_is_ready_when_its_late_gradients_are_there() -> None:
    from regrow.train.worker.accelerator import accelerator_of

    x, waiting, done = _ones(), threading.Event(), threading.Event()
    accelerator = accelerator_of([x])
    assert accelerator.enqueues

    def wait() -> None:
        waiting.set()
        accelerator.wait()
        done.set()

    with STEERING.gate():
        x.add_(1)
        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(LIMIT_S)
        assert not done.wait(0.1)
    assert done.wait(LIMIT_S)
    thread.join()


@check
def the_seam_knows_its_name_its_memory_and_how_to_choose_it() -> None:
    import torch

    from regrow.devices import accelerators

    device = torch.device(DEVICE)
    assert accelerators.kind() == "standin"
    assert accelerators.kinds() == ["cpu", "cuda", "standin"]
    assert accelerators.name_of(device) == "stand-in"
    peak = accelerators.memory_peak(device)
    assert peak is not None
    assert peak() >= _ones(1 << 12).nbytes
    assert accelerators.choose(1) == torch.device("standin:1")
    assert torch.accelerator.current_device_index() == 1
    assert accelerators.choose(0) == device
    assert accelerators.host_memory((4,), torch.float32, device).is_pinned()


def main() -> None:
    """Run all; a line of JSON for each: its name, and what it raised."""
    for name, run in CHECKS.items():
        failed = ""
        try:
            run()
        except Exception:  # noqa: BLE001  whatever it is, its test says it
            failed = traceback.format_exc()
        sys.stdout.write(json.dumps([name, failed]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    import faulthandler

    os.environ["STANDIN_DEVICES"] = "3"
    faulthandler.dump_traceback_later(100, exit=True)
    import torch as _torch
    from tests.standin import device as _device

    _torch.set_num_threads(1)
    STEERING = _device.load()
    main()

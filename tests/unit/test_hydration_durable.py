import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from regrow.core.errors import CheckpointError, StateError
from regrow.core.ids import StepNo
from regrow.hydration import durable
from regrow.hydration.durable import CheckpointWriter, Snapshot, latest, load, save
from regrow.train.protect import ProtectedState


def training(seed: Any, width: Any = 30) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 2).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = ProtectedState([model, optimizer, scheduler])
    state.state_at = StepNo(0)

    def step(number: Any) -> None:
        torch.manual_seed(number)
        hidden = model[1](model[0](torch.randn(16, 8)))
        model[2](hidden.bfloat16()).float().pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state.state_at = number + 1

    return state, step, model


def trained(steps: Any = 3) -> Any:
    state, step, model = training(0)
    for number in range(steps):
        step(number)
    return state, step, model


def test_a_new_worker_resumes_bitwise_from_disk(tmp_path: Path) -> None:
    state, step, _ = trained()
    folder = save(Snapshot.take(state, StepNo(3)), tmp_path)
    assert folder == tmp_path / "step-3"
    assert latest(tmp_path) == (folder, 3)
    resumed, resumed_step, _ = training(7)
    assert load(resumed, folder) == 3
    assert resumed.state_at == 3
    assert resumed.digest() == state.digest()
    step(3)
    resumed_step(3)
    assert resumed.digest() == state.digest()


def test_anyone_can_load_it_with_plain_distributed_checkpoint(tmp_path: Path) -> None:
    state, _, model = trained()
    folder = save(Snapshot.take(state, StepNo(3)), tmp_path)
    _, _, other = training(5)
    content = {"model": other.state_dict(), "regrow.step": torch.tensor(0)}
    dcp_load(content, checkpoint_id=folder, no_dist=True)
    assert content["regrow.step"] == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, content["model"][name])
    moment = {"optim.0.weight.exp_avg": torch.zeros(30, 8)}
    dcp_load(moment, checkpoint_id=folder, no_dist=True)
    assert moment["optim.0.weight.exp_avg"].any()


def test_a_snapshot_is_a_copy_that_training_does_not_reach(tmp_path: Path) -> None:
    state, step, _ = trained()
    digest = state.digest()
    snapshot = Snapshot.take(state, StepNo(3))
    step(3)
    resumed, _, _ = training(7)
    load(resumed, save(snapshot, tmp_path))
    assert resumed.digest() == digest
    again = Snapshot.take(state, StepNo(4), reuse=snapshot)
    assert again.tensors["model.0.weight"] is snapshot.tensors["model.0.weight"]
    load(resumed, save(again, tmp_path))
    assert resumed.digest() == state.digest()


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    state, step, _ = trained()
    for number in range(3, 7):
        save(Snapshot.take(state, StepNo(number)), tmp_path)
        step(number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5", "step-6"]
    assert latest(tmp_path) == (tmp_path / "step-6", 6)


@pytest.mark.parametrize("tear", ["manifest", "data", "short", "unnamed"])
def test_a_torn_checkpoint_is_ignored(tmp_path: Path, tear: Any) -> None:
    state, step, _ = trained()
    save(Snapshot.take(state, StepNo(3)), tmp_path)
    step(3)
    newest = save(Snapshot.take(state, StepNo(4)), tmp_path)
    data = next(newest.glob("*.distcp"))
    if tear == "manifest":
        (newest / "regrow.json").unlink()
    elif tear == "data":
        data.unlink()
    elif tear == "short":
        os.truncate(data, data.stat().st_size // 2)
    else:
        newest.rename(tmp_path / ".unfinished-4-1")
    assert latest(tmp_path) == (tmp_path / "step-3", 3)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load(state, newest)


def test_what_a_killed_writer_left_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    state, _, _ = trained()
    (tmp_path / ".unfinished-9-1").mkdir()
    (tmp_path / "step-3").mkdir()
    save(Snapshot.take(state, StepNo(3)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_without_any_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None


def test_the_state_of_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    state, _, _ = trained()
    folder = save(Snapshot.take(state, StepNo(3)), tmp_path)
    other, _, _ = training(0, width=31)
    before = other.digest()
    with pytest.raises(StateError, match=r"model\.0\.weight"):
        load(other, folder)
    assert other.digest() == before


def test_a_state_that_stands_elsewhere_is_not_copied() -> None:
    state, _, _ = trained()
    with pytest.raises(StateError, match="state@5"):
        Snapshot.take(state, StepNo(5))


class Log:
    def __init__(self) -> None:
        self.written: list[Any] = []
        self.errors: list[Any] = []
        self.news = threading.Event()

    def on_written(self, folder: Any, step: Any, seconds: Any) -> None:
        self.written.append((folder, step))
        self.news.set()

    def on_error(self, error: Any) -> None:
        self.errors.append(error)
        self.news.set()

    def writer(self, directory: Any) -> Any:
        return CheckpointWriter(directory, on_written=self.on_written, on_error=self.on_error)


def test_the_writer_works_beside_training_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, release = threading.Event(), threading.Event()
    real = dcp_save

    def slow(*args: Any, **kwargs: Any) -> Any:
        started.set()
        release.wait(20)
        return real(*args, **kwargs)

    monkeypatch.setattr(durable, "dcp_save", slow)
    state, step, _ = trained()
    log = Log()
    writer = log.writer(tmp_path)
    assert writer.begin(state, 3)
    assert started.wait(10)
    digest = state.digest()
    step(3)
    assert writer.busy
    assert not writer.begin(state, 4)
    assert not writer.close(0.01)
    release.set()
    assert writer.close(20)
    assert log.written == [(tmp_path / "step-3", 3)]
    resumed, _, _ = training(7)
    load(resumed, tmp_path / "step-3")
    assert resumed.digest() == digest
    assert writer.begin(state, 4)
    assert writer.close(20)
    assert latest(tmp_path) == (tmp_path / "step-4", 4)


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A folder with room for one small checkpoint only: a tiny tmpfs, or a limit on the size of files."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    mounted = False
    if mount and os.geteuid() == 0:
        command = [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, check=False)
        mounted = done.returncode == 0
    if mounted:
        yield folder
        subprocess.run(["umount", folder], check=True, timeout=20)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, previous)


def test_a_full_disk_is_one_clear_error_leaves_nothing_half_written_and_keeps_the_old(small_disk: Any) -> None:
    state, _, _ = trained()
    good = save(Snapshot.take(state, StepNo(3)), small_disk)
    big = ProtectedState([nn.Linear(1000, 1000)])
    big.state_at = StepNo(9)
    log = Log()
    writer = log.writer(small_disk)
    assert writer.begin(big, 9)
    assert writer.close(20)
    assert len(log.errors) == 1
    assert isinstance(log.errors[0], CheckpointError)
    assert "state@9 could not be written" in str(log.errors[0])
    assert "No space left on device" in str(log.errors[0]) or "File too large" in str(log.errors[0])
    assert [path.name for path in small_disk.iterdir()] == ["step-3"]
    assert latest(small_disk) == (good, 3)
    assert writer.begin(state, 3)
    assert writer.close(20)
    assert log.written == [(good, 3)]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state, _, _ = trained()
    with pytest.raises(CheckpointError, match="could not be written to .*: Not a directory"):
        save(Snapshot.take(state, StepNo(3)), tmp_path / "file" / "checkpoints")


def test_a_writer_killed_in_the_middle_leaves_the_last_one_in_force(tmp_path: Path) -> None:
    state, step, _ = trained()
    save(Snapshot.take(state, StepNo(3)), tmp_path)
    step(3)
    snapshot = Snapshot.take(state, StepNo(4))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:

            def stuck(*args: Any, **kwargs: Any) -> None:
                (kwargs["checkpoint_id"] / "__0_0.distcp").write_bytes(b"half")
                os.write(write, b"x")
                time.sleep(60)

            setattr(durable, "dcp_save", stuck)  # noqa: B010 - mypy knows that it is imported there
            save(snapshot, tmp_path)
        finally:
            os._exit(1)
    os.read(read, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for end in (read, write):
        os.close(end)
    assert latest(tmp_path) == (tmp_path / "step-3", 3)
    save(snapshot, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4"]

"""One rank's state on disk and back."""

import os
from pathlib import Path

import pytest
import torch
from tests.unit.hydration.checkpoint_cases import Training, loaded, save, saved, source
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import regrow.hydration.durable.layout as layout
from regrow.core.errors import CheckpointError, StateError
from regrow.core.ids import Rank, StepNo
from regrow.hydration.durable.layout import Manifest
from regrow.hydration.durable.reader import latest, load, manifest_of
from regrow.hydration.durable.snapshot import TornSnapshot
from regrow.hydration.durable.storage import place
from regrow.hydration.durable.writer import write_parts
from regrow.hydration.inventory import TensorEntry
from regrow.train.state.protected import ProtectedState


def test_a_new_worker_resumes_bitwise_from_disk(tmp_path: Path) -> None:
    training = Training().trained()
    assert saved(tmp_path, training) == "step-3"
    assert latest(place(str(tmp_path))) == (3, "step-3")
    resumed = Training(7)
    assert loaded(tmp_path, "step-3", resumed) == 3
    assert resumed.state.state_at == 3
    assert resumed.state.digest() == training.state.digest()
    training.step(3)
    resumed.step(3)
    assert resumed.state.digest() == training.state.digest()


def test_anyone_can_load_it_with_plain_distributed_checkpoint(tmp_path: Path) -> None:
    training = Training().trained()
    folder = tmp_path / saved(tmp_path, training)
    content = {"model": Training(5).model.state_dict(), "regrow.step": torch.tensor(0)}
    dcp_load(content, checkpoint_id=folder, no_dist=True)
    assert content["regrow.step"] == 3
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(tensor, content["model"][name])  # type: ignore[index]
    moment = {"optim.0.weight.exp_avg": torch.zeros(30, 8)}
    dcp_load(moment, checkpoint_id=folder, no_dist=True)
    assert moment["optim.0.weight.exp_avg"].any()


def test_the_newest_are_kept_as_many_as_asked_for(tmp_path: Path) -> None:
    training = Training().trained()
    for number in range(3, 8):
        saved(tmp_path, training, keep=3)
        training.step(number)
    assert sorted(os.listdir(tmp_path)) == ["step-5", "step-6", "step-7"]
    assert latest(place(str(tmp_path))) == (7, "step-7")
    saved(tmp_path, training, keep=1)
    assert os.listdir(tmp_path) == ["step-8"]


def test_a_step_that_is_written_again_replaces_the_old(tmp_path: Path) -> None:
    saved(tmp_path, Training().trained())
    other = Training(4).trained()
    saved(tmp_path, other, attempt=1)
    resumed = Training(7)
    loaded(tmp_path, "step-3", resumed)
    assert resumed.state.digest() == other.state.digest()
    assert os.listdir(tmp_path) == ["step-3"]


@pytest.mark.parametrize("tear", ["manifest", "data", "short", "unnamed", "garbage"])
def test_a_torn_checkpoint_is_ignored(tmp_path: Path, tear: str) -> None:
    training = Training().trained()
    saved(tmp_path, training)
    training.step(3)
    newest = tmp_path / saved(tmp_path, training)
    data = newest / "__0_0.distcp"
    match tear:
        case "manifest":
            (newest / "regrow.json").unlink()
        case "data":
            data.unlink()
        case "short":
            os.truncate(data, data.stat().st_size // 2)
        case "unnamed":
            newest.rename(tmp_path / ".unfinished-4-1")
        case "garbage":
            (newest / "regrow.json").write_bytes(b"{")
    assert latest(place(str(tmp_path))) == (3, "step-3")
    with pytest.raises(CheckpointError, match="no manifest|__0_0.distcp (is missing|has)|cannot be read"):
        loaded(tmp_path, "step-4", training)


def test_what_a_killed_writer_left_is_cleared_away_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-9-1").mkdir()
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "mine.pt").write_text("of the user")
    saved(tmp_path, Training().trained())
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]


def test_without_any_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert latest(place(str(tmp_path))) is None
    assert latest(place(str(tmp_path / "absent"))) is None


def test_the_state_of_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    name = saved(tmp_path, Training().trained())
    other = Training(0, width=31)
    before = other.state.digest()
    with pytest.raises(StateError, match=r"model\.0\.weight"):
        loaded(tmp_path, name, other)
    assert other.state.digest() == before


def test_a_snapshot_that_training_overwrites_meanwhile_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    training = Training().trained()
    segment = training.snapshot()
    part = source(segment, 3)
    read = part.tensor

    def overwritten(name: str) -> torch.Tensor:
        if name == "model.2.weight":
            segment.void()
        return read(name)

    part.tensor = overwritten  # type: ignore[method-assign]
    with pytest.raises(TornSnapshot, match="state@3 was overwritten"):
        write_parts(place(str(tmp_path)), StepNo(3), 0, [part])
    assert [os.listdir(tmp_path / each) for each in os.listdir(tmp_path)] == [[]]
    with pytest.raises(TornSnapshot):
        source(segment, 3)


def test_large_tensors_are_cut_so_that_a_reader_needs_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "CHUNK_BYTES", 100)
    monkeypatch.setattr(layout.cut, "__defaults__", (100,))
    training = Training().trained()
    name = saved(tmp_path, training)
    manifest = manifest_of(place(str(tmp_path)), name)
    assert len(manifest.tensors["model.0.weight"].chunks) == 10  # 30 rows of 32 bytes
    resumed = Training(7)
    loaded(tmp_path, name, resumed)
    assert resumed.state.digest() == training.state.digest()
    content = {"model.0.weight": torch.zeros(30, 8)}
    dcp_load(content, checkpoint_id=tmp_path / name, no_dist=True)
    assert torch.equal(content["model.0.weight"], training.state.parameters()[0])


def test_an_url_is_a_place_too(tmp_path: Path) -> None:
    at = place("memory://regrow-test/checkpoints")
    training = Training().trained()
    for number in range(3, 6):
        save(at, [training.snapshot()], number)
        training.step(number)
    assert sorted(at.folders()) == ["step-4", "step-5"]
    resumed = Training(7)
    assert load(resumed.state, at, "step-5", holding="all") == 5
    assert at.remains() == {}
    assert sorted(at.sizes("step-5")) == [".metadata", "__0_0.distcp", "regrow.json"]
    local = place(f"file://{tmp_path}")
    save(local, [Training().trained().snapshot()], 3)
    assert os.listdir(tmp_path) == ["step-3"]


def test_on_an_object_store_the_manifest_is_the_mark(tmp_path: Path) -> None:
    at = place("memory://regrow-torn/checkpoints")
    training = Training().trained()
    save(at, [training.snapshot()], 3)
    training.step(3)
    write_parts(at, StepNo(4), 0, [source(training.snapshot(), 4)])
    assert latest(at) == (3, "step-3")
    assert at.remains() == {"step-4": ""}
    training.step(4)
    save(at, [training.snapshot()], 5, attempt=1)
    assert sorted(at.folders()) == ["step-3", "step-5"]


def test_no_pickle_of_ours_is_read(tmp_path: Path) -> None:
    training = Training().trained()
    folder = tmp_path / saved(tmp_path, training)
    (folder / ".metadata").write_bytes(b"x" * (folder / ".metadata").stat().st_size)
    resumed = Training(7)
    loaded(tmp_path, "step-3", resumed)
    assert resumed.state.digest() == training.state.digest()


def test_a_model_without_tensors_or_with_empty_ones_is_written_too(tmp_path: Path) -> None:
    model = nn.Linear(0, 3)
    state = ProtectedState([model])
    state.state_at = StepNo(1)
    training = Training()
    training.state = state
    name = saved(tmp_path, training)
    other = ProtectedState([nn.Linear(0, 3)])
    other.state_at = StepNo(0)
    assert load(other, place(str(tmp_path)), name) == 1
    assert other.digest() == state.digest()


def test_the_manifest_says_who_has_what(tmp_path: Path) -> None:
    name = saved(tmp_path, Training().trained())
    manifest = manifest_of(place(str(tmp_path)), name)
    assert isinstance(manifest, Manifest)
    assert manifest.holdings["all"].rank == Rank(0)
    assert all(isinstance(entry, TensorEntry) for entry in manifest.holdings["all"].entries)

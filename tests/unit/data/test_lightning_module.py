"""A wrapped Lightning `DataModule`: its loaders are cached, all else is its own, and a Trainer takes it."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import regrow.data.dataloader as ours
from regrow.core.errors import UsageError
from regrow.data.lightning import CachedDataModule
from regrow.data.loader import StepLoader

SAMPLES = TensorDataset(torch.arange(16.0).view(16, 1))


class Plain:
    """A module in the shape of Lightning's, without Lightning."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.hparams = {"batch_size": 4}

    def prepare_data(self) -> None:
        self.stages.append("prepared")

    def setup(self, stage: str) -> None:
        self.stages.append(stage)

    def train_dataloader(self) -> Any:
        return DataLoader(SAMPLES, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return [self.train_dataloader(), {"a": DataLoader(SAMPLES)}, (ours.DataLoader(SAMPLES), "no loader")]

    def state_dict(self) -> dict[str, int]:
        return {"seen": len(self.stages)}


def test_its_loaders_are_cached_in_whatever_holds_them() -> None:
    module = CachedDataModule(Plain(), version="7")
    train = module.train_dataloader()
    assert (type(train), type(train.loader), train.version) == (ours.Cached, DataLoader, "7")
    first, second, third = module.val_dataloader()
    assert (type(first), type(second["a"]), type(third[0]), third[1]) == (
        ours.Cached,
        ours.Cached,
        ours.DataLoader,
        "no loader",
    )


def test_all_else_is_the_wrapped_modules() -> None:
    plain = Plain()
    module = CachedDataModule(plain)
    module.prepare_data()
    module.setup("fit")
    assert (plain.stages, module.state_dict(), module.hparams) == (["prepared", "fit"], {"seen": 2}, {"batch_size": 4})
    module.trainer = "set"
    assert plain.trainer == "set"  # type: ignore[attr-defined]
    del module.trainer
    assert not hasattr(plain, "trainer")
    with pytest.raises(AttributeError, match="nothing_like_that"):
        module.nothing_like_that  # noqa: B018
    assert isinstance(module, Plain)


def test_the_wrapped_modules_own_calls_are_not_wrapped_twice() -> None:
    assert type(CachedDataModule(Plain()).val_dataloader()[0].loader) is DataLoader


def test_it_is_pickled_with_what_it_wraps() -> None:
    again = pickle.loads(pickle.dumps(CachedDataModule(Plain(), version="7")))
    assert again.train_dataloader().version == "7"


def test_steps_take_its_loader() -> None:
    loader = StepLoader(CachedDataModule(Plain()).train_dataloader(), seed=0)
    seen = torch.cat([loader.batch(step, 0, 1)[0] for step in range(4)])
    loader.close()
    assert sorted(seen.flatten().tolist()) == list(range(16))


@pytest.mark.parametrize("wrong", [Plain, object(), SAMPLES])
def test_what_has_no_loaders_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="is no DataModule: it has no loaders"):
        CachedDataModule(wrong)


def test_no_lightning_is_imported_for_it() -> None:
    code = "import regrow.data.lightning, sys; print([name for name in sys.modules if 'lightning' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("['regrow.data.lightning']\n", "")


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_trains_with_it_as_with_the_module_itself(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("pytorch_lightning")

    class Module(Plain, lightning.LightningDataModule):  # type: ignore[misc]
        def __init__(self, batch_size: int = 4) -> None:
            lightning.LightningDataModule.__init__(self)
            self.save_hyperparameters()
            self.stages: list[str] = []

        def train_dataloader(self) -> Any:
            return DataLoader(SAMPLES, batch_size=4)

        def val_dataloader(self) -> Any:
            return DataLoader(SAMPLES, batch_size=8)

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    weights = []
    for wrap in (lambda module: module, CachedDataModule):
        lightning.seed_everything(5, verbose=False)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        module, model = Module(), Model()
        trainer.fit(model, datamodule=wrap(module))
        assert module.stages[:2] == ["prepared", "fit"]
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        assert torch.load(tmp_path / "last.ckpt", weights_only=False)[Module.__qualname__] == {
            "seen": len(module.stages)
        }
        weights.append(model.layer.weight.item())
    assert weights[0] == weights[1]
    assert type(trainer.train_dataloader) is ours.Cached

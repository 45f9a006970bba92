"""HyperPod's Python names: each says once what takes its place, and what has no counterpart raises the cure."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from regrow.core.errors import UsageError
from regrow.data.dataloader import Cached
from regrow_recipes.compat import hyperpod


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    hyperpod._note.cache_clear()
    with caplog.at_level(logging.WARNING, logger="regrow"):
        yield caplog


class Module:
    """A data module as scripts have one."""

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(8))  # type: ignore[arg-type]


def test_the_documented_wrapper_runs_its_function_once_and_says_each_name_once(told: pytest.LogCaptureFixture) -> None:
    ran: list[Any] = []
    for _ in range(2):
        hyperpod.wait_rank()

        @hyperpod.HPWrapper(
            health_check=hyperpod.CudaHealthCheck(),
            hp_api_factory=hyperpod.HPAgentK8sAPIFactory(),
            abort_timeout=60.0,
            checkpoint_manager=hyperpod.PEFTCheckpointManager(enable_offload=True),
            abort=hyperpod.CheckpointlessAbortManager.get_default_checkpointless_abort(),
            finalize=hyperpod.CheckpointlessFinalizeCleanup(),
        )
        def run_main(config: str, caller: hyperpod.HPCallWrapper | None = None) -> int:
            ran.append((config, caller))
            return 7

        assert run_main("c") == 7
    assert [config for config, _ in ran] == ["c", "c"]
    assert all(isinstance(caller, hyperpod.HPCallWrapper) for _, caller in ran)
    names = [record.getMessage().split()[1] for record in told.records]
    assert sorted(names) == sorted(
        [
            "wait_rank",
            "HPWrapper",
            "CudaHealthCheck",
            "HPAgentK8sAPIFactory",
            "PEFTCheckpointManager",
            "CheckpointlessAbortManager",
            "CheckpointlessFinalizeCleanup",
        ]
    )


def test_a_function_without_a_caller_is_given_none() -> None:
    @hyperpod.HPWrapper()
    def main(config: int) -> int:
        return config

    assert main(3) == 3


def test_their_data_module_is_cached(told: pytest.LogCaptureFixture) -> None:
    config = hyperpod.CacheResumeMMAPConfig(
        cache_dir="/cache", prefetch_length=3, lookback_length=2, checkpoint_frequency=10, val_prefetch_length=1
    )
    module = hyperpod.MMAPDataModule(data_module=Module(), mmap_config=config)
    assert isinstance(module.train_dataloader(), Cached)
    assert config.prefetch_length == 3
    assert "--data-cache DIR" in told.text


def test_no_elastic_event_ends_a_script(told: pytest.LogCaptureFixture) -> None:
    assert [hyperpod.elastic_event_detected() for _ in range(3)] == [False] * 3
    assert told.text.count("session.on_scale") == 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: hyperpod.CheckpointlessMegatronStrategy(num_distributed_optimizer_instances=2), "HSDP"),
        (lambda: hyperpod.CheckpointlessCallback(enable_inprocess=True), "leave it out"),
        (lambda: hyperpod.CheckpointlessCompatibleConnector(object()), "--checkpoint-dir"),
        (lambda: hyperpod.CacheResumeMMAPConfig(enable_batch_encryption=True), "encrypt the file system"),
        (lambda: hyperpod.CheckpointManager().save_checkpoint(), "--checkpoint-dir"),
        (lambda: hyperpod.HPCallWrapper().restart, "session.steps"),
        (lambda: hyperpod.HPWrapper(finalize=print), "session.protect"),
        (lambda: hyperpod.HPWrapper(spare_ranks=3), "spare_ranks"),
        (lambda: hyperpod.MMAPDataModule(Module(), shards=3), "shards"),
        (lambda: hyperpod.MMAPDataModule(object()), "train_dataloader"),
    ],
)
def test_what_has_no_counterpart_names_the_cure(call: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()


def test_every_name_that_does_nothing_says_what_takes_its_place() -> None:
    silent = {"HPCallWrapper"} | {name for name in hyperpod.__all__ if _is_absent(name)}
    assert set(hyperpod._INSTEAD) == set(hyperpod.__all__) - silent


def _is_absent(name: str) -> bool:
    kind = getattr(hyperpod, name)
    return isinstance(kind, type) and issubclass(kind, hyperpod._Absent)


def test_the_names_need_neither_torch_nor_lightning() -> None:
    code = "import sys, regrow_recipes.compat.hyperpod\n"
    code += "print({'torch', 'lightning', 'pytorch_lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

"""The names of torch that are not promised: all here, and what is not is named before the training."""

import pytest
import torch

from regrow.comm.torch_private import expected_names
from regrow.core.errors import UsageError


def test_this_torch_has_all_names_that_are_used() -> None:
    assert expected_names.missing() == []


@pytest.mark.parametrize("name", ["torch.nn.parallel.DistributedDataParallel._gone", "torch.no_such_module.name"])
def test_a_name_that_is_gone_is_told_with_the_version(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(expected_names, "missing", lambda: [name])
    assert expected_names._has(name) is False
    with pytest.raises(UsageError, match=rf"torch .* has no {name}, which regrow uses \(install a version"):
        expected_names.check()


def test_what_a_torch_can_do_less_is_one_short_sentence() -> None:
    here = "torch.nn.Linear"
    less = {here: "never told", "torch.nn._Gone": "worlds keep their size", "torch.gone.Too": "worlds keep their size"}
    assert expected_names.shortfalls({here: "never told"}) == ""
    assert expected_names.shortfalls(less) == f"torch {torch.__version__} has no _Gone, Too: worlds keep their size"

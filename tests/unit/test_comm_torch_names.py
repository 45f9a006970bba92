"""The names of torch that are not promised: all here, and what is not is named before the training."""

import pytest

from regrow.comm import torch_names
from regrow.core.errors import UsageError


def test_this_torch_has_all_names_that_are_used() -> None:
    assert torch_names.missing() == []


@pytest.mark.parametrize("name", ["torch.nn.parallel.DistributedDataParallel._gone", "torch.no_such_module.name"])
def test_a_name_that_is_gone_is_told_with_the_version(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch_names, "missing", lambda: [name])
    assert torch_names._has(name) is False
    with pytest.raises(UsageError, match=rf"torch .* has no {name}, which regrow uses \(install a version"):
        torch_names.check()

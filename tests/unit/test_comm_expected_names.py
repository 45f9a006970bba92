"""The names of torch that are not promised: all here, and what is not is named before the training."""

import pytest

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

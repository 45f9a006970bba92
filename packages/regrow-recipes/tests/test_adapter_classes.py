"""Adapters that give objects of a framework other classes refuse a job in which that may not be."""

from types import SimpleNamespace

import pytest

from regrow.core.config import WorkerEnv
from regrow.core.errors import UsageError
from regrow_recipes.adapters.trainer import joining


def test_an_adapter_that_changes_classes_is_refused_with_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(rewrites=False)
    session = object()
    monkeypatch.setattr(WorkerEnv, "read", lambda: SimpleNamespace(spec=spec))
    monkeypatch.setattr(joining, "current_session", lambda: session)
    with pytest.raises(UsageError, match="no-script-rewrite"):
        joining.joined(0, changes_classes=True)
    assert joining.joined(0) is session
    spec.rewrites = True
    assert joining.joined(0, changes_classes=True) is session

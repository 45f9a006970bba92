"""Before groups are formed anew, torch gives back the memory that it only keeps: connections need theirs beside it."""

from types import SimpleNamespace

import pytest

from regrow.comm import nccl
from regrow.comm.groups import Formation, Groups
from regrow.comm.links import Site
from regrow.core.ids import Generation
from regrow.devices import accelerators


class Kept(Groups):
    """Groups that say when the old ones are gone and the new ones begin."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def retire(self) -> None:
        self._said.append("retired")

    def _open(self, formation: Formation) -> None:
        self._said.append("opened")


@pytest.mark.parametrize("devices", [True, False])
def test_memory_is_given_back_between_the_old_groups_and_the_new(
    monkeypatch: pytest.MonkeyPatch, devices: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(nccl, "available", lambda: devices)
    monkeypatch.setattr(accelerators, "in_use", lambda: SimpleNamespace(empty_cache=lambda: said.append("given back")))
    Kept(said).form(Formation(Generation(2), 0, 1, "nowhere", Site(None, "127.0.0.1", "secret")), lambda: False)
    assert said == (["retired", "given back", "opened"] if devices else ["retired", "opened"])

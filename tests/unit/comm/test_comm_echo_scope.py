"""Scopes in which collectives are answered locally."""

from typing import cast

from regrow.comm.echo import EchoTransport
from regrow.comm.process_group import EchoScope, RegrowGroup


class Group:
    """View of a group that a scope needs."""

    echo: EchoTransport | None = None

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3


def test_a_scope_that_ends_leaves_the_one_around_it_in_force() -> None:
    """As when DDP lays out its buckets anew in a function that is itself answered locally."""
    group = Group()
    groups = cast(list[RegrowGroup], [group])
    with EchoScope(groups):
        outer = group.echo
        with EchoScope(groups):
            assert group.echo is not None
        assert group.echo is outer is not None
    assert group.echo is None

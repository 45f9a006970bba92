"""Looks at a script's own values that no training ends for."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")


class Closable(Protocol):
    """Looks at values of a script. `notes`: for people."""

    notes: list[str]

    def close(self) -> None:
        """Look at them no more."""


F = TypeVar("F", bound=Closable)


def leaves_training_alone(function: Callable[Concatenate[F, P], None]) -> Callable[Concatenate[F, P], None]:
    """Whatever the script's values make of this, its training goes on without them."""

    @functools.wraps(function)
    def run(self: F, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  what a script's variables may hold is not known
            self.close()
            self.notes.append(f"the script's own variables are not followed: {type(error).__name__}: {error}")

    return run

"""Commands of other packages, which register them as entry points; each is imported when it is called."""

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import click

from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line

GROUP: Final = "regrow.commands"
"""Entry point group of commands: the name is the verb, the object a `click.Command`."""

ELSEWHERE: Final[Mapping[str, str]] = {
    "batch": "regrow-batch",
    "guest": "regrow-guests",
    "k8s": "regrow-clusters",
    "operator": "regrow-clusters",
    "plan": "regrow-lab",
    "port": "regrow-recipes",
    "recipes": "regrow-recipes",
    "sim": "regrow-lab",
    "slurm": "regrow-clusters",
    "train": "regrow-recipes",
}
"""Verbs of this repository's other packages, so that the error for a missing one names the package to install."""


@functools.cache
def announced() -> Mapping[str, EntryPoint]:
    """The commands of installed packages, by their verbs."""
    return {point.name: point for point in entry_points(group=GROUP)}


def package_of(verb: str) -> str:
    """The name of the installed package that brings a command."""
    point = announced()[verb]
    return point.dist.name if point.dist is not None else point.module.partition(".")[0]


def command(verb: str) -> click.Command | None:
    """The command of a verb; `None` for an unknown verb.

    Raises `UsageError` if the package of a known verb is not installed, or cannot be imported.
    """
    point = announced().get(verb)
    if point is None:
        if verb in ELSEWHERE:
            package = ELSEWHERE[verb]
            raise UsageError(f"`regrow {verb}` comes with {package}", hint=install_line(package=package))
        return None
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        package = package_of(verb)
        raise UsageError(
            f"`regrow {verb}` of {package} cannot be imported: {error}", hint=install_line(package=package)
        ) from error
    if not isinstance(found, click.Command):
        raise UsageError(f"{point.value} of {package_of(verb)} is no command, but a {type(found).__name__}")
    return found

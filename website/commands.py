"""Reference of the command line, made from the commands themselves: click's own objects are asked."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import click
from website.tables import cell, code, table

from regrow.cli.help_sections import SECTIONS, SectionedCommand
from regrow.cli.tree import commands


class Verb(NamedTuple):
    """A command that a person may call, by the words after `regrow`."""

    words: tuple[str, ...]
    command: click.Command
    context: click.Context

    @property
    def options(self) -> list[click.Option]:
        """Flags that its help shows."""
        found = [each for each in self.command.get_params(self.context) if isinstance(each, click.Option)]
        return [each for each in found if not each.hidden]

    @property
    def arguments(self) -> list[click.Argument]:
        """Arguments without a flag, in order."""
        return [each for each in self.command.get_params(self.context) if isinstance(each, click.Argument)]


def root() -> Verb:
    """`regrow` itself."""
    return Verb((), commands, click.Context(commands, info_name="regrow"))


def below(verb: Verb) -> Iterator[Verb]:
    """Commands of a group, and of groups in it; hidden ones are left out."""
    if not isinstance(verb.command, click.Group):
        return
    for name in verb.command.list_commands(verb.context):
        command = verb.command.get_command(verb.context, name)
        if command is None or command.hidden:
            continue
        found = Verb((*verb.words, name), command, click.Context(command, info_name=name, parent=verb.context))
        yield found
        yield from below(found)


def names_of(option: click.Option) -> list[str]:
    """All spellings of a flag, the longest first."""
    return sorted([*option.opts, *option.secondary_opts], key=len, reverse=True)


def _value(option: click.Option, context: click.Context) -> str:
    if option.is_flag or option.count:
        return ""
    if isinstance(option.type, click.Choice) and option.metavar is None:
        return ", ".join(str(each) for each in option.type.choices)
    return option.make_metavar(context)


def _default(option: click.Option) -> str:
    given = option.default
    if option.is_flag or callable(given) or option.required or type(given).__name__ == "Sentinel":
        return ""
    return "" if given in (None, "", ()) else str(given)


def _row(option: click.Option, context: click.Context) -> tuple[str, str, str, str]:
    flags = ", ".join(code(name) for name in names_of(option))
    told = re.sub(r"\s+", " ", option.help or "")
    variable = option.envvar if isinstance(option.envvar, str) else ""
    if variable and variable not in told:
        told += f" [${variable}]"
    if option.required:
        told += " Required."
    if option.multiple:
        told += " May be given several times."
    return flags, code(_value(option, context)), code(_default(option)), cell(told)


_HEAD = ("flag", "value", "default", "meaning")


def _flags(verb: Verb) -> str:
    shown = {max(option.opts, key=len): option for option in verb.options if "--help" not in option.opts}
    if not isinstance(verb.command, SectionedCommand):
        return table(_HEAD, [_row(option, verb.context) for option in shown.values()])
    parts = []
    for title, names in SECTIONS.items():
        rows = [_row(shown.pop(name), verb.context) for name in names if name in shown]
        parts.append(f"**{title}**\n\n{table(_HEAD, rows)}")
    if shown:
        parts.append("**Other**\n\n" + table(_HEAD, [_row(option, verb.context) for option in shown.values()]))
    return "\n".join(parts)


def _described(verb: Verb) -> str:
    pieces = " ".join(verb.command.collect_usage_pieces(verb.context))
    text = inspect.cleandoc(verb.command.help or "").replace("\b\n", "")
    return f"```\nregrow {' '.join(verb.words)} {pieces}\n```\n\n{text.replace('<', '&lt;')}\n"


def page_of(first: str, verbs: list[Verb]) -> str:
    """The page of a verb and of those below it."""
    top = verbs[0]
    parts = [f"# regrow {first}\n", _described(top), _flags(top)]
    for verb in verbs[1:]:
        parts += [f"## regrow {' '.join(verb.words)}\n", _described(verb), _flags(verb)]
    return "\n".join(parts)


def anchor(verb: Verb) -> str:
    """The place of a verb, from the page of all verbs."""
    first, *rest = verb.words
    return f"{first}.md" + (f"#regrow-{'-'.join(verb.words)}" if rest else "")


def _index(verbs: list[Verb]) -> str:
    rows = [
        (f"[`regrow {' '.join(verb.words)}`]({anchor(verb)})", cell(verb.command.get_short_help_str(200)))
        for verb in verbs
        if not isinstance(verb.command, click.Group)
    ]
    flags: dict[str, list[Verb]] = {}
    for verb in verbs:
        for option in verb.options:
            for name in names_of(option):
                if name not in ("-h", "--help"):
                    flags.setdefault(name, []).append(verb)
    by_flag = [
        (code(name), ", ".join(f"[{' '.join(verb.words)}]({anchor(verb)})" for verb in found))
        for name, found in sorted(flags.items(), key=lambda each: each[0].lstrip("-"))
    ]
    return (
        "# Commands and flags\n\nThese pages are made from the commands themselves. "
        "[Commands](../../commands.md) shows the usual ones in one page, and the exit codes.\n\n"
        f"## Commands\n\n{table(('command', 'purpose'), rows)}\n"
        f"## All flags\n\n{table(('flag', 'commands that take it'), by_flag)}"
    )


def pages() -> Mapping[str, str]:
    """Pages by their names below `reference/cli`."""
    verbs = list(below(root()))
    found = {"index.md": _index(verbs)}
    for first in dict.fromkeys(verb.words[0] for verb in verbs):
        found[f"{first}.md"] = page_of(first, [verb for verb in verbs if verb.words[0] == first])
    return found

"""All commands, and their errors as an exit code and a sentence."""

import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import click

from regrow.cli import data, elsewhere, jobs, moving, training
from regrow.core.config import state_home
from regrow.core.errors import DeadlineExceeded, RegrowError
from regrow.core.exit_codes import INTERNAL_ERROR, RUN_AGAIN, USAGE
from regrow.core.process.shortage import short_of_processes
from regrow.core.process.streams import open_standard_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code; never prints a stack trace of regrow's own.

    0: done. 1: the script's own error, or a running job refuses. 2: usage. 75: run it again. 70: a defect of regrow.
    """
    open_standard_streams()
    try:
        code = commands.main(args=None if argv is None else list(argv), prog_name="regrow", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except click.UsageError as error:
        place = f" ({error.ctx.command_path} --help lists what there is)" if error.ctx is not None else ""
        return _fail(f"{error.format_message().rstrip('.')}{place}", USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", RUN_AGAIN)
    except RegrowError as error:
        return _fail(str(error), RUN_AGAIN if isinstance(error, DeadlineExceeded) else USAGE)
    except BrokenPipeError:
        # The reader of the output (`| head`) has exited; the interpreter must not fail when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - a user is shown a sentence, the stack goes to a file
        if short := short_of_processes(error):
            return _fail(short, RUN_AGAIN)
        return _fail(_defect(error), INTERNAL_ERROR)
    return code if isinstance(code, int) else 0


def _fail(text: str, code: int) -> int:
    click.echo(f"regrow: {text}", err=True)
    return code


def _defect(error: Exception) -> str:
    """Write the stack trace to a file; returns the sentence that names the file."""
    stack = "".join(traceback.format_exception(error))
    path = state_home() / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    what = f"a defect of regrow: {type(error).__name__}: {error}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(stack, encoding="utf-8")
    except OSError as failure:
        return f"{what}; its trace could not be written to {path}: {failure.strerror or failure}"
    return f"{what}; please report it with {path}"


def _version() -> str:
    try:
        return version("regrow")
    except PackageNotFoundError:
        return "not installed"


SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Train": ("run", "try", "doctor", "demo"),
    "A job that runs": ("jobs", "status", "top", "logs", "scale", "move", "drain", "stop", "kill"),
    "A job afterwards": ("story", "goodput", "plot"),
}
"""Verbs that have a line of their own in `regrow --help`; the engine's other verbs share one line."""


class _Commands(click.Group):
    """The engine's commands and those of the other installed packages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All available verbs."""
        return sorted({*super().list_commands(ctx), *elsewhere.announced()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a verb; the engine's own take precedence."""
        return super().get_command(ctx, cmd_name) or elsewhere.command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs in sections."""
        own = set(super().list_commands(ctx))
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(verb, self.commands[verb].get_short_help_str(60)) for verb in verbs])
        others: dict[str, list[str]] = {}
        for verb in sorted(set(elsewhere.announced()) - own):
            others.setdefault(elsewhere.package_of(verb), []).append(verb)
        rest = own.difference(*SECTIONS.values())
        rows = [("regrow", ", ".join(sorted(rest)))]
        rows += [(package, ", ".join(verbs)) for package, verbs in sorted(others.items())]
        with formatter.section("Further commands, by package"):
            formatter.write_dl(rows)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="regrow")
def commands() -> None:
    """PyTorch training that continues without a restart when workers are lost."""


for _command in (*training.COMMANDS, data.data, *jobs.COMMANDS, *moving.COMMANDS):
    commands.add_command(_command)

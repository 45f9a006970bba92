"""The command that proposes the changes of a script."""

from pathlib import Path

import click


@click.command()
@click.argument("script", type=click.Path(path_type=Path))
def port(script: Path) -> int:
    """Print the changes that SCRIPT needs for regrow, as a diff, and notes on it. None of it is run.

    The diff goes to standard output: regrow port train.py | patch -p0. Without a diff the exit code is 1.
    """
    from regrow_recipes.port.files import modules_beside, read_source
    from regrow_recipes.port.proposing import propose

    source = read_source(script)
    # `patch` does not change a file with an absolute path.
    shown = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    made = propose(source.text, str(shown), modules_beside(script, source.text))
    for line in made.says:
        click.echo(f"regrow: {line}", err=True)
    click.echo(made.diff.encode(source.encoding), nl=False)
    return 0 if made.diff else 1

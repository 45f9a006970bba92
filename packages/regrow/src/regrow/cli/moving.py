"""Commands that move ranks of a running job to other nodes."""

import os

import click

from regrow.cli.jobs import answered, client_of
from regrow.core.config import jobs_home
from regrow.core.errors import UsageError


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="[JOB] NODE|RANK")
@click.option("--to", metavar="NODE", help="Node to move to; else any that has room.")
@click.option("--reason", default="", metavar="TEXT", help="Reason to record.")
def move(names: tuple[str, ...], to: str | None, reason: str) -> int:
    """Move ranks of JOB to a spare node while it trains. NODE: all ranks of this node; RANK: one rank, a number.

    Replacements start while all ranks train; at a step boundary they take over ranks and state. No step is repeated.
    Exit code 1: the job refuses, for example because no node has room, and goes on unchanged. 2: there is no such rank.
    """
    from regrow.core.ids import NodeId, Rank
    from regrow.membership.server.requests import MoveRequest

    if len(names) > 2:
        raise UsageError(f"move takes one job, and a node or a rank, not {' '.join(names)}")
    which, target = names[-1], None if to is None else NodeId(to)
    entry, client = client_of(names[0] if len(names) == 2 else None)
    rank = Rank(int(which)) if which.isascii() and which.isdigit() else None
    node = NodeId("" if rank is not None else which)
    return answered(entry, client.move(MoveRequest(node, rank, target, reason or "regrow move")))


@click.command("rolling-restart")
@click.argument("job", required=False)
@click.option("--run", "command", required=True, metavar="COMMAND", help="Restarts $REGROW_NODE on host $REGROW_HOST.")
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Only this one; may be given several times.")
@click.option("--patience", default="10min", metavar="TIME", help="Time for a node to empty, then return.  [10min]")
@click.option("--again", is_flag=True, help="Begin with the first node, even if some are done.")
def rolling_restart(job: str | None, command: str, nodes: tuple[str, ...], patience: str, again: bool) -> int:
    """Restart all nodes of JOB in turn while it trains. This needs a spare node (--spares).

    The ranks of a node move to the spare node, COMMAND (a local shell command) restarts the node, and once it has
    rejoined it is the spare for the next. Ctrl-C stops it; the same command continues where it stopped. Exit code 1: a
    node was not empty, or not back, in time, or COMMAND has failed; the job goes on.
    """
    from regrow.core.ids import NodeId
    from regrow.launch.checks import some_time
    from regrow.launch.maintenance.rolling_restart import PROGRESS_FILE, RollingRestart, alone, commanded

    seconds = some_time("--patience", patience)
    entry, _ = client_of(job)
    restart = RollingRestart(
        lambda: client_of(entry.job)[1],
        jobs_home() / entry.job / PROGRESS_FILE,
        restart=commanded(command, os.environ, within=seconds),
        say=click.echo,
        patience=seconds,
    )
    with alone(jobs_home() / entry.job):
        return restart.run([NodeId(node) for node in nodes], again=again)


COMMANDS = (move, rolling_restart)

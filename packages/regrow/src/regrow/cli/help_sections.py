"""Help of a command with many flags: `--help` shows the most used ones, `--help-all` all of them by purpose."""

from typing import Any, Final

import click

from regrow.launch.options import RunCommand

_MOST_USED: Final = """
    --nproc-per-node --nnodes --rdzv-endpoint --standby --checkpoint-dir --resume --replicas --watch --job
    --quiet
"""
_SECTIONS: Final = {
    "Start": """
        --nproc-per-node --nnodes --node-rank --rdzv-endpoint --rdzv-id --standalone --job --tag --local-addr
        --master-addr --master-port --module --no-python --preload --local-nodes --numa-binding
    """,
    "Survive faults": """
        --standby --warmth --spares --buddy-every --domain --checkpoint-dir --checkpoint-every --checkpoint-keep
        --resume --max-faults --window --max-restarts --node-timeout --node-lease --hang-timeout --no-elect
        --witness --no-script-rewrite
    """,
    "Grow and shrink": """
        --replicas --replica-ranks --replica-sizes --change-pause --slots --drain-grace --shutdown-timeout
    """,
    "Check the result": """
        --digest-every --on-divergence --no-audit --proof --check-for-nan --no-health --health-check
        --straggler-steps --replace-stragglers --log-rules
    """,
    "Data": "--data-cache --data-cache-bytes",
    "Network and security": "--bind --state-addr --hydration --token-file --tls-cert --tls-key --tls-ca",
    "Observe and debug": "--watch --node-metrics --log-dir --redirects --tee --fault-plan --quiet --help --help-all",
}
MOST_USED: Final = _MOST_USED.split()
SECTIONS: Final = {title: tuple(flags.split()) for title, flags in _SECTIONS.items()}
"""Every visible flag is in one of these sections, by its long name."""


class SectionedCommand(RunCommand):
    """A command whose `--help` shows the most used flags, and whose `--help-all` shows all, in sections."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show all flags and exit.",
            )
        )

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags."""
        shown = [option for option in self.get_params(context) if isinstance(option, click.Option)]
        rows = {_long(option): row for option in shown if (row := option.get_help_record(context))}
        if not context.meta.get(_ALL):
            with formatter.section("Most used flags (all of them: --help-all)"):
                formatter.write_dl([rows[name] for name in MOST_USED if name in rows])
            return
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([rows.pop(name) for name in names if name in rows])
        if rows:
            with formatter.section("Other"):
                formatter.write_dl(list(rows.values()))


_ALL: Final = "regrow.cli.help_sections.all"


def _long(option: click.Parameter) -> str:
    return max(option.opts, key=len)


def _show_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()

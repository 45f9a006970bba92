"""Commands about training data."""

from pathlib import Path
from typing import Any

import click

from regrow.core.config import jobs_home


@click.group()
def data() -> None:
    """Prepare training data, and check what a run has read."""


@data.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The corpus's folder.")
@click.option(
    "--tokenizer", required=True, metavar="SPEC", help="bytes, the path of a tokenizer.json, or module:function."
)
@click.option("--column", default="text", metavar="NAME", help="Field of a record that has the text.  [text]")
@click.option("--append-eos", metavar="ID", help="Token after each document: its number, or its text.")
@click.option("--dtype", type=click.Choice(["uint16", "uint32"]), help="Type of the tokens.  [by the vocabulary]")
@click.option("--workers", type=click.IntRange(min=1), default=None, metavar="N", help="Processes.  [one a CPU]")
@click.option(
    "--shard-bytes", type=click.IntRange(min=1), default=1 << 26, metavar="N", help="A shard's size.  [67108864]"
)
def pack(inputs: tuple[str, ...], **options: Any) -> None:
    """Tokenize INPUTs into a corpus that regrow.data.PackedTokens reads.

    INPUT is a path, a glob or a URL of JSON Lines (.jsonl, .json, also .gz), Parquet or Arrow files. A run after an
    interruption reuses the work that was done. Needs regrow[data].
    """
    from rich.console import Console

    from regrow.data.packing.packer import PackOptions
    from regrow.data.packing.packer import pack as run_pack

    options["workers"] = options["workers"] or 0
    run_pack(PackOptions(inputs=inputs, **options), Console())


@data.command()
@click.argument("jobs", nargs=-1, metavar="[JOB|FOLDER|FILE]...")
@click.option("--against", multiple=True, metavar="JOB", help="Each step must have read the same here; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(jobs: tuple[str, ...], against: tuple[str, ...], as_json: bool) -> int:
    """Prove from its records that JOB has read every sample exactly once, in spite of failures.

    Several JOBs are one training, each resumed from the one before it. Default: the running job, else the newest.
    Exit code 0: proven. 1: something is wrong, or the records are incomplete.
    """
    import msgspec

    from regrow.launch.verifying import verify as decide
    from regrow.observe.proof import Verdict, proof_lines

    proof = decide(jobs_home(), jobs, against)
    for line in [msgspec.json.encode(proof).decode()] if as_json else proof_lines(proof):
        click.echo(line)
    return 0 if proof.verdict is Verdict.PROVEN else 1

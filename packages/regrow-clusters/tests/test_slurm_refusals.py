"""Refusals of Slurm, in the words of 22.05, and the cure that is shown with each."""

from pathlib import Path

import pytest

from regrow.core.errors import UsageError
from regrow_clusters.slurm.client import SlurmClient
from regrow_clusters.slurm.commands import submit

JOB = 'name = "gpt"\nscript = ["train.py"]\nreplicaCount = 2\n'


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ("sbatch: error: invalid partition specified: trian\nInvalid partition name specified", "sinfo lists the part"),
        (
            "allocation failure: User's group not permitted to use this partition",
            "ask for the right to use it, or name",
        ),
        ("allocation failure: Requested node configuration is not available", "fewer nodes than the gang with its"),
        ("sbatch: error: Invalid generic resource (gres) specification", "sinfo -o '%P %G' lists what"),
        ("allocation failure: Invalid feature specification", "that --constraint can name"),
        ("allocation failure: Invalid node name specified", "sinfo -N lists the nodes"),
        ("allocation failure: Requested reservation is invalid", "scontrol show reservation lists"),
        ("sbatch: unrecognized option '--nosuch'\nTry \"sbatch --help\" for more information", "each is one word"),
        ("sbatch: error: Invalid account or account/partition combination specified", "name your account in options"),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", "is this a machine of the cluster"),
    ],
)
def test_a_refusal_names_its_cure_and_nothing_is_submitted(tmp_path: Path, said: str, cure: str) -> None:
    (tmp_path / "said").write_text(said)
    (tmp_path / "train.py").touch()
    file = tmp_path / "job.toml"
    file.write_text(JOB.replace("train.py", str(tmp_path / "train.py")))
    asked = tmp_path / "asked"
    for name, body in (("squeue", "exit 0"), ("sbatch", f'echo "$@" >>{asked}; cat {tmp_path}/said >&2; exit 1')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(UsageError) as refusal:
        submit(file, ["regrow"], SlurmClient({"PATH": f"{tmp_path}:/usr/bin:/bin"}))
    text = f"{refusal.value}"
    assert f"{file} [gang]: sbatch: " in text and cure in text
    assert asked.read_text() == "--test-only\n"

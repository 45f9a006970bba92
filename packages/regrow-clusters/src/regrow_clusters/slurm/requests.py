"""The file of the users' requests to a job, on its gang's first node.

The Slurm job's comment would not do: without accounting, Slurm 22.05 cannot change it once the job has lost a node.
"""

from pathlib import Path

import msgspec

from regrow_clusters.slurm.reading import JobRequests


def requests_file(home: Path, run: str) -> Path:
    """File of the requests to a run of that name, in the folder of records `home`."""
    return home / "slurm" / f"{run}.json"


def read_requests(file: Path) -> JobRequests:
    """Read the requests; empty if there are none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=JobRequests)
    except (OSError, msgspec.MsgspecError):
        return JobRequests()


def write_requests(file: Path, requests: JobRequests) -> None:
    """Replace the requests atomically. Raises `OSError`."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(requests))
    new.replace(file)

"""`python -m regrow.drill CHECK FOLDER UNTIL`: runs one check in its own process, and writes `FOLDER/CHECK.json`."""

import functools
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
import torch

from regrow.agent.workers.processes import die_with_parent
from regrow.core.config import jobs_home
from regrow.devices import accelerators
from regrow.drill import facts, steady, striking
from regrow.drill.checks import CHECKS, DrillCheck, first_port
from regrow.drill.ground import DrillSettings, Ground
from regrow.drill.verdict import CheckResult, CheckStatus, Judgement, not_applicable

DOING: Final[Mapping[str, Callable[[Ground], Judgement]]] = {
    "facts": facts.check,
    "network": striking.network,
    "groups": striking.groups,
    "kills-ddp": functools.partial(striking.kills, mode="ddp"),
    "kills-hsdp": functools.partial(striking.kills, mode="hsdp"),
    "hang": striking.hang,
    "sick-device": striking.sick_device,
    "memory": striking.memory,
    "steady": steady.check,
    "node": striking.node,
}


def main(name: str, folder: Path, until: float) -> None:
    """Run a check until `until` (monotonic clock), and write its result; errors of the check itself pass through."""
    began = time.monotonic()
    (check,) = (each for each in CHECKS if each.name == name)
    settings = msgspec.json.decode((folder / "settings.json").read_bytes(), type=DrillSettings)
    ground = Ground(settings, name, first_port=first_port(check), until=until, jobs_home=jobs_home())
    impossible = _impossible(check)
    judged = not_applicable(impossible) if impossible else DOING[name](ground)
    output = ground.output if judged.status is CheckStatus.FAILED else ""
    result = CheckResult(name, judged.status, judged.figure, time.monotonic() - began, judged.cause, output)
    if name == "facts":
        (folder / "versions.json").write_bytes(msgspec.json.encode(facts.versions()))
    (folder / f"{name}.json").write_bytes(msgspec.json.encode(result))


def _impossible(check: DrillCheck) -> str:
    """Reason why a check is not applicable on this machine; empty if it is applicable."""
    if not check.accelerator:
        return ""
    if not torch.accelerator.is_available():
        return "no accelerator"
    kind = accelerators.kind()
    if check.name == "memory" and not hasattr(torch.get_device_module(kind), "mem_get_info"):
        return f"torch.{kind} does not report its free memory"
    return ""


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)  # the context managers end the jobs


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    die_with_parent(signal.SIGTERM)
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))

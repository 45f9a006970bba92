"""Checks that train, inject faults and compare: groups, kills, hangs, sick devices, memory, lost nodes."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

import msgspec
import psutil

from regrow.core.ids import Rank, StepNo
from regrow.drill.ground import GLANCE, Ground
from regrow.drill.judging import (
    REFORMED,
    Blow,
    FlowRate,
    JobRun,
    ProcessCount,
    judge_counts,
    judge_rates,
    judge_struck,
    unstruck,
)
from regrow.drill.verdict import CheckStatus, Judgement, failed, not_applicable

STEPS = 40
HANG_TIMEOUT = "3s"
_HOLD = 12
"""Step in which a node is lost."""
KILLS = {
    "ddp": (
        Blow(1, 3, "forward"),
        Blow(0, 9, "reduce"),
        Blow(1, 16, "reduce"),
        Blow(1, 16, "hydrate"),
        Blow(1, 28, "update"),
    ),
    "hsdp": (
        Blow(1, 3, "forward"),
        Blow(2, 9, "reduce"),
        Blow(0, 16, "vote"),
        Blow(3, 23, "reduce"),
        Blow(3, 23, "hydrate"),
    ),
}


def network(ground: Ground) -> Judgement:
    """Measure the rate between rank 0 and the last rank."""
    ranks = 2 if ground.settings.nodes == 1 else 1
    run = ground.run(
        "network", [f"--nproc-per-node={ranks}"], [ground.script("network.py"), *filter(None, [ground.settings.bind])]
    )
    if run.code != 0:
        return failed(_ended(run))
    if not ground.settings.leads:
        return Judgement(CheckStatus.OK, "rates are with node 0")
    lines = (ground.folder / "rates.jsonl").read_text().splitlines()
    rates = [FlowRate(**msgspec.json.decode(line, type=dict)) for line in lines]
    return judge_rates(rates, state_gb=ground.settings.state_gb)


def groups(ground: Ground) -> Judgement:
    """Kill rank 1 repeatedly so that groups are formed anew, and count the descriptors and threads of rank 0."""
    blows = [Blow(1, 3 + 6 * at, "forward") for at in range(REFORMED + 1)]
    flags = ["--nproc-per-node=2"] if ground.settings.nodes == 1 else []
    run = ground.train("groups", ["--count=counts.jsonl"], steps=STEPS + 5, flags=flags, blows=blows)
    if run.code != 0:
        return failed(_ended(run))
    if not ground.settings.leads:
        return Judgement(CheckStatus.OK, "counts are with node 0")
    if text := unstruck(run.ledger, blows):
        return failed(text)
    lines = (ground.folder / "counts.jsonl").read_text().splitlines()
    counts = [ProcessCount(**msgspec.json.decode(line, type=dict)) for line in lines]
    return judge_counts(counts, [StepNo(blow.step) for blow in blows])


def kills(ground: Ground, mode: str) -> Judgement:
    """Kill a rank before its loop, then ranks at stages of steps and of a recovery."""
    if mode == "hsdp" and (ground.settings.world < 4 or ground.settings.world % 2):
        return not_applicable(f"HSDP needs four ranks, or another even number; here are {ground.settings.world}")
    return _struck(ground, f"{mode}-kills", ["--die-once=died"], KILLS[mode], mode=mode, evidence="died")


def hang(ground: Ground) -> Judgement:
    """Stop a rank with SIGSTOP, so that it hangs."""
    blows = [Blow(1, 6, "forward", "sigstop")]
    return _struck(ground, "hang", [], blows, flags=[f"--hang-timeout={HANG_TIMEOUT}"], kind="hang")


def sick_device(ground: Ground) -> Judgement:
    """Make a device fail once in the middle of a step."""
    return _struck(ground, "sick", ["--assert-once=6:broken"], evidence="broken")


def memory(ground: Ground) -> Judgement:
    """Kill a rank that uses most of its device's memory, three times."""
    return _struck(ground, "memory", ["--fill=0.6"], [Blow(1, 4 + 10 * at, "forward") for at in range(3)])


def node(ground: Ground) -> Judgement:
    """Kill the agent of the last rank's node: a spare takes over its ranks, or the node returns."""
    settings = ground.settings
    if settings.nodes > 2:
        return not_applicable("a node is lost on purpose on two nodes, or on one machine")
    if settings.world % 2:
        return not_applicable(f"{settings.world} ranks cannot be spread over two nodes")
    half = settings.world // 2
    flags = ["--local-nodes=3", "--spares=1", f"--nproc-per-node={half}"] if settings.nodes == 1 else []
    lost = frozenset(Rank(rank) for rank in range(half, settings.world))

    def kill_agent(runs: Callable[[], bool]) -> None:
        held = ground.folder / "held"
        while not held.exists() and runs():
            time.sleep(GLANCE)
        if held.exists():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                agent = psutil.Process(psutil.Process(int(held.read_text())).ppid())
                if "regrow.agent" in agent.cmdline():
                    os.kill(agent.pid, signal.SIGKILL)
            held.with_suffix(".go").touch()

    hosts = settings.nodes == 1 or settings.node_rank == settings.nodes - 1
    return _struck(
        ground,
        "node",
        [f"--hold={_HOLD}:held"],
        flags=flags,
        kind="node",
        incomplete=lost,
        meanwhile=kill_agent if hosts else None,
        evidence="held" if hosts else "",
    )


def _struck(
    ground: Ground,
    name: str,
    arguments: Sequence[str],
    blows: Sequence[Blow] = (),
    *,
    mode: str = "ddp",
    flags: Sequence[str] = (),
    kind: str = "",
    incomplete: frozenset[Rank] = frozenset(),
    meanwhile: Callable[[Callable[[], bool]], None] | None = None,
    evidence: str = "",
) -> Judgement:
    """Compare a training with faults and the undisturbed one. `evidence`: file that the script writes at its fault."""
    alone, judged = ground.alone(mode, steps=STEPS)
    if judged.status is not CheckStatus.OK:
        return judged
    run = ground.train(name, [f"--mode={mode}", *arguments], steps=STEPS, flags=flags, blows=blows, meanwhile=meanwhile)
    if run.code == 0 and evidence and ground.settings.nodes == 1 and not (ground.folder / evidence).exists():
        return failed("the script of the training did not come to where it is struck")
    return judge_struck(run, alone, blows, records=ground.settings.leads, kind=kind, incomplete=incomplete)


def _ended(run: JobRun) -> str:
    if run.code is None:
        return f"the job did not end within {run.seconds:.0f} s"
    return f"the job ended with code {run.code}"

"""Judges the results of jobs and measurements, check by check. Pure."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from regrow.core.ids import Rank, Seconds, StepNo
from regrow.drill.verdict import Judgement, failed, ok
from regrow.observe.ledger import Ledger
from regrow.observe.trial import difference_at

LEAST_GBPS = 0.05
"""Least GB/s of an address, with four flows: less than half of a link of 1 Gbit/s."""
MOST_RATIO, ROOM_MS = 1.5, 10.0
"""Limits of a step under regrow: this factor of a plain step, or this much longer, whichever is more."""
REFORMED = 5
MOST_GROWTH = 2
"""Most growth of descriptors or threads over `REFORMED` recoveries: a leak adds at least one per recovery."""
GIB = 1 << 30


class MachineFacts(NamedTuple):
    """Facts about a machine that matter to training. Sizes in bytes; None: no limit, or unknown.

    Attributes:
        descriptors: most open files of a process.
        locked: most memory that a process may lock.
        infiniband: names of adapters, which need locked memory.
        shared_free: free space in /dev/shm.
        memory_free: available memory.
        ranks: number of ranks to run here.
    """

    device: str
    descriptors: int | None
    locked: int | None
    infiniband: Sequence[str]
    shared_free: int | None
    memory_free: int
    ranks: int


def judge_facts(facts: MachineFacts) -> Judgement:
    """Judge limits; names each that is too small, with the remedy."""
    causes = []
    if facts.descriptors is not None and facts.descriptors < 512:
        causes.append(f"a process may open {facts.descriptors} files only: ulimit -n 65536")
    if facts.infiniband and facts.locked is not None and facts.locked < 64 << 20:
        causes.append(
            f"a process may lock {facts.locked >> 10} KiB only, {facts.infiniband[0]} needs more: ulimit -l unlimited"
        )
    if facts.shared_free is not None and facts.shared_free < 64 << 20:
        causes.append(f"/dev/shm has {facts.shared_free >> 20} MiB free: a container needs --shm-size or --ipc=host")
    if facts.memory_free < facts.ranks * GIB // 2:
        causes.append(f"{facts.memory_free / GIB:.1f} GiB of memory are free for {facts.ranks} ranks")
    figure = f"{facts.device}, {facts.memory_free / GIB:.1f} GiB of memory free"
    return failed("; ".join(causes), figure) if causes else ok(figure)


class FlowRate(NamedTuple):
    """Rate to one address with this number of flows. `gbps`: 10^9 bytes per second; `error`: reason of a failure."""

    address: str
    flows: int
    gbps: float
    error: str = ""


def judge_rates(rates: Sequence[FlowRate], *, state_gb: float) -> Judgement:
    """Judge the rates of addresses; the best rate gives the time for a node's state.

    An address that does not answer is reported, but is a failure only if no other address answers: addresses of
    container bridges cannot be reached from other nodes, and need not be.
    """
    if not rates:
        return failed("no address was measured")
    working = {each.address for each in rates if not each.error}
    silent = {each.address: each.error for each in rates if each.address not in working}
    four = [each for each in rates if each.flows > 1 and not each.error]
    best = max(each.gbps for each in rates)
    reported = ", ".join(
        f"{each.address} {each.flows} flow{'s' * (each.flows > 1)} {each.gbps:.2f} GB/s"
        for each in rates
        if not each.error
    )
    if best > 0:
        reported += f"; a lost node takes {state_gb / best:.0f} s for {state_gb:g} GB of state (--state-gb)"
    silence = "; ".join(f"{address} did not answer: {error}" for address, error in silent.items())
    if not working:
        return failed(silence)
    reported += f"; {silence}" * bool(silence)
    if errors := [f"{each.address} broke: {each.error}" for each in rates if each.error and each.address in working]:
        return failed("; ".join(errors), reported)
    if slow := [each for each in four if each.gbps < LEAST_GBPS]:
        return failed(f"{slow[0].address} is slower than {LEAST_GBPS:g} GB/s", reported)
    return ok(reported)


class ProcessCount(NamedTuple):
    """Resources, after a step, of a process that survives all faults."""

    step: int
    descriptors: int
    threads: int


def judge_counts(counts: Sequence[ProcessCount], kills: Sequence[StepNo]) -> Judgement:
    """Compare the minimum of each count after the first kill with that after the last. `kills`: their steps."""
    after = [
        [each for each in counts if kill < each.step and (later is None or each.step < later)]
        for kill, later in zip(kills, [*kills[1:], None], strict=True)
    ]
    if not all(after):
        return failed("the process that was to live through all kills did not")
    causes = []
    for at, name in ((1, "descriptors"), (2, "threads")):
        first, last = (min(each[at] for each in part) for part in (after[0], after[-1]))
        if last - first > MOST_GROWTH:
            causes.append(f"{name} of a survivor grew from {first} to {last} in {len(kills) - 1} recoveries")
    figure = f"{len(kills)} times formed anew, {after[-1][-1][1]} descriptors and {after[-1][-1][2]} threads"
    return failed("; ".join(causes), figure) if causes else ok(figure)


class JobRun(NamedTuple):
    """The results of one job. `code`: None if the job did not end in time; `output`: its last output."""

    code: int | None
    ledger: Ledger
    output: str
    seconds: Seconds


def difference(struck: Ledger, alone: Ledger, *, incomplete: frozenset[Rank] = frozenset()) -> str:
    """Describe the first difference of two runs; empty if there is none.

    Records of ranks in `incomplete` may lack steps: the newest lines of a killed agent are lost.
    """
    mine, theirs = struck.numbers, alone.numbers
    for at in sorted(mine.keys() | theirs.keys()):
        if at[1] in incomplete and (at not in mine or at not in theirs):
            continue
        if text := difference_at(mine, theirs, at):
            return text
    return ""


def judge_alone(run: JobRun, *, steps: int) -> Judgement:
    """Judge an undisturbed run: `ok` without a figure, or the reason why no run can be compared with it."""
    if run.code is None:
        return failed(f"the undisturbed training did not end within {run.seconds:.0f} s")
    if run.code != 0:
        return failed(f"the undisturbed training ended with code {run.code}")
    if not run.ledger.commits or len(run.ledger.commits) < steps:
        return failed(f"the undisturbed training has {len(run.ledger.commits)} of {steps} steps in its records")
    return ok("")


class Blow(NamedTuple):
    """A planned fault. `stage`, `how`: as in a fault plan."""

    rank: int
    step: int
    stage: str
    how: str = "sigkill"

    def toml(self) -> str:
        """The entry in a fault plan."""
        return f'[[fault]]\nrank = {self.rank}\nstep = {self.step}\nat = "{self.stage}"\nhow = "{self.how}"\n'


def judge_struck(
    run: JobRun,
    alone: JobRun,
    blows: Sequence[Blow] = (),
    *,
    records: bool = True,
    kind: str = "",
    incomplete: frozenset[Rank] = frozenset(),
) -> Judgement:
    """Judge a run with faults against the undisturbed one.

    Args:
        run: the run with faults.
        alone: the undisturbed run.
        blows: the faults of its plan.
        records: True if this node has the coordinator's records, which contain faults and incidents.
        kind: an incident of this kind must be in the records; empty: any.
        incomplete: ranks whose newest records may be lost.
    """
    if run.code is None:
        return failed(f"the training did not end within {run.seconds:.0f} s: {_open(run.ledger)}")
    if run.code != 0:
        return failed(f"the training ended with code {run.code}: {_open(run.ledger)}")
    if text := difference(run.ledger, alone.ledger, incomplete=incomplete):
        return failed(f"not bitwise equal to the undisturbed run: {text}")
    if not records:
        return ok("this node's ranks are bitwise equal")
    if text := unstruck(run.ledger, blows):
        return failed(text)
    incidents = [each for each in run.ledger.incidents if not kind or each.kind == kind]
    if not incidents:
        return failed(f"no incident{f' of kind {kind}' * bool(kind)} is in the records")
    totals = [each.total for each in incidents]
    faults = sum(each.faults for each in incidents)
    stages = ", ".join(dict.fromkeys(blow.stage for blow in blows))
    return ok(
        f"{faults} fault{'s' * (faults != 1)}{f' ({stages})' * bool(stages)} mended, bitwise equal; "
        f"{median(totals):.2f} s each, at most {max(totals):.2f}"
    )


def unstruck(ledger: Ledger, blows: Sequence[Blow]) -> str:
    """Describe the first planned fault that did not happen; empty if all have happened."""
    struck = {fault.fault for fault in ledger.injected}
    missing = [blow for at, blow in enumerate(blows, 1) if f"plan-{at}" not in struck]
    return f"rank {missing[0].rank} was not struck at {missing[0].stage} of step {missing[0].step}" if missing else ""


def _open(ledger: Ledger) -> str:
    if ledger.open_incidents:
        incident = next(iter(ledger.open_incidents.values()))
        return f"an incident of step {incident.step} is open"
    return f"its newest step is {ledger.last_step}"


def judge_steady(blocks: Mapping[str, Sequence[float]]) -> Judgement:
    """Judge milliseconds per step of the sides `plain` and `regrow`, measured in alternating blocks."""
    if not all(blocks.get(side) for side in ("plain", "regrow")):
        return failed("a side did not train")
    plain, ours = median(blocks["plain"]), median(blocks["regrow"])
    figure = f"a step {ours:.2f} ms under regrow, {plain:.2f} ms plain: ratio {ours / plain:.3f}"
    if ours > max(plain * MOST_RATIO, plain + ROOM_MS):
        return failed(f"a step takes {ours / plain:.2f} times as long as without regrow", figure)
    return ok(figure)

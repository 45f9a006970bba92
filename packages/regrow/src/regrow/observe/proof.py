"""The result of `regrow data verify` about a training, and its description."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from regrow.core.ids import Generation, Rank, StepNo
from regrow.core.messages.data import OrderSpec
from regrow.observe.story import count

_KEPT_OF_A_CAUSE = 20
_SHOWN = 10


class Verdict(StrEnum):
    """Verdict that the records support."""

    PROVEN = "proven"
    UNPROVEN = "unproven"
    WRONG = "wrong"


class Finding(msgspec.Struct, frozen=True):
    """One error. `cause`: one of a few kinds; `text`: its description."""

    cause: str
    text: str
    step: StepNo
    run: str
    share: int | None = None
    rank: Rank | None = None
    generation: Generation | None = None


class WorldSpan(msgspec.Struct, frozen=True):
    """Consecutive steps that were read by the same number of shares."""

    shares: int
    first: StepNo
    last: StepNo


class Proof(msgspec.Struct):
    """Result of the check.

    Attributes:
        causes: number of findings of each cause; `findings` has the first ones of each.
        reasons: reasons why the proof is incomplete.
        steps: number of steps, from `first` on. `unfinished`: steps after them that not all ranks had done.
        orders: all orders stated for the steps, without repetition.
        samples_known: True if each sample could be checked; otherwise only shares and digests were.
        epochs: number of complete passes over a source.
        read: samples, including `padding`: those that were read twice in the short last batch of an epoch.
        dropped: samples that the order leaves out at the end of an epoch.
        repeated, skipped: samples that were wrongly read again, or wrongly not read.
        agreed: steps that were committed more than once and read the same each time.
        compared: steps for which another chain of runs, `against`, has read the same.
    """

    runs: list[str]
    verdict: Verdict = Verdict.PROVEN
    findings: list[Finding] = []
    causes: dict[str, int] = {}
    reasons: list[str] = []
    first: StepNo = StepNo(0)
    steps: int = 0
    unfinished: int = 0
    worlds: list[WorldSpan] = []
    orders: list[OrderSpec] = []
    samples_known: bool = True
    epochs: int = 0
    read: int = 0
    padding: int = 0
    dropped: int = 0
    repeated: int = 0
    skipped: int = 0
    agreed: int = 0
    compared: int = 0
    against: list[str] = []

    def find(self, finding: Finding) -> None:
        """Add a finding."""
        before = self.causes.get(finding.cause, 0)
        self.causes[finding.cause] = before + 1
        if before < _KEPT_OF_A_CAUSE:
            self.findings.append(finding)

    def decide(self) -> None:
        """Set the verdict from findings and reasons."""
        self.verdict = Verdict.WRONG if self.findings else Verdict.UNPROVEN if self.reasons else Verdict.PROVEN


def spans(steps: Sequence[int]) -> str:
    """`step 3`, or `steps 3 to 9, 12`; `steps` in ascending order."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and parts[-1][1] == step - 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    text = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in parts[:_SHOWN])
    more = f" and {len(parts) - _SHOWN} other places" if len(parts) > _SHOWN else ""
    return f"{'step' if len(steps) == 1 else 'steps'} {text}{more}"


def proof_lines(proof: Proof) -> list[str]:
    """A proof as lines of text: the facts, then errors and gaps."""
    rows = [("verdict", _verdict(proof)), ("steps", _steps(proof))]
    rows += [("worlds", ", ".join(_world(world) for world in proof.worlds))] if proof.worlds else []
    rows += [("order", _order(order)) for order in proof.orders]
    rows += [("samples", _samples(proof))] if proof.steps else []
    if proof.agreed:
        rows.append(("again", f"{count(proof.agreed, 'step')} committed more than once, with the same content"))
    if proof.against:
        same = f"{count(proof.compared, 'step')} with the same samples as in {', '.join(proof.against)}"
        rows.append(("against", same))
    rows += [("wrong", _finding(finding, several=len(proof.runs) > 1)) for finding in proof.findings[:_SHOWN]]
    total = sum(proof.causes.values())
    if total > _SHOWN:
        counted = ", ".join(f"{number} x {cause}" for cause, number in proof.causes.items())
        rows.append(("", f"{total} findings in all: {counted}"))
    rows += [("unproven", reason) for reason in proof.reasons]
    return [f"{name:<9} {text}".rstrip() for name, text in rows]


def _verdict(proof: Proof) -> str:
    name = " then ".join(proof.runs)
    if proof.verdict is Verdict.PROVEN and proof.samples_known:
        return f"proven: {name} has read every sample of its order once"
    return f"{proof.verdict}: {name}"


def _steps(proof: Proof) -> str:
    if not proof.steps:
        return "none"
    text = f"{proof.first} to {proof.first + proof.steps - 1}"
    return text + (f", and {proof.unfinished} that not all ranks had done" if proof.unfinished else "")


def _world(world: WorldSpan) -> str:
    return f"{world.shares} ({spans(range(world.first, world.last + 1))})"


def _order(order: OrderSpec) -> str:
    sources = ", ".join(f"{source.name or 'data set'} of {source.size}" for source in order.sources)
    batch = f"{order.global_batch} in all" if order.global_batch else f"{order.batch_size} a share"
    shuffled = "shuffled" if order.shuffle else "as it stands"
    parts = [order.kind, f"seed {order.seed}", f"batch {batch}", f"remainder {order.remainder}", shuffled]
    return ", ".join(parts if order.kind != "opaque" else parts[:2]) + (f": {sources}" if sources else "")


def _samples(proof: Proof) -> str:
    if not proof.samples_known:
        return "not known one by one; shares and digests were compared"
    parts = [f"{proof.read} read", f"{proof.repeated} repeated", f"{proof.skipped} skipped"]
    parts += [f"{proof.padding} padding"] if proof.padding else []
    parts += [f"{proof.dropped} dropped by the order"] if proof.dropped else []
    return f"{', '.join(parts)}; {count(proof.epochs, 'epoch')} complete"


def _finding(finding: Finding, *, several: bool) -> str:
    parts = [f"{finding.run}, step {finding.step}" if several else f"step {finding.step}"]
    parts += [f"share {finding.share}"] if finding.share is not None else []
    parts += [f"rank {finding.rank}"] if finding.rank is not None else []
    parts += [f"generation {finding.generation}"] if finding.generation is not None else []
    return f"{', '.join(parts)}: {finding.cause}: {finding.text}"

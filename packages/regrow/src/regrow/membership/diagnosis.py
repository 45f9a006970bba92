"""Messages that explain why a job ended: cause, place, cure."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from regrow.core.exit_codes import exit_text
from regrow.core.ids import NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.vocabulary import ErrorReport
from regrow.membership.recovery_point import Uncovered
from regrow.membership.replica_digests import Divergence
from regrow.membership.roster import WorkerRecord
from regrow.membership.scaling import Limits, Weighed

MOST_NAMED = 8
READS_EARLY = "the script reads its rank before its loop"
NOTHING_BETWEEN = (
    "the script has no function marked @regrow.restartable, so nothing can strike in one between two steps"
)
"""Refusal of a fault that was requested between two steps, a place that this script never reaches."""
NOT_ALL_TRAINING = "the coordinator works again, but not every rank was in its generation"
"""Message after a takeover in which the agents have answered but some rank does not train."""
IN_BETWEEN = "the coordinator failed while ranks were on their way into a generation"
"""Cause of a generation that is given up because the decisions about it were lost with the coordinator."""


def script_error(rank: Rank | None, step: StepNo, error: ErrorReport, *, again: bool = False, behind: str = "") -> str:
    """Message with the script's own error, its rank and step. `behind`: the fault after which bodies were run again."""
    where = f"rank {rank} failed" if rank is not None else "a worker failed"
    where += f" at step {step}" if step >= 0 else " before its first step"
    twice = ", the same error twice" if again else ""
    if behind:
        twice += (
            f", both times in a body that was run again after a fault ({behind}), and never before it: the script "
            "may be right, and something that the interrupted body has left could not be put back (docs/limits.md)"
        )
    return f"{where}{twice}:\n{error.traceback.rstrip()}"


def unforeseen(change: str) -> str:
    """Message that the job's state changed in a way that `job_state.NEXT` does not list."""
    return f"a defect of regrow, please report it: the job's state changed from {change}, which was not foreseen"


def early_reads(where: str) -> str:
    """Message that standbys would be wrong for another rank because they have run the script already."""
    return (
        f"{READS_EARLY} ({where}), so a standby built for one rank cannot take another's place: standbys now wait "
        "before the script, which makes them slower (as with --warmth imports). To have built standbys, ask "
        "session.rank, session.local_rank or session.is_main inside the loop instead"
    )


def went_on(rank: Rank, step: StepNo, error: ErrorReport) -> str:
    """Message about an error that did not recur when the body ran again, so that the job goes on."""
    return (
        f"rank {rank} failed at step {step} and has gone on; the error did not come again:\n{error.traceback.rstrip()}"
    )


def cut_off(error: ErrorReport) -> str:
    """Message that a fault elsewhere ended a script's call between two steps; empty for the script's own error."""
    if not error.type.endswith("GenerationHalted"):
        return ""
    return f"was cut off between two steps by a fault elsewhere: {error.message}"


def exposed(ranks: Sequence[Rank], home: str) -> str:
    """Message that these ranks hold the same part of the state and would fail together."""
    return (
        f"{_ranks(ranks)} hold the same part of the state and are all on {home}: if it is lost, this part is too "
        "(--buddy-every K keeps copies elsewhere)"
    )


def spares_not_kept(spares: int, nodes: int) -> str:
    """Message that nodes that were to be spare have ranks."""
    return (
        f"--spares {spares} is not kept: the ranks are spread over {nodes} nodes, because on fewer nodes one failure "
        "could take all copies of a part of the state (start the job on one node more)"
    )


def died_building(rank: Rank | None, code: int) -> str:
    """Message that a worker ended before its first step without reporting an error."""
    return f"rank {rank} {exit_text(code)} before its first step; its output is in its log"


def died_after_loop(rank: Rank | None, code: int, steps: StepNo, *, through: bool = False) -> str:
    """Message that a worker failed in the code after its last step; `through`: after that code had ended too."""
    where = f"in the code after its last step; all ranks had left the loop, and {steps} steps had been committed"
    over = "when its script and all its exit handlers had ended: nothing is lost by that"
    return f"rank {rank} {exit_text(code)} {over if through else where}"


def stays_after_loop(rank: Rank | None, waited: Seconds, steps: StepNo) -> str:
    """Message that a worker has not ended although all others have."""
    return f"rank {rank} has not ended within {waited:g} s after the last other rank; {steps} steps had been committed"


def layout_differs(worker: WorkerId, rank: Rank | None) -> str:
    """Message that two workers built different models."""
    place = f"rank {rank}" if rank is not None else "a standby"
    return (
        f"{place} ({worker}) built protected state that differs from the other ranks' in names, shapes or order: "
        "the script must build the same model and optimizer on every rank"
    )


def left_alone(rank: Rank, left_at: StepNo, step: StepNo) -> str:
    """Message that one rank left the loop while the others went on."""
    return (
        f"rank {rank} left the training loop after step {left_at - 1} while the others went on with step {step}: "
        "every rank must leave at the same step"
    )


def state_lost(step: StepNo, cause: str) -> str:
    """Message that there is no living copy of the state and no durable one."""
    return (
        f"the last copy of the training state (at step {step}) was lost: {cause}; there is no durable checkpoint to "
        "go back to (set --checkpoint-dir to have one, or --buddy-every to have copies in memory)"
    )


def torn(ranks: Mapping[Rank, StepNo]) -> str:
    """Message that names the ranks whose updates were cut off, by step; empty if there are none."""
    if not ranks:
        return ""
    steps = {step: [rank for rank, at in sorted(ranks.items()) if at == step] for step in sorted(set(ranks.values()))}
    parts = [
        f"{_ranks(who)} {'was' if len(who) == 1 else 'were'} in the middle of the update of step {step}"
        for step, who in steps.items()
    ]
    return f"{', '.join(parts)}, which was cut off there, so that no rank has the state from before or after it"


def uncovered(
    start: Uncovered, buddy_every: int, reported: str = "", broken: Mapping[Rank, StepNo] = MappingProxyType({})
) -> str:
    """Message that no living worker has some part of the state. `reported`: last report of the workers that had it.

    `broken`: ranks that were in the middle of an update, with its step.
    """
    cut = torn(broken)
    last = "".join(f" ({text})" for text in (reported, cut) if text)
    if not start.ranks:
        return f"no step has a whole copy of the state in the memory of the remaining workers{last}"
    why = "and no copy of it is in any agent's memory" if buddy_every else "and copies are not kept (--buddy-every)"
    return f"the state of {_ranks(start.ranks)} is held by no remaining worker, {why}{last}"


def replicas_differ(
    step: StepNo, wrong: Sequence[WorkerRecord], undecided: Sequence[WorkerRecord], tensors: Sequence[str]
) -> str:
    """Message about silent corruption: the ranks, the step and the tensors."""
    where = f", in {', '.join(tensors)}" if tensors else ""
    parts = []
    if wrong:
        parts.append(f"the state of {_places(wrong)} differs from its replicas' before step {step}{where}")
    if undecided:
        parts.append(
            f"the states of {_places(undecided)} differ before step {step}{where}, and one of them is wrong: "
            "running again from the last equal state will show which one"
        )
    return "; ".join(parts)


def replicas_start_unlike(found: Divergence) -> str:
    """Message that ranks have built different values although they should hold the same state."""
    first, *others = found.alike
    odd = ", ".join(_ranks(ranks) for ranks in others)
    return (
        f"{odd} {'start' if len(others) > 1 or len(others[0]) > 1 else 'starts'} with other values than "
        f"{_ranks(first)} in {', '.join(found.parts)}. If these are different parts of a model, give "
        "protect(part=...); else build them alike, or leave out of the protected state what belongs to a rank: a "
        "replacement receives the values of another rank"
    )


def replicas_unlike(found: Divergence) -> str:
    """Message that replicas have different state; it may be unknown which of them is right."""
    odd = found.odd
    others = tuple(rank for ranks in found.alike for rank in ranks if rank not in odd)
    whom = f"{_ranks(odd)} differs from {_ranks(others)}" if odd else f"{_ranks(tuple(sorted(others)))} differ"
    return f"replicas are not the same any more before step {found.step}: {whom} in {', '.join(found.parts)}"


def replicas_diverge(found: Divergence, again: Sequence[Rank]) -> str:
    """Message of `replicas_unlike`, with its consequence and a cure. `again`: ranks that are replaced because of it."""
    text = replicas_unlike(found)
    if again:
        return f"{text}. {_ranks(again)} came in by a recovery, and is replaced: please report this"
    return (
        f"{text}. Training goes on with that, as without regrow; a replacement receives the values of another rank. "
        "Are gradients reduced (DDP)? Protect whatever the body changes, and what belongs to one rank in a call of its "
        'own with part=f"rank{session.rank}"; --digest-every finds bad memory'
    )


def _ranks(ranks: Sequence[Rank]) -> str:
    names = [str(rank) for rank in ranks[:8]] + (["others"] if len(ranks) > 8 else [])
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _places(workers: Sequence[WorkerRecord]) -> str:
    return " and ".join(f"rank {worker.rank} ({worker.worker} on {worker.node})" for worker in workers)


def replicas_differ_again(cause: str) -> str:
    """Message that the replicas differ again after a rerun from their last common state."""
    return (
        f"{cause}. The same steps had been run again for this reason already, and the replicas differ again: the "
        "script or its kernels do not repeat themselves (random numbers of its own, state that each rank has for "
        "itself), or memory is bad (look at those nodes)"
    )


def no_agreed_state(step: StepNo) -> str:
    """Message that the replicas have no common state to go back to."""
    return f"replicas differ before step {step}, and no state on which they agreed is left in any worker"


def budget_spent(most: int, window: Seconds, cause: str) -> str:
    """Message that there were more faults than the budget allows."""
    return (
        f"more than {most} faults within {window:g} s; the last: {cause} "
        "(raise --max-faults, or look for a bad machine)"
    )


def cannot_be_ended(workers: Sequence[WorkerId]) -> str:
    """Message that fenced workers did not end in time; names at most `MOST_NAMED` of them."""
    more = f" and {len(workers) - MOST_NAMED:,} more" if len(workers) > MOST_NAMED else ""
    named = ", ".join(workers[:MOST_NAMED])
    return f"workers {named}{more} could not be ended; starting others beside them would not be safe"


def node_lost(node: NodeId, reason: str) -> str:
    """Message that an agent is gone, and with it its workers."""
    return f"{node} was lost ({reason})"


def nodes_stay_away(nodes: Sequence[NodeId], deadline: Seconds) -> str:
    """Message that lost nodes were not started again in time."""
    if not nodes:
        return f"there was no room for the lost ranks within {deadline:g} s; run the job again with --resume"
    which = f"{', '.join(nodes)} {'was' if len(nodes) == 1 else 'were'}"
    return (
        f"{which} lost and did not come back within {deadline:g} s: start `regrow run` there again in time, or raise "
        "--node-timeout; then run the job again with --resume"
    )


def nodes_given_back(nodes: Sequence[NodeId], least: int) -> str:
    """Message that nodes have to be given back and no other node has room for their ranks."""
    which = f"{', '.join(nodes)} {'is' if len(nodes) == 1 else 'are'} given back"
    return (
        f"{which}, and what is left has no room for {least} replica{'s' if least > 1 else ''}: run the job again with "
        "--resume when there is"
    )


def node_drains(node: NodeId, grace: Seconds, reason: str) -> str:
    """Message that a node has to be given back."""
    return f"{node} is given back within {grace:g} s: {reason}"


def drain_accepted(node: NodeId, grace: Seconds) -> str:
    """Answer to an accepted drain."""
    return f"{node} is given back; its ranks have {grace:g} s to leave it"


def no_such_node(node: NodeId, there: Sequence[NodeId]) -> str:
    """Refusal to give back a node that is not in the job."""
    return f"this job has no node {node}; its nodes are: {', '.join(there) or 'none yet'}"


def drains_already(node: NodeId, reason: str) -> str:
    """Refusal of a drain for a node that is draining already."""
    return f"{node} is given back already ({reason}); see `regrow status`"


def drain_leaves_too_few(node: NodeId, room: int, least: int, fixed: str) -> str:
    """Refusal to give back a node without which the job could not train."""
    replicas = f"{room} replica{'' if room == 1 else 's'}"
    needs = f"this job cannot have fewer than its {least}: {fixed}" if fixed else f"this job needs at least {least}"
    cure = "add a node first; or give --force, and the job waits for room"
    return f"without {node} there is room for {replicas}, and {needs} ({cure})"


def scale_accepted(before: int, wanted: int) -> str:
    """Answer to an accepted change of size."""
    if before in (0, wanted):
        return f"{wanted} replicas"
    return f"from {before} to {wanted} replicas"


def size_fixed(limits: Limits, why: str) -> str:
    """Refusal of another size, because the script or its state is for one size of the world."""
    allowed = f" (--replicas allows {limits.least} to {limits.most})" if limits.least < limits.most else ""
    return f"the number of replicas cannot change while the job trains{allowed}: {why}"


def never_elastic(replicas: int) -> str:
    """Refusal of another size, because the flags of the job allow one size only."""
    return f"this job was started for {replicas} replica{'s' * (replicas > 1)} only (start it with --replicas MIN:MAX)"


def too_few_microbatches(replicas: int, microbatches: int) -> str:
    """Refusal of a size with more replicas than micro-batches, so that one would have none."""
    return f"{replicas} replicas are more than the {microbatches} micro-batches of a step (raise microbatches=)"


def too_few_slots(replicas: int, unit: int, slots: int) -> str:
    """Refusal of a size for which the job's nodes have too few slots."""
    return f"{replicas} replicas need {replicas * unit} slots, and the nodes of the job have {slots}"


def does_not_pay(before: int, after: int, stay: Seconds, weighed: Weighed) -> str:
    """Message that growing would cost more time than it gains."""
    return (
        f"growing from {before} to {after} replicas for {stay:g} s does not pay: it would bring {weighed.gain:.2f} s "
        f"and cost {weighed.cost:.2f} s"
    )


def unlike_replicas(rank: Rank | None, unit: int) -> str:
    """Message that the world cannot be divided into replicas; empty if it can."""
    if rank is None:
        return ""
    first = "the first rank" if unit == 1 else f"rank {rank % unit}"
    return (
        f"rank {rank} has another part of the state than {first}, so that a replica is not {unit} "
        f"rank{'s' if unit > 1 else ''} (--replica-ranks N: ranks that together hold one copy of the state)"
    )


def candidates_given_up(node: NodeId, what: str, error: tuple[ErrorReport, StepNo] | None) -> str:
    """Message that no further newcomers are started on this node, after several failures in a row."""
    why = f" ({error[0].type}: {error[0].message})" if error else ""
    return f"the world does not grow onto {node}: {what}{why}, the last of several in a row"


def change_too_late(replicas: int, wanted: int, reason: str) -> str:
    """Message that the training ended before the world had the wanted size."""
    were = "replica was" if wanted == 1 else "replicas were"
    return f"the last step is run with {replicas} replicas: {wanted} {were} wanted ({reason}), which was not possible"


def leaver_stays(rank: Rank | None, node: NodeId, waited: Seconds) -> str:
    """Message that a worker does not end although it was released during the training."""
    return (
        f"rank {rank} of {node} was released and has not ended, though it has been idle, or has computed, for "
        f"{waited:g} s: it is ended; see its log"
    )


def coordinator_failed(error: Exception) -> str:
    """Message about a defect of regrow in the coordinator."""
    return (
        f"a defect of regrow, please report it: its coordinator failed ({type(error).__name__}: {error}); training "
        f"goes on, and the agents are asked for the state of their workers"
    )


def taken_over(world: int) -> str:
    """Message after a takeover in which the agents have answered and all ranks train."""
    return f"the coordinator works again: {world} {'rank' if world == 1 else 'ranks'}, none of them was touched"


def stopped(reason: str, step: StepNo) -> str:
    """Message that a stop of the job was requested."""
    return f"stopped at step {step}: {reason}"


def rank_corrupted(rank: Rank, step: StepNo) -> str:
    """Reason for which a node counts as failed: the state of a rank on it was wrong."""
    return f"the state of rank {rank} was wrong before step {step} (silent corruption)"


def quarantined(node: NodeId, times: int, reason: str, *, alone: bool) -> str:
    """Message that a node has failed too often. `alone`: there is no other node."""
    if alone:
        return f"{node} has failed {times} times, and goes on being used since there is no other node: {reason}"
    return f"{node} has failed {times} times and gets no new workers while there is room elsewhere: {reason}"

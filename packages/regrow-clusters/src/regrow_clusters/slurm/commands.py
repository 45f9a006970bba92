"""`regrow slurm`: control of a job's Slurm jobs from a terminal, through sbatch, squeue, scontrol, scancel and srun."""

import contextlib
import difflib
import shlex
import time
from pathlib import Path

import msgspec

from regrow.core.errors import UsageError
from regrow.core.ids import NodeId
from regrow.membership.view import JobView
from regrow_clusters.slurm.client import SlurmClient, SlurmFailure
from regrow_clusters.slurm.job_file import SlurmJobSpec, read_job_file
from regrow_clusters.slurm.keeper import replica_script
from regrow_clusters.slurm.node_arguments import run_name
from regrow_clusters.slurm.observing import nodes_of_replica
from regrow_clusters.slurm.reading import JobNote, JobRequests, SlurmJob
from regrow_clusters.slurm.room import too_few_without
from regrow_clusters.slurm.scripts import JobPart, part_in, script_of

_NO_FILE = {"-m", "--module", "--no-python", "--no_python"}


def load(path: Path) -> SlurmJobSpec:
    """Read the job that a file describes. Raises `UsageError`, which names the key and its cure."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    spec = read_job_file(text, place=str(path))
    if not _NO_FILE.intersection(spec.run_flags) and not Path(spec.script[0]).is_file():
        hint = "give it as seen from the folder that you submit in, which is the job's"
        raise UsageError(f"{path}: script names {spec.script[0]}, which is not there", hint=hint)
    if spec.elastic.script and not Path(spec.elastic.script).is_file():
        raise UsageError(f"{path}: elastic.script names {spec.elastic.script}, which is not there")
    if spec.rendezvous_dir and not Path(spec.rendezvous_dir).is_dir():
        raise UsageError(f"{path}: rendezvousDir is {spec.rendezvous_dir}, which is no folder", hint="make it first")
    return spec


def scripts(path: Path, command: list[str], *, which: str) -> str:
    """The batch script of the gang, or of the first replica beyond it."""
    spec = load(path)
    place = None if which == "gang" else spec.replica_count + spec.spares // spec.nodes_per_replica
    return script_of(JobPart(spec, place), command)


def submit(path: Path, command: list[str], slurm: SlurmClient) -> str:
    """Submit the job that a file describes; returns a report. Raises `UsageError` or `SlurmFailure`."""
    spec = load(path)
    here = [job for job in slurm.queue(spec.name) if not job.done]
    if gang := _gang(here):
        hint = f"regrow slurm cancel {spec.name} ends it; or give the new one another name"
        raise UsageError(f"{path}: job {spec.name} is in the queue already, as Slurm job {gang.job_id}", hint=hint)
    if spec.most > spec.replica_count:
        _check(slurm, JobPart(spec, spec.replica_count), command, f"{path} [elastic]")
    _check(slurm, JobPart(spec), command, f"{path} [gang]")
    if spec.rendezvous_dir:
        slurm.write_note(spec, 0, JobNote())
    number = slurm.submit(script_of(JobPart(spec), command))
    return f"job {spec.name} is submitted as Slurm job {number}; regrow slurm status {spec.name}"


def _check(slurm: SlurmClient, part: JobPart, command: list[str], place: str) -> None:
    try:
        slurm.check(replica_script(part, command) if part.place is not None else script_of(part, command))
    except SlurmFailure as failure:
        raise UsageError(f"{place}: {failure.cause}", hint=failure.hint) from failure


def status_lines(name: str, slurm: SlurmClient, command: list[str]) -> list[str]:
    """Describe a job for people: its Slurm jobs, the requests to it, and its own status."""
    jobs = [job for job in slurm.queue(name) if not job.done]
    gang = _gang(jobs)
    if gang is None and not jobs:
        raise _unknown(name, slurm)
    lines = []
    for job in jobs:
        what = "gang" if job.place is None else f"place {job.place}"
        where = ",".join(job.nodes) or (f"waits: {job.reason}" if job.reason else "waits")
        lines.append(f"{job.job_id:>8} {what:<9} {job.state.lower():<11} {where}")
    if gang is None:
        return [*lines, "it has no gang; what is left ends by itself"]
    part = _part(gang, slurm)
    if gang.state != "RUNNING":
        return [*lines, *_wanted_lines(part, JobRequests())]
    try:
        requests = _requests(gang, part, slurm, command)
        lines += _wanted_lines(part, requests)
        said = _on_first(gang, part, slurm, command, ["status", run_name(part, gang.job_id)])
    except (SlurmFailure, UsageError) as failure:
        return [*lines, f"its first node, {gang.nodes[0]}, does not answer: {failure.cause}"]
    return [*lines, *said.splitlines()]


def _wanted_lines(part: JobPart, requests: JobRequests) -> list[str]:
    wanted = part.spec.elastic_spec(replicas=requests.replicas)
    count = wanted.max_replica_count if wanted.replicas is None else wanted.replicas
    limits = f"from {part.spec.replica_count} to {part.spec.most}"
    avoided = sorted({*requests.avoided(time.time()), *part.avoid})
    return [
        f"wanted: {count} replicas ({limits}), start {part.attempt}",
        *([f"avoided: {', '.join(avoided)}"] if avoided else []),
    ]


def scale(name: str, replicas: int, slurm: SlurmClient, command: list[str]) -> str:
    """Request another size of a job; returns a report. Raises `UsageError` if the size is not allowed."""
    gang, part = _running(name, slurm)
    spec = part.spec
    if not spec.replica_count <= replicas <= spec.most:
        text = f"--replicas {replicas}: job {name} can have {spec.replica_count} to {spec.most}"
        raise UsageError(text, hint="other limits need another gang: cancel it, and submit it with them")
    _request(gang, part, slurm, command, replicas=replicas)
    return f"job {name} is to have {replicas} replicas"


def drain(name: str, host: str, slurm: SlurmClient, command: list[str], *, force: bool = False) -> str:
    """Release a node and exclude it from the job; returns a report.

    Raises `UsageError` if that is impossible, or if the job could not train without the node, unless `force`.
    """
    gang, part = _running(name, slurm)
    jobs = [job for job in slurm.queue(name) if not job.done and host in job.nodes]
    if not jobs:
        nodes = sorted({node for job in slurm.queue(name) if not job.done for node in job.nodes})
        raise UsageError(f"job {name} has no node {host}", hint=f"it has {', '.join(nodes)}")
    if host == _coordinators_host(gang, part, slurm, command):
        hint = f"regrow slurm cancel {name} ends the job; without it the whole gang would have to start anew"
        raise UsageError(f"{host} has the coordinator of job {name}: it cannot be given back", hint=hint)
    view = _view(gang, part, slurm, command)
    leaving = {job.job_id: _nodes_on(job, part, view, slurm, host) for job in jobs}
    if (few := too_few_without(view, [node for nodes in leaving.values() for node in nodes])) and not force:
        hint = (
            f"drain it when regrow slurm status {name} shows a replica more; or give --force: the others wait with "
            "their state in memory, and after --node-timeout the gang is submitted anew, to go on from checkpointDir"
        )
        raise UsageError(f"without {host} {few}", hint=hint)
    known = _requests(gang, part, slurm, command)
    now = time.time()
    until = now + part.spec.bad_node_time_in_seconds
    _request(gang, part, slurm, command, avoid={**known.avoided(now), host: until})
    for job in jobs:
        if job.place is not None:
            slurm.leave(job.job_id)
            continue
        arguments = ["drain", run_name(part, gang.job_id), *leaving[job.job_id], f"--grace={part.spec.grace:g}s"]
        try:
            _on_first(gang, part, slurm, command, [*arguments, *(["--force"] if force else [])])
        except (SlurmFailure, UsageError):
            _request(gang, part, slurm, command, avoid=known.avoid)
            raise
    away = f"for {part.spec.bad_node_time_in_seconds:g} s"
    return f"{host} is given back, within {part.spec.grace:g} s; job {name} keeps away from it {away}" + (
        f"; {few}" if few else ""
    )


def undo_drain(name: str, host: str, slurm: SlurmClient, command: list[str]) -> str:
    """Allow a job to use a drained node again; returns a report. Raises `UsageError` if it was not drained."""
    gang, part = _running(name, slurm)
    avoided = _requests(gang, part, slurm, command).avoided(time.time())
    if host not in avoided:
        known = f"it keeps away from {', '.join(sorted(avoided))}" if avoided else "there is no node that it was"
        raise UsageError(f"job {name} was not asked to keep away from {host}", hint=known)
    del avoided[host]
    _request(gang, part, slurm, command, avoid=avoided)
    return f"job {name} may have {host} again"


def cancel(name: str, slurm: SlurmClient, command: list[str], *, now: bool) -> str:
    """End a job; its pending Slurm jobs are cancelled. `now`: as scancel does; else running nodes leave in order."""
    jobs = [job for job in slurm.queue(name) if not job.done]
    if not jobs:
        raise _unknown(name, slurm)
    gang = _gang(jobs)
    if gang is not None and gang.state == "RUNNING" and not now:
        _request(gang, _part(gang, slurm), slurm, command, over=True)
        slurm.leave(gang.job_id)
    for job in jobs:
        if job.state == "PENDING" or now:
            slurm.cancel(job.job_id)
    for job in jobs:
        if gang is None and job.state == "RUNNING" and not now:
            slurm.leave(job.job_id)
    return f"job {name} is ending" + ("" if now else "; with --now at once")


def _gang(jobs: list[SlurmJob]) -> SlurmJob | None:
    """The newest gang; None: there is none."""
    gangs = [job for job in jobs if job.place is None and not job.done]
    return gangs[-1] if gangs else None


def _running(name: str, slurm: SlurmClient) -> tuple[SlurmJob, JobPart]:
    gang = _gang(slurm.queue(name))
    if gang is None:
        raise _unknown(name, slurm)
    if gang.state != "RUNNING":
        raise UsageError(f"job {name} does not run: Slurm job {gang.job_id} is {gang.state.lower()}")
    return gang, _part(gang, slurm)


def _request(gang: SlurmJob, part: JobPart, slurm: SlurmClient, command: list[str], **requests: object) -> None:
    """Add requests to a job, through its first node; earlier requests stay."""
    asked = msgspec.structs.replace(_requests(gang, part, slurm, command), **requests)
    arguments = ["slurm", "wish", run_name(part, gang.job_id), "--set", msgspec.json.encode(asked).decode()]
    _on_first(gang, part, slurm, command, arguments)


def _requests(gang: SlurmJob, part: JobPart, slurm: SlurmClient, command: list[str]) -> JobRequests:
    answer = _on_first(gang, part, slurm, command, ["slurm", "wish", run_name(part, gang.job_id)])
    return msgspec.json.decode(answer, type=JobRequests)


def _on_first(gang: SlurmJob, part: JobPart, slurm: SlurmClient, command: list[str], arguments: list[str]) -> str:
    """Output of a regrow command on the gang's first node. Raises `UsageError` or `SlurmFailure`."""
    ours = _ours(gang, part, slurm, command)
    return slurm.on_host(gang.job_id, _host(gang, part, slurm, ours), [*ours, *arguments])


def _coordinators_host(gang: SlurmJob, part: JobPart, slurm: SlurmClient, command: list[str]) -> str:
    return _host(gang, part, slurm, _ours(gang, part, slurm, command)) if part.spec.elect else gang.nodes[0]


def _ours(gang: SlurmJob, part: JobPart, slurm: SlurmClient, command: list[str]) -> list[str]:
    """Command that starts regrow on the gang's nodes, with `REGROW_HOME` set to the folder of the job's records."""
    note = slurm.note(part.spec.rendezvous_dir, part.spec.name, gang)
    if not note.home:
        hint = "it is just starting; or the site does not keep comments: set rendezvousDir"
        raise UsageError(f"Slurm job {gang.job_id} has not reported yet where its coordinator is", hint=hint)
    return ["env", f"REGROW_HOME={note.home}", *(part.spec.command or command)]


def _host(gang: SlurmJob, part: JobPart, slurm: SlurmClient, ours: list[str]) -> str:
    """Host of the coordinator: the gang's first node, or the elected one."""
    if not part.spec.elect:
        return gang.nodes[0]
    for host in gang.nodes:
        with contextlib.suppress(SlurmFailure):
            slurm.on_host(gang.job_id, host, [*ours, "status", run_name(part, gang.job_id)])
            return host
    return gang.nodes[0]


def _view(gang: SlurmJob, part: JobPart, slurm: SlurmClient, command: list[str]) -> JobView:
    answer = _on_first(gang, part, slurm, command, ["status", run_name(part, gang.job_id), "--json"])
    return msgspec.json.decode(answer, type=JobView)


def _nodes_on(job: SlurmJob, part: JobPart, view: JobView, slurm: SlurmClient, host: str) -> list[NodeId]:
    """Regrow's names of the nodes that leave with a host: all of a replica; in the gang only the host, by address.

    The address is needed because Slurm's list of the gang's hosts gets shorter when nodes are lost.
    """
    if job.place is not None:
        return nodes_of_replica(part.spec, job.place, job.job_id)
    address = slurm.address(host)
    for node in view.nodes:
        if node.host == address and not node.away:
            return [node.node]
    raise UsageError(f"job {part.spec.name} has no node at {address}", hint=f"regrow slurm status {part.spec.name}")


def _part(gang: SlurmJob, slurm: SlurmClient) -> JobPart:
    part = part_in(slurm.batch_script(gang.job_id))
    if part is None:
        raise UsageError(f"Slurm job {gang.job_id} is called {gang.name}, but regrow did not make its script")
    return part


def _unknown(name: str, slurm: SlurmClient) -> UsageError:
    names = slurm.names()
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"squeue has {', '.join(map(shlex.quote, names)) or 'none of yours'}"
    return UsageError(f"you have no job {name} in Slurm's queue", hint=hint)

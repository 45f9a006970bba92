"""Turns the flags of `regrow run` into the checked description of a job that all its processes receive."""

import re
from pathlib import Path

import msgspec

from regrow.core.config import AgentConfig, Script
from regrow.core.errors import UsageError
from regrow.core.hosts import LOOPBACK, is_loopback, nth_place, own_addresses, place_to_listen
from regrow.core.ids import JobId, NodeId, Seconds
from regrow.core.job import HANG_FLOOR, JobSpec
from regrow.core.messages.log_rules import LogRule
from regrow.core.messages.vocabulary import FaultSpec, Warmth
from regrow.hydration.durable.ownership import Resume
from regrow.launch.addresses import AddressFlags, hydration_of, whereabouts
from regrow.launch.cache import CachePlan, cache_plan
from regrow.launch.checks import NAME, domains_of, exclude, in_range, nproc_of, one_of, some_time
from regrow.launch.elastic import AllowedRange, elasticity, slots_of, span
from regrow.membership.admission import JoinOffer

NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")


class HostEnvironment(msgspec.Struct, frozen=True):
    """Facts about the machine and the environment, read by the command line and passed as values.

    `stamp` makes the names of unnamed jobs unique. `token`: the job's secret, needed by jobs of several nodes.
    `data_home`: default folder of data caches. `hang_floor`: shortest time without progress that counts as a hang.
    `encrypted`: True if traffic between nodes uses TLS; `certificate`: a note on this node's certificate, or empty.
    """

    cpus: int
    gpus: int
    stamp: str
    jobs_home: Path
    token: str = ""
    data_home: Path | None = None
    hang_floor: Seconds = HANG_FLOOR
    encrypted: bool = False
    certificate: str = ""

    def notes(self, bind: str) -> list[str]:
        """Notes on encryption for a node that listens on `bind`, a line each."""
        if not self.encrypted and not is_loopback(bind):
            return ["the job's token and its state cross the network in clear: give --tls-cert and --tls-key"]
        return [self.certificate] if self.certificate else []


class RunFlags(msgspec.Struct, frozen=True):
    """The flags of `regrow run` as text, one field for each; `regrow run --help` describes them."""

    script: str
    args: list[str] = []
    module: bool = False
    no_python: bool = False
    nproc_per_node: str = "1"
    nnodes: str = "1"
    local_nodes: int | None = None
    node_rank: int | None = None
    standalone: bool = False
    rdzv_backend: str = ""
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    master_addr: str = ""
    master_port: int = 0
    local_addr: str = ""
    state_addr: str = ""
    max_restarts: int | None = None
    log_dir: str = ""
    redirects: str = ""
    tee: str = ""
    standby: int = 0
    warmth: str = ""
    max_faults: int = 100
    window: str = "1h"
    checkpoint_dir: str = ""
    checkpoint_every: str | None = None
    checkpoint_keep: int = 2
    resume: str = Resume.NEVER
    buddy_every: int = 0
    digest_every: int = 0
    no_audit: bool = False
    on_divergence: str = "warn"
    proof: str = "auto"
    no_health: bool = False
    no_elect: bool = False
    witness: str = ""
    health_check: list[str] = []
    straggler_steps: int = 20
    replace_stragglers: bool = False
    check_for_nan: bool = False
    no_script_rewrite: bool = False
    numa_binding: str = ""
    hydration: str = "sockets"
    log_rules: list[LogRule] = []
    trial_steps: int = 0
    data_cache: str = ""
    data_cache_bytes: str = ""
    node_timeout: str = "10min"
    node_lease: str = "10s"
    spares: int = 0
    replicas: str = ""
    replica_ranks: int = 1
    replica_sizes: str = ""
    change_pause: str = "0s"
    slots: int | None = None
    drain_grace: str = "30s"
    domain: str = ""
    hang_timeout: str = ""
    grace: str = "10s"
    preload: list[str] = []
    bind: str = ""
    watch: str = ""
    node_metrics: str = ""
    job: str = ""
    tag: str = ""
    quiet: bool = False
    without_meaning: list[str] = []
    """Flags of torchrun that were given and have no effect here."""


class JobPlan(msgspec.Struct, frozen=True):
    """Plan with everything needed to start one node of a job. Other nodes use node 0's `spec` instead of their own."""

    spec: JobSpec
    script: Script
    jobs_home: Path
    node_rank: int = 0
    local: bool = False  # all nodes run on this machine (`--local-nodes`)
    domains: list[str] = []  # failure domain of each node of this machine; empty: each node is its own
    name: NodeId = NodeId("")  # of this node; empty: derived from its rank
    slots: int = 0  # ranks that fit on each node of this machine; 0: those that it starts with
    stay: Seconds | None = None
    """Time for which this node is expected to be available; None: no limit is known."""
    drain_grace: Seconds = 30.0  # time for the ranks to leave the node when a signal gives it back
    token: str = ""  # empty: a new secret is made (one node only)
    bind: str = LOOPBACK
    port: int = 0
    """Port of the coordinator; 0: any free port."""
    endpoint: tuple[str, int] = (LOOPBACK, 0)
    """Address at which the other nodes find the coordinator."""
    term: int = 1  # of the coordinator at that address
    watch: tuple[str, int] | None = None  # host and port of the metrics and the live page
    node_metrics: tuple[str, int] | None = None  # of the first agent's metrics; each further agent uses the next port
    ways: list[str] = []  # further addresses of this node, for state transfer only
    advertise: str = ""  # host under which others reach this node; empty: from the route to the coordinator
    master_port: int = 0
    log_dir: str = ""
    preload: list[str] = []
    forward_output: bool = True
    checkpoint_dir: str | None = None
    witness: str = ""
    cache: CachePlan = CachePlan()
    grace: Seconds = 10.0
    faults: list[FaultSpec] = []
    resume: Resume = Resume.NEVER
    quiet: bool = False
    notes: list[str] = []  # notes for the user before the job starts, a line each

    @property
    def node(self) -> NodeId:
        """The name of this node."""
        return self.name or node_name(self.node_rank)

    @property
    def node_ranks(self) -> list[int]:
        """The ranks of the nodes that this machine runs."""
        return list(range(self.spec.nodes)) if self.local and not self.name else [self.node_rank]

    def offer(self, spec: JobSpec) -> JoinOffer:
        """The offer to nodes that join later. It leaves their names open."""
        return JoinOffer(
            spec=spec,
            script=self.script,
            folder=str(Path.cwd()),
            preload=self.preload,
            checkpoint_dir=self.checkpoint_dir,
            master_port=self.master_port,
            grace=self.grace,
            local=self.local,
        )

    def agent_config(
        self, spec: JobSpec, *, node_rank: int, coordinator: str, token: str, job_dir: Path, advertise: str
    ) -> AgentConfig:
        """Settings of a node's agent, except its own folders."""
        return AgentConfig(
            spec=spec,
            node=self.node if node_rank == self.node_rank else node_name(node_rank),
            node_rank=node_rank,
            coordinator=coordinator,
            token=token,
            script=self.script,
            job_dir=str(job_dir),
            log_dir=self.log_dir or str(job_dir / "logs"),
            socket_dir="",
            bind=self.bind,
            advertise=advertise,
            ways=self.ways,
            master_port=self.master_port,
            preload=self.preload,
            forward_output=self.forward_output,
            checkpoint_dir=self.checkpoint_dir,
            domain=self.domains[self.node_ranks.index(node_rank)] if self.domains else "",
            local=self.local,
            slots=self.slots,
            drain_grace=self.drain_grace,
            stay=self.stay,
            metrics=nth_place(self.node_metrics, self.node_ranks.index(node_rank)),
        )


def node_name(rank: int) -> NodeId:
    """The name of the node with that `--node-rank`."""
    return NodeId(f"node{rank}")


def job_nodes(spec: JobSpec) -> list[NodeId]:
    """All nodes of a job, in the order of their ranks."""
    return [node_name(rank) for rank in range(spec.nodes)]


def make_plan(flags: RunFlags, around: HostEnvironment) -> JobPlan:
    """Check the flags and build the plan of the job. Reads no file and no environment.

    Raises:
        UsageError: names the flag and what to write instead.
    """
    spec, notes = _spec(flags, around)
    local = flags.local_nodes is not None
    machines = 1 if local else spec.nodes
    node_rank = _node_rank(flags, machines)
    where = whereabouts(
        AddressFlags(
            flags.rdzv_endpoint, flags.master_addr, flags.master_port, flags.local_addr, flags.bind, flags.standalone
        ),
        node_rank=node_rank,
        nodes=machines,
        most=1 if local else spec.node_limit,
    )
    if (machines > 1 or (spec.node_limit > 1 and not is_loopback(where.bind))) and not around.token:
        raise UsageError(
            "a job of several nodes needs a secret that all of them know",
            hint="put it in a file and give --token-file, or set REGROW_TOKEN, the same on every node",
        )
    return JobPlan(
        spec=spec,
        script=Script(flags.script, flags.args, module=flags.module, binary=flags.no_python),
        jobs_home=around.jobs_home,
        node_rank=node_rank,
        local=local,
        domains=domains_of(flags.domain, spec.nodes if local else 1),
        token=around.token,
        bind=where.bind,
        port=where.endpoint[1],
        endpoint=where.endpoint,
        watch=place_to_listen("--watch", flags.watch),
        node_metrics=place_to_listen("--node-metrics", flags.node_metrics),
        advertise=where.advertise,
        ways=own_addresses("--state-addr", flags.state_addr),
        slots=slots_of(spec, flags.slots, alone=local or spec.node_limit == 1),
        drain_grace=some_time("--drain-grace", flags.drain_grace),
        master_port=0 if machines > 1 else in_range("--master-port", flags.master_port, 0, 65535),
        log_dir=_absolute(flags.log_dir) or "",
        preload=flags.preload,
        forward_output=bool(flags.tee) or "3" not in flags.redirects.split(","),
        checkpoint_dir=_absolute(flags.checkpoint_dir),
        witness=_absolute(flags.witness) or "",
        cache=cache_plan(flags.data_cache, flags.data_cache_bytes, home=around.data_home),
        grace=some_time("--shutdown-timeout", flags.grace),
        resume=_resume(flags.resume),
        quiet=flags.quiet,
        notes=[*notes, *around.notes(where.bind)],
    )


def world_of(flags: RunFlags, around: HostEnvironment) -> int:
    """World size at the start of the job that these flags describe."""
    return _spec(flags, around)[0].world


def _spec(flags: RunFlags, around: HostEnvironment) -> tuple[JobSpec, list[str]]:
    notes = [f"{flag} means nothing to regrow and is ignored" for flag in flags.without_meaning]
    nodes = span("--nnodes", flags.nnodes, "nodes") if flags.local_nodes is None else _local_nodes(flags)
    exclude(flags.standalone and nodes.most > 1, f"--standalone is for one node, --nnodes is {flags.nnodes}")
    exclude(flags.module and flags.no_python, "--module and --no-python exclude each other")
    asked = flags.proof == "fork" or flags.warmth == Warmth.BUILT  # both need the rewritten script
    exclude(flags.no_script_rewrite and asked, "--no-script-rewrite allows neither --proof fork nor --warmth built")
    buddy_every = in_range("--buddy-every", flags.buddy_every, 0)
    if buddy_every and nodes.most == 1:
        notes.append("--buddy-every with one node: copies are kept on this node alone, and are lost with it")
    nproc = nproc_of(flags.nproc_per_node, cpus=around.cpus, gpus=around.gpus)
    elastic = elasticity(
        nodes, nproc, spares=flags.spares, replicas=flags.replicas, unit=flags.replica_ranks, sizes=flags.replica_sizes
    )
    usual = Warmth.IMPORTS if flags.no_script_rewrite else Warmth.BUILT  # only the rewrite shows a standby's rank reads
    spec = JobSpec(
        job=JobId(_named("--job", flags.job) or _named("--rdzv-id", flags.rdzv_id) or _default_name(flags, around)),
        nproc=nproc,
        nodes=nodes.least,
        standbys=in_range("--standby", flags.standby, 0, 1024),
        warmth=Warmth(one_of("--warmth", flags.warmth or usual, list(Warmth))),
        warmth_asked=bool(flags.warmth),
        max_faults=in_range("--max-faults", flags.max_faults, 0),
        window=some_time("--window", flags.window),
        max_restarts=None if flags.max_restarts is None else in_range("--max-restarts", flags.max_restarts, 0),
        durable=bool(flags.checkpoint_dir),
        tag=_named("--tag", flags.tag),
        hang_timeout=some_time("--hang-timeout", flags.hang_timeout) if flags.hang_timeout else None,
        hang_floor=around.hang_floor,
        buddy_every=buddy_every,
        digest_every=in_range("--digest-every", flags.digest_every, 0),
        audit=not flags.no_audit,
        stop_on_divergence=flags.on_divergence == "stop",
        proof=(proof := one_of("--proof", flags.proof, ("auto", "fork", "off"))) != "off" and usual is Warmth.BUILT,
        proof_forks=proof == "fork",
        health=not flags.no_health,
        elects=not flags.no_elect,
        witness=bool(flags.witness),
        health_checks=[str(Path(check).absolute()) for check in flags.health_check],
        straggler_steps=in_range("--straggler-steps", flags.straggler_steps, 0),
        replace_stragglers=flags.replace_stragglers,
        check_for_nan=flags.check_for_nan,
        rewrites=not flags.no_script_rewrite,
        numa_binding=flags.numa_binding and one_of("--numa-binding", flags.numa_binding, NUMA_BINDINGS),
        hydration=hydration_of(flags.hydration, encrypted=around.encrypted),
        log_rules=flags.log_rules,
        trial_steps=in_range("--trial-steps", flags.trial_steps, 0),
        node_deadline=some_time("--node-timeout", flags.node_timeout),
        node_lease=some_time("--node-lease", flags.node_lease, least=1.0),
        checkpoint_every=_checkpoint_every(flags),
        checkpoint_keep=in_range("--checkpoint-keep", flags.checkpoint_keep, 1),
        must_resume=_resume(flags.resume) is Resume.MUST,
        change_pause=some_time("--change-pause", flags.change_pause, zero=True),
        **msgspec.structs.asdict(elastic),
    )
    if flags.witness and not spec.can_elect:
        notes.append(
            "--witness is ignored: this job can lose no node, as it has no --spares and no --replicas to go on with"
        )
    return spec, notes


def _named(flag: str, name: str) -> str:
    name = "" if name == "none" and flag != "--tag" else name  # torchrun's default: no name
    if name and NAME.fullmatch(name) is None:
        raise UsageError(f"{flag} {name!r} cannot name a job", hint="use letters, digits, '.', '_' and '-'")
    return name


def _default_name(flags: RunFlags, around: HostEnvironment) -> str:
    stem = flags.script.rsplit(".", 1)[-1] if flags.module else Path(flags.script).stem
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', stem).strip('-')[:40] or 'job'}-{around.stamp}"


def _local_nodes(flags: RunFlags) -> AllowedRange:
    """Range of `--nnodes` if all nodes run on this machine."""
    given = {"--nnodes": flags.nnodes != "1", "--node-rank": flags.node_rank is not None, "--bind": bool(flags.bind)}
    for flag, said in given.items():
        if said:
            raise UsageError(
                f"--local-nodes and {flag} exclude each other: all nodes of such a job are on this machine",
                hint="leave one of them out",
            )
    nodes = in_range("--local-nodes", flags.local_nodes or 0, 1, 64)
    return AllowedRange(nodes, nodes)


def _node_rank(flags: RunFlags, nodes: int) -> int:
    if flags.node_rank is None:
        if nodes > 1:
            raise UsageError(f"which of the {nodes} nodes is this?", hint=f"add --node-rank, from 0 to {nodes - 1}")
        return 0
    if ":" in flags.nnodes and flags.node_rank >= nodes:
        starts = "on node 0 alone" if nodes == 1 else f"on nodes 0 to {nodes - 1}"
        raise UsageError(
            f"--node-rank {flags.node_rank}: with --nnodes {flags.nnodes} the job starts {starts}",
            hint="bring others in with regrow agent --join HOST:PORT",
        )
    return in_range("--node-rank", flags.node_rank, 0, nodes - 1)


def _resume(word: str) -> Resume:
    if word not in list(Resume):
        raise UsageError(f"--resume={word} is not known", hint=f"it is one of {', '.join(Resume)}")
    return Resume(word)


def _checkpoint_every(flags: RunFlags) -> Seconds:
    if not flags.checkpoint_dir:
        if flags.checkpoint_every is None and _resume(flags.resume) is Resume.NEVER:
            return 0.0
        flag = "--resume" if flags.checkpoint_every is None else "--checkpoint-every"
        raise UsageError(f"{flag} needs to know where the checkpoints are", hint="add --checkpoint-dir DIR")
    return max(some_time("--checkpoint-every", flags.checkpoint_every or "10min"), 0.001)


def _absolute(folder: str) -> str | None:
    return folder if "://" in folder else str(Path(folder).expanduser().absolute()) if folder else None

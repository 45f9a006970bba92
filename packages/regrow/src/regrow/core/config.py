"""Settings of a job's processes at their start, and the only code of the engine that reads the environment."""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from regrow.core.errors import UsageError
from regrow.core.exit_codes import OK, RUN_AGAIN
from regrow.core.ids import Generation, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.job import HANG_FLOOR, JobSpec
from regrow.core.messages.data import CacheSettings, ProducerSettings
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.messages.vocabulary import FaultSpec, Role, Warmth
from regrow.core.rotation import RecordLimits

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?")
_UNITS = {None: 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?))?B?", re.ASCII)
_POWERS = {None: 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_SHARED_MEMORY = "/dev/shm"


def duration(text: str) -> Seconds:
    """Seconds in a text such as `90`, `500ms`, `10min`, `1h`. Raises `UsageError`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a duration", hint="write for example 90s, 10min or 1h")
    return float(match.group(1)) * _UNITS[match.group(2)]


def size(text: str) -> int:
    """Bytes in a text such as `4GiB`, `64MB`, `1048576`. Raises `UsageError`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="write for example 64MiB or 4GiB")
    number, power, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[power])


def state_home() -> Path:
    """Folder of all jobs' records: `$REGROW_HOME`, else `$XDG_STATE_HOME/regrow`, else `~/.local/state/regrow`."""
    if home := os.environ.get("REGROW_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "regrow"


def record_limits() -> RecordLimits:
    """Limits on record files: `$REGROW_RECORD_PART` bytes each (64MiB; 0: no limit), `$REGROW_RECORD_PARTS` (16) kept.

    Raises `UsageError`.
    """
    usual = RecordLimits()
    part, parts = os.environ.get("REGROW_RECORD_PART"), os.environ.get("REGROW_RECORD_PARTS") or str(usual.parts)
    if not parts.isascii() or not parts.isdecimal() or int(parts) < 1:
        raise UsageError(f"REGROW_RECORD_PARTS={parts} is no number of files", hint="give 1 or more, for example 16")
    return RecordLimits(size(part) if part else usual.part, int(parts))


def inherited_environment() -> dict[str, str]:
    """This process's environment as it is now, to be passed on to workers."""
    return dict(os.environ)


def hang_floor() -> Seconds:
    """Shortest standstill that counts as a hang without `--hang-timeout`: `$REGROW_HANG_FLOOR`, else 90 s."""
    return duration(text) if (text := os.environ.get("REGROW_HANG_FLOOR")) else HANG_FLOOR


def given_back_code() -> int:
    """Exit code of a node that leaves a job which goes on without it: `$REGROW_GIVEN_BACK_CODE` (75), else 0."""
    return RUN_AGAIN if os.environ.get("REGROW_GIVEN_BACK_CODE") == str(RUN_AGAIN) else OK


def keeps_nccl_settings() -> bool:
    """True if the user wants `TORCH_NCCL_ASYNC_ERROR_HANDLING` and similar settings left as they are."""
    return os.environ.get("REGROW_KEEP_NCCL_SETTINGS", "") == "1"


def visible_gpus() -> list[str] | None:
    """The GPUs in `CUDA_VISIBLE_DEVICES`, by number or UUID; None if it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]


def read_token(token_file: str) -> str:
    """The job's token, from this file or, if the argument is empty, from `$REGROW_TOKEN`. Raises `UsageError`."""
    if not token_file:
        return os.environ.get("REGROW_TOKEN", "").strip()
    try:
        token = Path(token_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {token_file} cannot be read: {error}") from error
    if not token:
        raise UsageError(f"--token-file {token_file} is empty", hint="put a long random text in it")
    return token


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files. An empty `ca` means that all nodes have the same certificate."""

    cert: str
    key: str
    ca: str = ""


_TLS = {"cert": "REGROW_TLS_CERT", "key": "REGROW_TLS_KEY", "ca": "REGROW_TLS_CA"}


def tls_files() -> TlsFiles | None:
    """Files for encrypted connections: `$REGROW_TLS_CERT`, `$REGROW_TLS_KEY`, `$REGROW_TLS_CA`; None: no encryption.

    Raises `UsageError`.
    """
    found = {word: path for word, name in _TLS.items() if (path := os.environ.get(name))}
    if not found:
        return None
    if len(missing := [name for name in ("cert", "key") if name not in found]):
        raise UsageError(
            f"TLS needs --tls-{missing[0]} too, where --tls-{next(iter(found))} is given",
            hint=f"give both, or {_TLS['cert']} and {_TLS['key']}",
        )
    return TlsFiles(**found)


def use_tls(cert: str = "", key: str = "", ca: str = "") -> None:
    """Make this process, and all that it starts, encrypt with these files; an empty argument changes nothing."""
    for name, path in zip(_TLS.values(), (cert, key, ca), strict=True):
        if path:
            os.environ[name] = str(Path(path).absolute())


def read_key(key_file: str) -> str:
    """The key in a file; an empty text if `key_file` is empty. Raises `UsageError`."""
    try:
        return Path(key_file).read_text(encoding="ascii").strip() if key_file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {key_file} cannot be read: {error}") from error


def jobs_home() -> Path:
    """Folder that has a subfolder for each job."""
    return state_home() / "jobs"


def cache_home() -> Path:
    """Folder of cached copies and indexes of data files: `$XDG_CACHE_HOME/regrow`, else `~/.cache/regrow`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regrow"


def data_home() -> Path | None:
    """Default parent folder of the data cache: shared memory, else the temporary folder; None if there is neither."""
    shared = Path(_SHARED_MEMORY)
    if os.access(shared, os.W_OK | os.X_OK):
        return shared
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no candidate of tempfile is writable
        return None


class Script(msgspec.Struct, frozen=True):
    """Program of the workers: a file, a module (`module`), or an executable (`binary`, from `--no-python`)."""

    target: str
    args: list[str]
    module: bool = False
    binary: bool = False


class AgentConfig(msgspec.Struct, frozen=True):
    """Settings of an agent. It reads them as JSON from standard input, so that no process list shows the token."""

    spec: JobSpec
    node: NodeId
    node_rank: int
    coordinator: str
    """URL of the coordinator, `http://host:port`."""
    token: str
    script: Script
    job_dir: str
    """Folder of the job's records and logs, which outlives the job."""
    log_dir: str
    """Folder of the workers' output: one file per rank, `rank<R>.log`, whichever worker has the rank."""
    socket_dir: str
    """Prefix of the names of this node's sockets (`net.sockets_home`)."""
    bind: str = "127.0.0.1"
    advertise: str = "127.0.0.1"
    """Host name by which other nodes reach this one."""
    ways: list[str] = []  # further addresses of this node, used for state only
    master_port: int = 0
    preload: list[str] = []
    forward_output: bool = True
    """True if the workers' output is also written to this process's own output and error, prefixed by rank."""
    checkpoint_dir: str | None = None
    lease: Seconds = 10.0
    """Time for which this agent keeps trying to reach the coordinator."""
    near: bool = False
    """True if the coordinator is this agent's parent process, so that the agent notices its end directly."""
    patience: Seconds = 300.0
    """Longest silence of a coordinator on another machine, which may only be paused, before it counts as gone."""
    domain: str = ""
    """Failure domain of this node, such as a rack's name; empty: the node is a domain of its own."""
    local: bool = False
    """True if all nodes of the job are on this machine (`--local-nodes`)."""
    data_dir: str = ""
    """Private folder (0700) for the data cache of this agent, removed at its end; empty: no cache."""
    data_budget: int = 0
    """Bytes that the cache may hold."""
    slots: int = 0
    """Number of ranks for which this node has room; 0: `spec.nproc`."""
    drain_grace: Seconds = 30.0
    """Time that this node's ranks have to leave it, after a signal that gives the node back."""
    stay: Seconds | None = None
    """Time that this node is expected to stay in the job; None: no end is known."""
    launcher: str = ""
    """URL of this node's launcher, which knows the coordinator's address; empty: no other coordinator can take over."""
    term: int = 1
    """The coordinator's term, a number that rises with each election."""
    metrics: tuple[str, int] | None = None
    """Host and port at which this agent serves its node's metrics to everyone; None: it serves none."""

    @property
    def one_machine(self) -> bool:
        """True if all processes of the job, now and later, are on this machine, so that unix sockets reach them."""
        return self.local or self.spec.node_limit == 1


class WorkerEnv(msgspec.Struct, frozen=True):
    """Settings that a worker gets from its agent, through the environment variable `REGROW_WORKER_ENV`."""

    spec: JobSpec
    worker: WorkerId
    role: Role
    rank: Rank
    local_rank: int
    world: int
    generation: Generation
    store: str
    """Address at which this node's agent serves the key-value store, which spans all nodes."""
    token: str
    channel: int
    """Descriptor of the stream socket to the agent."""
    board: int
    """Descriptor of the progress page."""
    socket_dir: str
    bind: str
    advertise: str
    warmth: Warmth
    ways: list[str] = []
    local: bool = False  # all nodes of the job are on this machine
    patience: Seconds = 3600.0
    """Longest time that a halted worker waits for an order of the coordinator."""
    resume: bool = False
    avoid: list[StepNo] = []  # steps of durable checkpoints that must not be read
    restored: bool = False
    """True if received state overwrites the state that the script builds, although all ranks start together."""
    checkpoint_dir: str | None = None
    faults: list[FaultSpec] = []
    data: CacheSettings | None = None  # the data cache of this node; None: there is none
    restarts: int = 0
    """Number of times that all workers of the job were started before this one."""
    finished: list[FinishedTraining] = []
    """The script's trainings that were finished before the one of this worker."""
    producer: ProducerSettings | None = None
    """Set only in a process that makes batches for the node, which is no worker of the training."""

    VARIABLE = "REGROW_WORKER_ENV"

    @property
    def begins(self) -> bool:
        """True if training begins with the state that the script builds here; False if received state overwrites it."""
        return self.role is Role.RANK and not self.restored

    @property
    def one_machine(self) -> bool:
        """True if all workers of the job are on this machine, so that unix sockets reach all of them."""
        return self.local or self.spec.node_limit == 1

    def variables(self) -> dict[str, str]:
        """The environment variables that carry these settings to the worker."""
        return {self.VARIABLE: msgspec.json.encode(self).decode(), "REGROW_JOB": self.spec.job}

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> "WorkerEnv | None":
        """Read this process's settings; None if no agent started this process."""
        text = (os.environ if environ is None else environ).get(cls.VARIABLE)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{cls.VARIABLE} is not what this version of regrow writes: {error}",
                hint="unset it, or start the script with the regrow that set it",
            ) from error


class TorchrunEnv(msgspec.Struct, frozen=True):
    """The variables of torchrun that regrow reads in a script started by torchrun."""

    rank: int
    local_rank: int
    world: int

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> "TorchrunEnv | None":
        """Read this process's variables; None if they are absent (the script runs alone). Raises `UsageError`."""
        env = os.environ if environ is None else environ
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return None
        try:
            return cls(int(env["RANK"]), int(env.get("LOCAL_RANK", "0")), int(env["WORLD_SIZE"]))
        except ValueError as error:
            raise UsageError(f"RANK, LOCAL_RANK or WORLD_SIZE is not a number: {error}") from error


def rootless(environ: Mapping[str, str] | None = None) -> bool:
    """True if `env://` uses the job's own store: always, unless `REGROW_ROOTLESS` is 0."""
    return (os.environ if environ is None else environ).get("REGROW_ROOTLESS", "1") != "0"


def meeting_place() -> tuple[str, str]:
    """Present values of `MASTER_ADDR` and `MASTER_PORT`, which a script may change."""
    return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")


def rank_variable(name: str) -> str:
    """Present value of `RANK` or `WORLD_SIZE`, empty if it is not set; a script may change it."""
    return os.environ.get(name, "")


def publish_rank(rank: int, local_rank: int, world: int) -> None:
    """Write this process's new rank to torchrun's variables, for code that reads them later."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        ROLE_RANK=str(rank),
        WORLD_SIZE=str(world),
        ROLE_WORLD_SIZE=str(world),
    )

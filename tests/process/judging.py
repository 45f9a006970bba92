"""The harness's own verdict on every job that a test has run at a site: `verdicts.py` has the law.

Numbers of a job with faults are compared with those of an undisturbed run of the same script and words: one that some
test of the session has made, or, in the full matrix, one that is made here. Where there is none, as the world changes
or a run is dear, what the job's own records show has to do.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.process import verdicts
from tests.process.verdicts import Numbers
from tests.process.warm_client import FOLDER

from regrow.core.errors import RegrowError
from regrow.observe.ledger import Ledger, read_records

ALLOWED = "REGROW_TEST_UNDISTURBED_S"
"""Seconds that each lane of a session may spend on undisturbed runs that no test has made."""
FULL_S, SHORT_S, ONE_S = 90.0, 0.0, 12.0
"""In the full matrix, in `make test`, and how long a job may take of which there is one."""
EXCUSED: dict[str, str] = {}
"""Tests, by file and function, whose jobs are not held to the law, and why."""

_STRIKES = ("--fault-plan", "--strike")
_OF_NO_MATTER = (
    *("--job", "--standby", "--warmth", "--max-faults", "--window", "--max-restarts", "--proof", "--on-divergence"),
    *("--node-timeout", "--node-lease", "--hang-timeout", "--buddy-every", "--digest-every", "--log-dir", "--watch"),
    *("--checkpoint-dir", "--checkpoint-every", "--checkpoint-keep", "--node-metrics", "--log-rules"),
)
"""With a value each, and numbers are the same with any."""
_SWITCHES = ("--quiet", "--no-audit", "--no-health", "--no-elect", "--check-for-nan", "--no-script-rewrite")
_OTHERWISE = (
    "--resume",
    "--replicas",
    "--nnodes",
    "--spares",
    "--slots",
    "--rdzv-endpoint",
    "--node-rank",
    "--witness",
)
"""A job of these begins, or ends, in a world or at a step that another does not."""


@dataclass(frozen=True)
class Command:
    """Command with which a test has started a job."""

    job: str
    flags: tuple[str, ...]
    """Those that its numbers may depend on."""
    script: Path
    text: str
    arguments: tuple[str, ...]
    """Of the script, but for strikes."""
    environment: tuple[tuple[str, str], ...]
    files: tuple[str, ...] = ()
    """Digests of what the arguments name."""

    @classmethod
    def of(cls, words: Sequence[str], more: Mapping[str, str], folder: Path) -> "Command | None":
        """Of `regrow WORDS`; None where it is none whose numbers could be had again."""
        job = words[words.index("--job") + 1] if "--job" in words else ""
        at = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
        if words[0] != "run" or not job or at is None or any(_flag(word) in _OTHERWISE for word in words[:at]):
            return None
        script = folder / words[at]
        with contextlib.suppress(OSError):
            flags, arguments = _without(words[1:at]), _without(words[at + 1 :])
            files = tuple(_content(folder / word) for word in arguments)
            return cls(job, flags, script, script.read_text(), arguments, tuple(sorted(more.items())), files)
        return None

    @property
    def key(self) -> str:
        """The same for all jobs with these numbers."""
        plain = [_renamed(word, self.job, "JOB") for word in self.arguments]
        names = [Path(word).name if "/" in word else word for word in plain]
        said = json.dumps([self.flags, self.text, names, self.environment, self.files])
        return hashlib.sha256(said.encode()).hexdigest()[:24]

    def again(self, job: str) -> list[str]:
        """The words of an undisturbed run under another name."""
        arguments = [_renamed(word, self.job, job) for word in self.arguments]
        return ["run", "--job", job, *self.flags, str(self.script), *arguments]


@dataclass(frozen=True)
class Played:
    """A job of a test. `command`: None where it cannot be run again."""

    test: str
    command: Command | None


class Judge:
    """Holds the jobs of one site to the law.

    Args:
        folder: where commands run.
        jobs: where their records are.
        run: runs one to its end.
    """

    def __init__(self, folder: Path, jobs: Path, run: Callable[..., object]) -> None:
        self._folder, self._jobs, self._run = folder, jobs, run
        self._played: dict[str, Played] = {}

    def starts(self, words: Sequence[str], more: Mapping[str, str]) -> None:
        """A command is about to be started."""
        if "--job" not in words[:-1]:
            return
        job = words[words.index("--job") + 1]
        command = None if job in self._played else Command.of(words, more, self._folder)
        self._played[job] = Played(os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0], command)

    def judge(self) -> None:
        """Raises `AssertionError` with all that is wrong with jobs that went well."""
        ledgers = dict(self._ended_well())
        for job, ledger in ledgers.items():
            command = self._played[job].command
            if command is not None and not verdicts.faulted(ledger) and verdicts.of_one_size(ledger):
                _store(command.key, verdicts.numbers(ledger))
        told = []
        for job, ledger in ledgers.items():
            played = self._played[job]
            if verdicts.faulted(ledger) and excuse(played.test) is None:
                wrong = verdicts.complaints(ledger) or self._against_undisturbed(ledger, played.command)
                told += [f"job {job} of {played.test} ended with 0: {each}" for each in wrong]
        assert told == [], "\n".join(told)

    # --- parts of it -------------------------------------------------------------------------------------------

    def _ended_well(self) -> Iterator[tuple[str, Ledger]]:
        for job in self._played:
            with contextlib.suppress(RegrowError, OSError):  # a test has damaged or removed them
                ledger = Ledger(read_records(self._jobs / job))
                if verdicts.succeeded(ledger):
                    yield job, ledger

    def _against_undisturbed(self, ledger: Ledger, command: Command | None) -> list[str]:
        if command is None or not verdicts.of_one_size(ledger) or not ledger.commits:
            return []
        known = _stored(command.key)
        if known is None and ledger.wall <= ONE_S and _allowance.left:
            known = self._undisturbed(command)
        if not known:
            return []
        wrong = verdicts.differences(verdicts.numbers(ledger), known)
        if not wrong:
            return []
        # Clocks are not the same in two undisturbed runs either.
        second = self._undisturbed(command) or known
        lasting = {at: value for at, value in known.items() if second.get(at) == value}
        return verdicts.differences(verdicts.numbers(ledger), lasting)

    def _undisturbed(self, command: Command) -> Numbers | None:
        """Another run of it without faults; None where it does not go well."""
        job, begun = f"{command.job}-undisturbed", time.monotonic()
        while (self._jobs / job).exists():
            job += "-again"
        if command.script.read_text() != command.text:
            command = replace(command, script=self._folder / f"{command.key}.py")
            command.script.write_text(command.text)
        self._run(*command.again(job), **dict(command.environment))
        _allowance.spend(time.monotonic() - begun)
        made = Ledger(read_records(self._jobs / job)) if (self._jobs / job).exists() else Ledger()
        if not verdicts.succeeded(made) or verdicts.faulted(made):
            return None
        _store(command.key, verdicts.numbers(made))
        return verdicts.numbers(made)


class _Allowance:
    """Time that this lane may still spend."""

    def __init__(self) -> None:
        self._spent = 0.0

    @property
    def left(self) -> bool:
        return self._spent < float(os.environ.get(ALLOWED, "0"))

    def spend(self, seconds: float) -> None:
        self._spent += seconds


_allowance = _Allowance()


def excuse(test: str) -> str | None:
    """Why the jobs of a test are not held to the law; None: they are."""
    name = test.partition("[")[0]
    return EXCUSED.get(name) or EXCUSED.get(name.partition("::")[0])


def _without(words: Sequence[str]) -> tuple[str, ...]:
    """But for faults, and what is of no matter for the numbers."""
    kept, skips = [], False
    for word in words:
        if not skips and _flag(word) not in (*_SWITCHES, *_STRIKES, *_OF_NO_MATTER):
            kept.append(word)
        skips = not skips and word in (*_STRIKES, *_OF_NO_MATTER)
    return tuple(kept)


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _flag(word: str) -> str:
    return word.partition("=")[0]


def _renamed(word: str, job: str, other: str) -> str:
    """A path that is named after a job, named after another."""
    path = Path(word)
    mine = word == job or ("/" in word and path.name.startswith(job))
    return str(path.with_name(other + path.name.removeprefix(job))) if mine else word


def _path(key: str) -> Path:
    return Path(os.environ[FOLDER]) / f"numbers-{key}.json"


def _stored(key: str) -> Numbers | None:
    path = _path(key)
    return json.loads(path.read_text()) if path.exists() else None


def _store(key: str, found: Numbers) -> None:
    """For all lanes of the session: whole, or not there."""
    made = _path(key).with_suffix(f".{os.getpid()}")
    made.write_text(json.dumps(found))
    made.rename(_path(key))

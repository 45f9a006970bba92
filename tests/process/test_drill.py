"""`regrow doctor --train`: each check fails where what it checks is broken, all pass here, and nothing is left."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from tests.process.launching import PATIENCE, SOURCE, still_running
from tests.process.network import Network, network
from tests.standin.building import Unbuildable, library

from regrow.drill.ground import SCRIPTS, DrillSettings
from regrow.drill.verdict import CheckResult, CheckStatus, DrillReport

LIMIT_S = 200.0
UNSTEADY = ("training.py", "step.log(loss=loss)", "step.log(loss=loss + os.getpid())")
WAKES_ITSELF = (
    "training.py",
    "    hold_at, _,",
    "    import subprocess\n"
    '    wake = f"while kill -CONT {os.getpid()} 2>/dev/null; do sleep 0.02; done"\n'
    '    subprocess.Popen(["sh", "-c", wake])\n'
    "    hold_at, _,",
)
"""SIGSTOP is taken back at once, so that nobody hangs."""


@dataclass
class Doctored:
    """A folder in which checks are carried out, and what is left of them there."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tmp = self.folder / "tmp"
        self.tmp.mkdir()
        mine = {"REGROW_HOME": str(self.folder / "home"), "TMPDIR": str(self.tmp), "PYTHONPATH": SOURCE}
        mine |= {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(self.tmp)}
        self.environment = {**os.environ, **mine}

    def settings(self, scripts: Path, ranks: int = 2) -> None:
        settings = DrillSettings(str(self.folder / "checks"), str(scripts), ranks)
        (self.folder / "checks").mkdir(exist_ok=True)
        (self.folder / "checks" / "settings.json").write_bytes(msgspec.json.encode(settings))

    def carry_out(self, check: str, before: str = "", *, within: float = LIMIT_S) -> CheckResult:
        """A check in its process, as a session has it."""
        folder = self.folder / "checks"
        shutil.rmtree(folder / check, ignore_errors=True)
        for job in (self.folder / "home" / "jobs").glob("[!a]*"):  # a session has each check once
            shutil.rmtree(job)
        command = shlex.join([sys.executable, "-m", "regrow.drill", check, str(folder), str(time.monotonic() + within)])
        done = subprocess.run(
            ["sh", "-c", f"{before} exec {command}"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        assert still_running(self.processes(), seconds=20.0) == []
        return msgspec.json.decode((folder / f"{check}.json").read_bytes(), type=CheckResult)

    def processes(self) -> list[int]:
        marker = f"={self.tmp}".encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if marker in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue  # it has ended
        return found

    def assert_nothing_left(self) -> None:
        assert still_running(self.processes(), seconds=20.0) == []
        assert list(self.tmp.iterdir()) == []


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctored]:
    """Undisturbed trainings are shared here, as in a session."""
    made = Doctored(tmp_path_factory.mktemp("drill"))
    yield made
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)


def broken(folder: Path, file: str, old: str, new: str) -> Path:
    """The scripts with another text in one of them."""
    scripts = folder / "scripts"
    shutil.copytree(SCRIPTS, scripts)
    text = (scripts / file).read_text()
    assert old in text
    (scripts / file).write_text(text.replace(old, new))
    return scripts


def test_a_machine_that_gives_too_few_files_fails_and_is_told_the_cure(place: Doctored) -> None:
    place.settings(SCRIPTS)
    result = place.carry_out("facts", before="ulimit -n 200;")
    assert (result.status, result.cause) == (CheckStatus.FAILED, "a process may open 200 files only: ulimit -n 65536")


def test_what_needs_an_accelerator_is_not_applicable_without_one(place: Doctored) -> None:
    place.settings(SCRIPTS)
    result = place.carry_out("sick-device")
    assert (result.status, result.cause) == (CheckStatus.NOT_APPLICABLE, "no accelerator")


CASES = [
    (
        "network",
        ("network.py", "sendall(chunk)", "sendall(chunk[:1000]) or time.sleep(0.1)"),
        "is slower than 0.05 GB/s",
    ),
    ("network", ("network.py", "import regrow\n", "import regrow\n\nraise SystemExit(3)\n"), "the job ended with code"),
    (
        "groups",
        ("training.py", "me = psutil", "os.dup(0)\n            me = psutil"),
        "descriptors of a survivor grew from",
    ),
    (
        "kills-ddp",
        UNSTEADY,
        "not bitwise equal to the undisturbed run: step 0, rank 0: loss is",
    ),
    ("hang", WAKES_ITSELF, "no incident of kind hang is in the records"),
    ("node", UNSTEADY, "not bitwise equal to the undisturbed run: step 0, rank 0: loss is"),
    (
        "steady",
        ("steady.py", "with step:", "with step:\n            time.sleep(0.3)"),
        "times as long as without regrow",
    ),
]


@pytest.mark.soak
@pytest.mark.parametrize(("check", "change", "cause"), CASES, ids=[f"{case[0]}-{at}" for at, case in enumerate(CASES)])
def test_a_check_fails_where_what_it_checks_is_broken(
    place: Doctored, tmp_path: Path, check: str, change: tuple[str, str, str], cause: str
) -> None:
    if check in ("kills-ddp", "node", "hang") and not list((place.folder / "home").glob("jobs/alone-ddp-*")):
        place.settings(SCRIPTS)
        assert place.carry_out("hang").status is CheckStatus.OK  # leaves the undisturbed training for the others
    place.settings(broken(tmp_path, *change))
    result = place.carry_out(check)
    assert result.status is CheckStatus.FAILED, result
    assert cause in result.cause


@pytest.mark.soak
def test_hsdp_with_a_script_that_does_not_repeat_itself_fails(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    place = Doctored(tmp_path / "place")
    place.settings(broken(tmp_path, *UNSTEADY), ranks=4)
    result = place.carry_out("kills-hsdp")
    assert (result.status, "not bitwise equal" in result.cause) == (CheckStatus.FAILED, True)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctored]:
    """A place with an accelerator: torch finds the tests' own by itself, as it finds any that is installed."""
    try:
        library()
    except Unbuildable as reason:
        pytest.skip(str(reason))
    made = Doctored(tmp_path_factory.mktemp("device"))
    installed = made.folder / "installed"
    told = installed / "standin_found-0.dist-info"
    told.mkdir(parents=True)
    (installed / "standin").symlink_to(Path(__file__).parents[1] / "standin")
    (installed / "standin_found.py").write_text("from standin import device\n\n\ndef load():\n    device.load()\n")
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: standin-found\nVersion: 0\n")
    (told / "entry_points.txt").write_text("[torch.backends]\nstandin = standin_found:load\n")
    made.environment["PYTHONPATH"] += f"{os.pathsep}{installed}"
    yield made
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.timeout(1200)  # the first of all builds the device
@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("sick-device", ("training.py", " and not Path(broken).exists():", ":")),
        (
            "memory",
            (
                "training.py",
                "int(free * args.fill)",
                '1 << 60 if Path("taken").exists() else Path("taken").touch() or 1 << 20',
            ),
        ),
    ],
)
def test_a_sick_device_and_memory_are_mended_and_fail_where_they_cannot_be(
    device: Doctored, tmp_path: Path, check: str, change: tuple[str, str, str]
) -> None:
    if check == "sick-device":
        device.settings(SCRIPTS)
        assert device.carry_out(check).status is CheckStatus.OK
    device.settings(broken(tmp_path, *change))
    result = device.carry_out(check, within=90.0)
    assert result.status is CheckStatus.FAILED, result
    # One that waits for memory has not given up yet when the check's time is over.
    assert result.cause.startswith("the training ended with code" if check == "sick-device" else "the training did not")


HOLD = """
import os, sys
from regrow.drill.checks import CHECKS
from regrow.drill.ground import DrillSettings
from regrow.drill.session import hold
check = next(each for each in CHECKS if each.name == "kills-ddp")._replace(limit=float(sys.argv[1]))
report = hold([check], DrillSettings("", ranks=2), os.environ, print)
sys.exit(report.code)
"""


def test_a_check_that_does_not_end_within_its_limit_fails_and_leaves_nothing(tmp_path: Path) -> None:
    place = Doctored(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", HOLD, "1.5"],
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1, done.stderr
    assert "did not end within" in done.stdout  # the check, or the training that it has begun by then
    place.assert_nothing_left()


def doctor(place: Doctored, *words: str, before: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*before, sys.executable, "-m", "regrow", "doctor", "--train", *words],
        env=place.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def report_of(path: Path) -> DrillReport:
    return msgspec.json.decode(path.read_bytes(), type=DrillReport)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_session_says_what_it_has_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    place, out = Doctored(tmp_path), tmp_path / "seen.json"
    running = doctor(place, "--check", "facts", "--check", "kills-ddp", "--json", str(out))
    deadline = time.monotonic() + PATIENCE
    while not list(place.tmp.glob("regrow-doctor-*/jobs/alone-ddp-*/*.jsonl")):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(number)
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 75, said
    assert "1 of 2 checks are ok; interrupted: 1 not carried out" in said
    assert [each.check for each in report_of(out).checks] == ["facts"]
    place.assert_nothing_left()


@pytest.mark.soak
def test_a_quick_session_on_this_machine_is_ok_and_its_report_has_versions_and_figures(tmp_path: Path) -> None:
    place, out = Doctored(tmp_path), tmp_path / "seen.json"
    running = doctor(place, "--quick", "--json", str(out))
    said, _ = running.communicate(timeout=3 * PATIENCE)
    assert running.returncode == 0, said
    report = report_of(out)
    assert json.loads(out.read_text())["code"] == 0
    assert report.versions["torch"] and report.versions["regrow"]
    assert [(each.check, each.status) for each in report.checks] == [
        (name, CheckStatus.OK) for name in ("facts", "network", "groups", "kills-ddp", "hang")
    ]
    assert all(each.figure and each.seconds > 0 for each in report.checks)
    place.assert_nothing_left()


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network(2) as made:
        yield made


@pytest.mark.soak
def test_two_nodes_measure_their_network_and_are_killed_and_lost_together(tmp_path: Path, hosts: Network) -> None:
    places = []
    for host in hosts.hosts:
        (tmp_path / str(host)).mkdir()
        places.append(Doctored(tmp_path / str(host)))
        places[-1].environment["REGROW_TOKEN"] = "a secret of this test"
    words = [
        "--nodes",
        "2",
        "--rdzv-endpoint",
        f"{hosts.address(0)}:29400",
        "--check",
        "network",
        "--check",
        "kills-ddp",
    ]
    words += ["--check", "node", "--json"]
    with ExitStack() as stack:
        running = []
        for host, place in enumerate(places):
            where = ["--node-rank", str(host), "--bind", hosts.address(host)]
            inside = ("ip", "netns", "exec", hosts.name(host))
            process = doctor(place, *words, str(place.folder / "seen.json"), *where, before=inside)
            stack.callback(process.kill)
            running.append(process)
        said = [each.communicate(timeout=3 * PATIENCE)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0], said
    reports = [report_of(place.folder / "seen.json") for place in places]
    assert f"{hosts.address(1)} 4 flows" in reports[0].checks[0].figure
    assert "bitwise equal" in reports[0].checks[2].figure
    for place in places:
        place.assert_nothing_left()

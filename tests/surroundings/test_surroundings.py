"""A job ends with the bits that it has in ordinary surroundings, or with a sentence that names what is missing."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site
from tests.sources import PYTHONPATH
from tests.surroundings.places import (
    CLOCK,
    NOBODY,
    TESTS,
    Outcome,
    can_unshare,
    cold,
    ended,
    needs_filters,
    needs_root,
    warm,
    words,
)
from tests.surroundings.refusing import CALLS

NEEDED = {"waitid", "prctl"}
"""Without these there is no job."""
OTHERS = {"getrandom", "clone3", "sched_getaffinity"}
"""Without these Python does not start, the C library starts no thread (but with ENOSYS), and torch is not imported."""
OPTIONAL = sorted(set(CALLS) - NEEDED - OTHERS)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with site(tmp_path_factory.mktemp("usual")) as made:
        done = warm(made, "usual", kills=False)
        assert done.code == 0, done.said
        yield done.sums


def assert_as_usual(done: Outcome, usual: list[str]) -> None:
    assert done.code == 0, done.said
    assert done.sums == usual, done.said


def refusing(number: str, *calls: str) -> list[str]:
    return [sys.executable, "-m", "tests.surroundings.refusing", number, ",".join(calls)]


# --- system calls ----------------------------------------------------------------------------------------------------


@needs_filters
def test_all_that_may_be_refused_is_and_the_standard_streams_are_closed(here: Site, usual: list[str]) -> None:
    done = cold(here, "bare", before=refusing("EPERM", *OPTIONAL), shell='exec "$@" 0<&- 1>&- 2>&-')
    assert_as_usual(done, usual)
    here.assert_no_process_left()


@pytest.mark.full
@needs_filters
@pytest.mark.parametrize("number", ["ENOSYS", "EINVAL"])
def test_with_other_errors_and_all_that_a_job_may_ask_for(here: Site, usual: list[str], number: str) -> None:
    flags = ("--standby", "1", "--checkpoint-dir", "saved", "--checkpoint-every", "1s")
    assert_as_usual(cold(here, "bare", *flags, before=refusing(number, *OPTIONAL)), usual)


@pytest.mark.full
@needs_filters
@pytest.mark.parametrize("number", ["ENOSYS", "EPERM"])
@pytest.mark.parametrize("call", ["pidfd_open", "pidfd_send_signal", "memfd_create", "eventfd2", "flock", "fallocate"])
def test_one_that_is_refused(here: Site, usual: list[str], call: str, number: str) -> None:
    assert_as_usual(cold(here, "one", before=refusing(number, call)), usual)


@pytest.mark.full
@needs_filters
@pytest.mark.parametrize("call", sorted(NEEDED))
def test_one_without_which_there_is_no_job_is_named_and_nothing_is_started(here: Site, call: str) -> None:
    done = cold(here, "none", before=refusing("EPERM", call))
    assert done.code == 2
    assert f"the system call {call}" in done.said and os.strerror(errno.EPERM) in done.said
    assert not (here.home / "jobs").exists() or not list((here.home / "jobs").iterdir())


# --- descriptors, forks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "habit",
    [
        "fork-exits",
        pytest.param("fork-raises", marks=pytest.mark.full),
        pytest.param("fork-returns", marks=pytest.mark.full),
        pytest.param("fork-outlives", marks=pytest.mark.full),
        pytest.param("processes", marks=pytest.mark.full),
        pytest.param("programs", marks=pytest.mark.full),
    ],
)
def test_a_child_of_the_scripts_own_says_nothing_in_its_parents_name(here: Site, usual: list[str], habit: str) -> None:
    done = warm(here, habit, script=("--habit", habit))
    assert_as_usual(done, usual)
    assert "no step lost" in done.said


@pytest.mark.full
@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&-", "0<&- 1>&- 2>&-", "1>/dev/full 2>/dev/full"])
def test_streams_that_are_closed(here: Site, usual: list[str], closed: str) -> None:
    assert_as_usual(cold(here, "closed", shell=f'exec "$@" {closed}'), usual)


@pytest.mark.full
def test_a_script_may_close_what_it_has_not_opened(here: Site, usual: list[str]) -> None:
    assert_as_usual(warm(here, "closes", script=("--habit", "closes-all")), usual)


@pytest.mark.full
def test_a_script_that_closes_all_there_can_be_is_told_so(here: Site) -> None:
    done = cold(here, "closes", script=("--habit", "closes-all"), kills=False, shell='ulimit -n 1024; exec "$@"')
    assert done.code == 1
    assert "the script has closed descriptor" in done.said


def test_shared_memory_of_a_killed_rank_goes_with_it(here: Site, usual: list[str]) -> None:
    name = f"shared-{os.getpid()}"
    assert_as_usual(warm(here, name, script=("--habit", "shared-memory")), usual)
    assert list(Path("/dev/shm").glob(f"odd-{name}-*")) == []


# --- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_user_logs_out_and_temporary_folders_are_cleaned(here: Site, usual: list[str]) -> None:
    runtime, temporary = here.folder / "run", here.folder / "tmp"
    for folder in (runtime, temporary):
        folder.mkdir(mode=0o700)
    more = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(temporary)}
    with here.start(*words(here, "out", script=("--hold", "hold"), kills=False), **more) as job:
        job.wait_for("step 4")
        for folder in (runtime, temporary):
            shutil.rmtree(folder)
        assert here.regrow("kill", "out", "--rank", "1").returncode == 0
        (here.folder / "hold").touch()
        code = job.wait()
        assert_as_usual(ended(here, "out", code, job.output), usual)
    here.assert_no_process_left()


@pytest.mark.full
@pytest.mark.parametrize("name", ["long", "spaces and ünïcode", "quote'\"$(x)"])
def test_a_temporary_folder_of_any_name(here: Site, usual: list[str], name: str) -> None:
    place = here.folder / (name if name != "long" else "x" * 140)
    place.mkdir()
    more = {"TMPDIR": str(place), "XDG_RUNTIME_DIR": str(place), "REGROW_HOME": str(place / "home")}
    assert_as_usual(cold(here, "named", more=more), usual)


def in_namespaces(flags: str, *lines: str) -> list[str]:
    return ["unshare", *flags.split(), "bash", "-c", "\n".join(["set -e", *lines, 'exec "$@"']), "bash"]


PRIVATE = "mount --make-rprivate /"


@pytest.mark.full
@needs_root
@pytest.mark.skipif(not can_unshare("-m"), reason="mount namespaces cannot be made here")
@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["mount -t tmpfs -o size=4k t /dev/shm"], id="no shared memory"),
        pytest.param(["mount -t tmpfs -o size=64m t /dev/shm"], id="64 MB of shared memory"),
        pytest.param(["mount -t tmpfs -o ro t /dev/shm"], id="shared memory read-only"),
    ],
)
def test_file_systems(here: Site, usual: list[str], lines: list[str]) -> None:
    assert_as_usual(cold(here, "mounts", before=in_namespaces("-m", PRIVATE, *lines)), usual)


@pytest.mark.full
@needs_root
@pytest.mark.skipif(not can_unshare("-m"), reason="mount namespaces cannot be made here")
def test_all_is_read_only_but_the_records(here: Site, usual: list[str]) -> None:
    here_alone = f"mount --bind {here.folder} {here.folder}"
    before = in_namespaces("-m", PRIVATE, here_alone, "mount -o remount,ro,bind /", f"cd {here.folder}")
    assert_as_usual(cold(here, "fixed", before=before, more={"TMPDIR": str(here.folder)}), usual)


@needs_root
@pytest.mark.skipif(
    sys.prefix.startswith(("/tmp/", "/var/tmp/")), reason="this Python lies where the job would see none"
)
@pytest.mark.skipif(not can_unshare("-m"), reason="mount namespaces cannot be made here")
def test_a_read_only_root_without_a_temporary_folder_is_told_before_anything_starts(here: Site) -> None:
    lines = [
        PRIVATE,
        f"mount --bind {here.folder} {here.folder}",
        "for place in /tmp /var/tmp /usr/tmp /dev/shm; do mkdir -p $place && mount -t tmpfs -o ro t $place; done",
        "mount -o remount,ro,bind /",
    ]
    before = in_namespaces("-m", *lines)
    done = cold(here, "nowhere", shell='unset TMPDIR TEMP TMP; cd /; exec "$@"', before=before, kills=False)
    assert done.code == 2, done.said
    assert "no temporary folder can be written to" in done.said and "TMPDIR" in done.said
    assert "Traceback" not in done.said


@pytest.mark.full
@needs_root
@pytest.mark.skipif(not can_unshare("-n"), reason="network namespaces cannot be made here")
def test_a_loopback_that_does_not_answer_is_named(here: Site) -> None:
    for name, lines in (("down", []), ("six", ["ip link set lo up", "ip addr del 127.0.0.1/8 dev lo"])):
        done = cold(here, name, before=in_namespaces("-n", *lines))
        assert done.code == 2
        assert "does not reach itself at 127.0.0.1" in done.said and "--bind ::1" in done.said


@pytest.mark.full
@needs_root
@pytest.mark.skipif(not can_unshare("-n"), reason="network namespaces cannot be made here")
def test_ipv6_alone(here: Site, usual: list[str]) -> None:
    before = in_namespaces("-n", "ip link set lo up", "ip addr del 127.0.0.1/8 dev lo")
    assert_as_usual(cold(here, "six", "--bind", "::1", before=before), usual)


@pytest.mark.full
@needs_root
@pytest.mark.skipif(not can_unshare("--pid --fork --mount-proc"), reason="pid namespaces cannot be made here")
def test_the_launcher_is_process_1(here: Site, usual: list[str]) -> None:
    assert_as_usual(cold(here, "one", before=["unshare", "--pid", "--fork", "--mount-proc"]), usual)


@pytest.mark.full
@pytest.mark.parametrize(
    "shell",
    [
        "ulimit -n 96",
        "ulimit -c 0; ulimit -l 0; ulimit -s 1024",
        "umask 0077",
        "trap '' INT TERM HUP PIPE CHLD",
        "export LC_ALL=POSIX PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 TERM=dumb",
        "export TZ=Pacific/Kiritimati",
        "unset HOME TERM LANG",
    ],
)
def test_limits_signals_and_names_of_the_shell(here: Site, usual: list[str], shell: str) -> None:
    assert_as_usual(cold(here, "shell", shell=f'{shell}; exec "$@"'), usual)


# --- users, disks, clocks --------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.skipif(not can_unshare(NOBODY), reason="user namespaces cannot be made here")
def test_a_user_without_a_name_or_rights(here: Site, usual: list[str]) -> None:
    before = in_namespaces(NOBODY, 'test "$(id -u)" = 65534')
    assert_as_usual(cold(here, "nobody", before=before, shell='unset HOME USER LOGNAME; exec "$@"'), usual)


def small(place: Path, size: str, *more: str) -> list[str]:
    """A full disk behind that folder soon."""
    mount = f"mount -t tmpfs -o size={size} t '{place}'"
    return in_namespaces("-m", PRIVATE, f"mkdir -p '{place}'", mount, *more)


@pytest.mark.full
@needs_root
@pytest.mark.skipif(not can_unshare("-m"), reason="mount namespaces cannot be made here")
def test_a_disk_of_records_that_is_full(here: Site, usual: list[str]) -> None:
    records = here.folder / "records"
    fill = f"head -c 1M /dev/zero > '{records}/junk' || true; mkdir -p '{records}/jobs' || true"
    before = small(records, "1m")
    done = cold(here, "full", before=before, shell=f'{fill}; exec "$@"', more={"REGROW_HOME": str(records)})
    if done.code == 0:
        assert_as_usual(done, usual)
    else:
        assert done.code == 2 and "No space left on device" in done.said and "Traceback" not in done.said, done.said


@pytest.mark.full
@needs_root
@pytest.mark.skipif(not can_unshare("-m"), reason="mount namespaces cannot be made here")
def test_a_disk_of_records_that_fills_up_and_one_of_checkpoints_that_is_full(here: Site, usual: list[str]) -> None:
    records, saved = here.folder / "records", here.folder / "saved"
    lines = [f"mkdir -p '{saved}'", f"mount -t tmpfs -o size=16k t '{saved}'"]
    before = small(records, "200k", *lines)
    flags = ("--checkpoint-dir", str(saved), "--checkpoint-every", "1s")
    done = cold(here, "filling", *flags, before=before, more={"REGROW_HOME": str(records)})
    assert_as_usual(done, usual)
    assert "No space left on device" in done.said


@pytest.mark.full
def test_a_disk_that_does_not_answer(here: Site, usual: list[str]) -> None:
    """Hold the writer of checkpoints, as a file server that is away would: the training goes on."""
    flags = ("--checkpoint-dir", "saved", "--checkpoint-every", "1s")
    with here.start(*words(here, "held", *flags, script=("--pause", "0.3", "--hold", "hold"), kills=False)) as job:
        job.wait_for("step 4")
        held = [pid for pid in here.processes() if Path(f"/proc/{pid}/comm").read_text().strip() == "regrow-writer"]
        for pid in held:
            os.kill(pid, signal.SIGSTOP)
        (here.folder / "hold").touch()
        job.wait_for("step 11")
        for pid in held:
            os.kill(pid, signal.SIGCONT)
        code = job.wait()
        assert_as_usual(ended(here, "held", code, job.output), usual)
    here.assert_no_process_left()


@pytest.mark.full
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the clock is turned by a library that is compiled here")
def test_a_clock_that_jumps(here: Site, usual: list[str]) -> None:
    library, jump = here.folder / "clock.so", here.folder / "jump"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, CLOCK], check=True)
    jump.write_text("0")
    more = {"LD_PRELOAD": str(library), "JUMP_FILE": str(jump)}
    command = [sys.executable, "-m", "regrow", *words(here, "clock", script=("--pause", "0.3"))]
    paths = os.pathsep.join([PYTHONPATH, str(TESTS)])
    turns = {"] step 3\n": "3600", "] step 6\n": "-7200", "] step 8\n": "90000"}
    said = ""
    environment = here.environment(PYTHONPATH=paths) | more
    with subprocess.Popen(
        command, cwd=here.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            said += line
            for words_of_step, seconds in turns.items():
                if line.endswith(words_of_step):
                    jump.write_text(seconds)
    assert_as_usual(ended(here, "clock", process.returncode, said), usual)

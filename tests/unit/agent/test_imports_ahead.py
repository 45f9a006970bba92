"""Imports of a standby while it waits: those of the ranks, unless they would be something else there."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.unit.membership.membership_job import Job

from regrow.agent.workers.imports import changed, thread_names
from regrow.core.ids import NO_STATE
from regrow.core.messages import facts, orders
from regrow.core.messages.vocabulary import Warmth
from regrow.core.records import Noted

AHEAD = """
import os, sys
before = frozenset(sys.modules)
from regrow.agent.workers.imports import import_ahead, installed
sys.path.insert(0, {folder!r})
print(import_ahead({names!r}, ["WISH"]))
print([name for name in installed(before) if name.startswith("made_")])
print(type(os.environ) is os._Environ)
"""


def ahead(folder: Path, *names: str) -> list[str]:
    """In a fresh process: what came of importing these ahead, and what it then has of them."""
    code = AHEAD.format(folder=str(folder), names=list(names))
    environment = os.environ | {"RANK": "1", "WISH": "no"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    site = tmp_path / "site-packages"
    for name, code in {
        "made_plain": "import os\nHOME = os.environ['HOME']",
        "made_ranked": "import os\nMAIN = os.environ.get('RANK', '0') == '0'",
        "made_tuned": "import os\nWISH = os.getenv('WISH')",
        "made_broken": "raise OSError('no such device')",
    }.items():
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(code)
        (site / name / "inner.py").write_text("")
    return site


def test_installed_modules_are_imported_in_order_and_known_as_such(packages: Path) -> None:
    assert ahead(packages, "made_plain", "made_plain.inner") == [
        "('', '')",
        "['made_plain', 'made_plain.inner']",
        "True",
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("made_ranked", "it asks for RANK when it is imported"),
        ("made_tuned", "it asks for WISH when it is imported"),
        ("made_broken", "it cannot be imported ahead: OSError: no such device"),
    ],
)
def test_what_would_be_another_module_in_a_standby_is_named(packages: Path, name: str, why: str) -> None:
    assert ahead(packages, "made_plain", f"{name}.inner", "made_plain.inner")[0] == f"('{name}', '{why}')"


def test_changes_of_the_environment_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAYS", "1")
    monkeypatch.setenv("CHANGES", "1")
    before = dict(os.environ)
    monkeypatch.setenv("CHANGES", "2")
    monkeypatch.setenv("COMES", "3")
    assert changed(before) == ["CHANGES", "COMES"]


# --- who is told what -----------------------------------------------------------------------------------------------


def waiting(imports: list[str]) -> Job:
    """A job that trains, with a standby that waits before the script."""
    job = Job(2, standbys=1, warmth=Warmth.IMPORTS)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, imported=imports if rank == 0 else [], environment=["WISH"])
    job.joined().stepped(0)
    job.tell(facts.WorkerReady(job.standby(), NO_STATE, "", ""))
    return job


def test_a_waiting_standby_imports_what_the_ranks_have() -> None:
    job = waiting(["numpy.fft", "made_plain"])
    assert job.all(orders.ImportModules) == [orders.ImportModules(job.standby(), ["numpy.fft", "made_plain"], ["WISH"])]
    job.tell(facts.ModulesImported(job.standby()))
    assert not job.all(orders.FenceWorker) and not job.all(Noted)


def test_a_script_that_imports_nothing_of_others_costs_nothing() -> None:
    assert not waiting([]).all(orders.ImportModules)


@pytest.mark.parametrize("seated", [False, True])
def test_a_standby_that_has_imported_too_much_is_ended_and_others_do_without_that(seated: bool) -> None:
    job = waiting(["made_ranked", "made_ranked.inner", "made_plain"])
    standby = job.standby()
    if seated:
        job.exited(job.of(1))
        assert job.of(1) == standby
    job.tell(facts.ModulesImported(standby, "made_ranked", "it asks for RANK when it is imported"))
    assert [each.worker for each in job.all(orders.FenceWorker)] == [standby]
    assert job.last(Noted).text.startswith("made_ranked is left to the script to import: it asks for RANK")
    if seated:
        assert job.of(1) != standby
        return
    job.tell(facts.WorkerReady(job.standby(), NO_STATE, "", ""))
    assert job.last(orders.ImportModules).modules == ["made_plain"]


def test_after_four_unfit_packages_nothing_is_imported_ahead_any_more() -> None:
    names = [f"made_{number}" for number in range(6)]
    job = waiting(names)
    for name in names[:4]:
        job.tell(facts.ModulesImported(job.standby(), name, "it asks for RANK"))
        job.tell(facts.WorkerReady(job.standby(), NO_STATE, "", ""))
    assert len(job.all(orders.ImportModules)) == 4


def test_threads_of_a_process_are_known_by_the_names_that_libraries_give_them() -> None:
    ended, named = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("jemalloc_bg_thd")
        named.set()
        ended.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    assert named.wait(10)
    try:
        assert "jemalloc_bg_thd" in thread_names()
    finally:
        ended.set()
        thread.join()

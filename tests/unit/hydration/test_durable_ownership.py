"""Owner of a place of durable checkpoints when a run starts, and the run's rights there."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.unit.hydration.checkpoint_cases import Training, save

from regrow.core.errors import StateError, UsageError
from regrow.core.ids import NO_STATE, JobId, Rank, StepNo, WorkerId
from regrow.core.messages.lineage import Lineage
from regrow.hydration.durable import ownership
from regrow.hydration.durable.ownership import Resume, choose_lineage, new_lineage, newest
from regrow.hydration.durable.storage import place
from regrow.train.state.durable import DurableState

FIRST = Lineage("aaaaaaaaaaaa", "first", 1000.0)
NEW = Lineage("bbbbbbbbbbbb", "new", 2000.0)
NOBODY = Lineage()


def write(folder: Path, whose: Lineage, *steps: int) -> None:
    """Write the checkpoints of a run there."""
    training = Training()
    for step in range(max(steps)):
        training.step(step)
        if step + 1 in steps:
            save(place(str(folder), whose), [training.snapshot()], step + 1, attempt=step, keep=9)


def unasked(fact: object) -> None:
    raise AssertionError(fact)


def tear(folder: Path, name: str) -> None:
    (folder / name / "__0_0.distcp").unlink()


@pytest.mark.parametrize(
    ("there", "resume", "expected"),
    [
        ("nothing", Resume.NEVER, "new"),
        ("nothing", Resume.AUTO, "new"),
        ("nothing", Resume.MUST, "has none"),
        ("whole", Resume.NEVER, r"another run: step 2 of job first, begun 1970-01-01 00:16 UTC \(--resume goes on"),
        ("whole", Resume.AUTO, "first"),
        ("whole", Resume.MUST, "first"),
        ("old", Resume.NEVER, r"another run: step 2 \("),
        ("old", Resume.MUST, "new and the old"),
        ("torn", Resume.NEVER, "new"),
        ("torn", Resume.AUTO, "new"),
        ("torn", Resume.MUST, "only damaged ones: step-1: its file __0_0.distcp is missing; step-2"),
        ("one torn", Resume.NEVER, "another run: step 1 of job first"),
        ("one torn", Resume.MUST, "first"),
        ("format 1", Resume.NEVER, "of format 1, and this version of regrow reads format 2 alone"),
        ("format 1", Resume.AUTO, "cannot be read: step-2: .*it is a pickle"),
        ("format 3", Resume.AUTO, "go on with the version that wrote it"),
    ],
)
def test_a_run_goes_on_starts_or_is_refused(tmp_path: Path, there: str, resume: Resume, expected: str) -> None:
    if there != "nothing":
        write(tmp_path, NOBODY if there == "old" else FIRST, 1, 2)
    if there == "torn":
        tear(tmp_path, "step-1")
    if there in ("torn", "one torn"):
        tear(tmp_path, "step-2")
    if there.startswith("format"):
        for step in ("step-1", "step-2"):
            (tmp_path / step / "regrow.json").write_bytes(b'{"format": %b, "files": {}}' % there[-1:].encode())
    before, said = sorted(tmp_path.rglob("*")), list[str]()
    known = {"new": NEW, "first": FIRST, "new and the old": msgspec.structs.replace(NEW, adopted=("",))}
    if expected in known:
        assert choose_lineage(str(tmp_path), resume, NEW, note=said.append) == known[expected]
    else:
        with pytest.raises(UsageError, match=expected):
            choose_lineage(str(tmp_path), resume, NEW, note=said.append)
    assert sorted(tmp_path.rglob("*")) == before
    assert bool(said) == (expected in known and "torn" in there and resume is not Resume.NEVER)


def test_what_another_training_has_there_is_never_touched(tmp_path: Path) -> None:
    write(tmp_path, FIRST, 1, 2)
    (tmp_path / ".unfinished-aaaaaaaaaaaa-7-1").mkdir()
    (tmp_path / ".unfinished-5-1").mkdir()
    tear(tmp_path, "step-2")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    training = Training()
    for step in range(4):
        training.step(step)
        save(place(str(tmp_path), NEW), [training.snapshot()], step + 1, attempt=step, keep=2)
    assert sorted(os.listdir(tmp_path)) == [
        ".unfinished-5-1",
        ".unfinished-aaaaaaaaaaaa-7-1",
        "step-1",
        "step-2",
        "step-3",
        "step-4",
    ]
    assert all(path.read_bytes() == data for path, data in before.items())
    assert newest(str(tmp_path), NEW) == f"on disk: state@4, in {tmp_path}/step-4"
    assert newest(str(tmp_path), FIRST) == f"on disk: state@1, in {tmp_path}/step-1"
    assert "nothing of this training is on disk" in newest(str(tmp_path), Lineage("cccccccccccc"))


def test_a_name_that_another_training_has_taken_is_left_to_it(tmp_path: Path) -> None:
    url = "memory://regrow-others"
    for at, mine in (
        (place(str(tmp_path), FIRST), place(str(tmp_path), NEW)),
        (place(url, FIRST), place(url, NEW)),
    ):
        training = Training().trained()
        save(at, [training.snapshot()], 3)
        theirs = at.sizes("step-3")
        for attempt in (1, 2):  # a second one takes the place of the first
            assert save(mine, [training.snapshot()], 3, attempt=attempt) == "step-3-bbbbbbbbbbbb"
        assert sorted(at.folders()) == ["step-3", "step-3-bbbbbbbbbbbb"]
        assert at.sizes("step-3") == theirs


def test_a_run_that_goes_on_removes_what_its_earlier_ones_have_left(tmp_path: Path) -> None:
    write(tmp_path, FIRST, 1, 2)
    (tmp_path / ".unfinished-aaaaaaaaaaaa-3-1").mkdir()
    (tmp_path / ".unfinished-cccccccccccc-3-1").mkdir()
    lineage = choose_lineage(str(tmp_path), Resume.AUTO, NEW, note=pytest.fail)
    save(place(str(tmp_path), lineage), [Training().trained(3).snapshot()], 3, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]
    assert choose_lineage(str(tmp_path), Resume.MUST, new_lineage(JobId(NEW.job), 1.0), note=pytest.fail).id == FIRST.id


def test_a_worker_goes_back_to_what_is_its_own_and_whole_from_the_newest_downwards(tmp_path: Path) -> None:
    write(tmp_path, FIRST, 7, 8)
    write(tmp_path, NEW, 1, 2, 3, 4)
    data = tmp_path / "step-3" / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    manifest = tmp_path / "step-2" / "regrow.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"model.0.weight"', b'"model.0.weighs"'))
    resumed = Training(7)
    durable_state = DurableState(WorkerId("w"), str(tmp_path), NEW, send=unasked)
    read = durable_state.load(resumed.state, Rank(0), [StepNo(4)])
    assert read.step == 1
    assert list(read.refused) == [3]  # of 2 the manifest shows it, and nothing of it was read
    assert resumed.state.digest() == Training().trained(1).state.digest()
    assert durable_state.load(resumed.state, Rank(0), [StepNo(4), StepNo(1)]).step == NO_STATE
    assert durable_state.load(resumed.state, Rank(0), [StepNo(step) for step in (1, 3, 4)]) == (0, {})


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


@pytest.mark.parametrize("where", ["format 1", "metadata", "chunk"])
def test_nothing_that_others_can_write_is_unpickled(tmp_path: Path, where: str) -> None:
    write(tmp_path, NEW, 1)
    folder, made = tmp_path / "step-1", tmp_path / "made"
    if where == "chunk":
        data = folder / "__0_0.distcp"
        bomb = pickle.dumps(Bomb(made), protocol=2)
        start = data.read_bytes().index(b"ctorch._utils") - 4  # the pickle of the first tensor
        changed = bytearray(data.read_bytes())
        changed[start : start + len(bomb)] = bomb
        data.write_bytes(changed)
    else:
        bomb = pickle.dumps(Bomb(made))
        size = (folder / ".metadata").stat().st_size
        (folder / ".metadata").write_bytes(bomb + bytes(size - len(bomb)))
    if where == "format 1":
        old = {"format": 1, "step": 1, "entries": [], "python_bytes": 0, "files": {".metadata": size}}
        (folder / "regrow.json").write_bytes(msgspec.json.encode(old))
        with pytest.raises(UsageError, match="it is a pickle"):
            choose_lineage(str(tmp_path), Resume.MUST, NEW, note=lambda _: None)
    read = DurableState(WorkerId("w"), str(tmp_path), NEW, send=unasked).load(Training(7).state, Rank(0))
    assert read.step == (0 if where == "format 1" else 1)
    assert not made.exists()


def test_another_model_is_said_and_no_older_checkpoint_is_taken_for_this_one(tmp_path: Path) -> None:
    write(tmp_path, NEW, 1, 2)
    with pytest.raises(StateError, match="model.0.weight is float32"):
        DurableState(WorkerId("w"), str(tmp_path), NEW, send=unasked).load(Training(0, 31).state, Rank(0))


@pytest.mark.parametrize("case", ["a file", "below a file", "read-only", "a pipe in it"])
def test_a_place_that_cannot_be_written_to_is_said_at_the_start(tmp_path: Path, case: str) -> None:
    (tmp_path / "file").write_text("")
    where = tmp_path / ("file" if case == "a file" else "file/ck" if case == "below a file" else "ck")
    if case == "a pipe in it":
        (where / "step-5").mkdir(parents=True)
        os.mkfifo(where / "step-5" / "regrow.json")
        assert choose_lineage(str(where), Resume.AUTO, NEW, note=lambda _: None) == NEW
        return
    if case == "read-only":
        where = Path("/proc/ck")
    with pytest.raises(UsageError, match=r"--checkpoint-dir .* cannot be written to|No such file"):
        choose_lineage(str(where), Resume.NEVER, NEW, note=pytest.fail)


def test_another_process_looks_at_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert choose_lineage("memory://regrow-empty", Resume.AUTO, NEW, note=said.append) == NEW
    with pytest.raises(UsageError, match="nosuch://bucket cannot be used"):
        choose_lineage("nosuch://bucket", Resume.AUTO, NEW, note=said.append)
    with monkeypatch.context() as patched:
        patched.setattr(ownership, "_START_S", 0.001)
        with pytest.raises(UsageError, match="cannot be seen: no answer within"):
            choose_lineage("memory://regrow-empty", Resume.AUTO, NEW, note=said.append)
        assert choose_lineage("memory://regrow-empty", Resume.NEVER, NEW, note=said.append) == NEW
    assert said == ["what is in memory://regrow-empty cannot be seen: no answer within 0.001 s; training goes on"]


def test_looking_needs_no_torch() -> None:
    code = "import regrow.hydration.durable.ownership, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"

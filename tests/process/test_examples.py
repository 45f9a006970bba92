"""Examples as a person copies them: each runs under `regrow run`, loses a rank, and ends as if undisturbed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.process.launching import TRAINERS, Site, site
from tests.process.recipe_cells import MODULES, write_data
from tests.process.training import Fault
from tests.process.warm import AGENTS
from tests.scripts.tiny_families import save_tiny

from regrow.observe.ledger import Ledger, read_records

FOLDER = Path(__file__).parents[2] / "examples"
LINES = 80


@dataclass(frozen=True)
class Example:
    """Run of an example here: a few steps, and its faults."""

    file: str
    flags: str
    words: str
    faults: tuple[Fault, ...]
    ranks: int = 2


EXAMPLES = [
    Example(
        "01-alone.py",
        "--nproc-per-node 1 --checkpoint-dir {folder} --checkpoint-every 1ms",
        "--steps 60",
        (Fault(0, 40, "update"),),
        ranks=1,
    ),
    Example(
        "02-ddp.py",
        "--nproc-per-node 2 --standby 1",
        "--steps 12 --megabytes 0.2 --out {folder}/end.json",
        (Fault(0, 4, "backward"), Fault(1, 8, "commit")),
    ),
    Example(
        "03-fsdp2.py",
        "--local-nodes 2 --nproc-per-node 1 --buddy-every 1",
        "--steps 8",
        (Fault(1, 3, "reduce"),),
    ),
    Example(
        "04-hsdp.py",
        "--nproc-per-node 4",
        "--steps 8 --every 3",
        (Fault(2, 3, "backward"), Fault(0, 5, "between")),
        ranks=4,
    ),
    Example(
        "05-epochs.py",
        "--nproc-per-node 2",
        "--epochs 4 --samples 384 --out {folder}/best.pt",
        (Fault(0, 5, "between"), Fault(1, 9, "update"), Fault(0, 17, "between"), Fault(0, 23, "commit")),
    ),
    Example("06-data.py", "--nproc-per-node 2", "--steps 8", (Fault(0, 4, "data"),)),
    Example(
        "07-elastic.py",
        "--nproc-per-node 2 --replicas 1:4",
        "--steps 8 --megabytes 0.2 --microbatches 4 --batch-size 2 --out {folder}/end.json",
        (Fault(1, 4, "backward"),),
    ),
    Example(
        "08-lora-recipe.toml",
        "--nproc-per-node 2",
        'model.path={site}/llama data.train=["{site}/chat.jsonl"] data.length=96 batch.samples=8 train.steps=6 '
        "output.dir={folder}",
        (Fault(0, 3, "backward"),),
    ),
    Example("09-hf-trainer.py", "--nproc-per-node 2", "--steps 12 --out {folder}", (Fault(0, 7, "update"),)),
    Example("10-folds.py", "--nproc-per-node 2 --standby 1", "8", (Fault(0, 11, "update"), Fault(1, 34, "reduce"))),
    Example(
        "11-ppo.py",
        "--local-nodes 2 --nproc-per-node 1 --buddy-every 1",
        "8",
        (Fault(1, 3, "reduce"), Fault(0, 5, "update")),
    ),
    Example(
        "12-grpo.toml",
        "--nproc-per-node 2",
        'model.path={site}/llama data.train=["{site}/preference.jsonl"] data.length=64 grpo.completion=8 '
        "batch.samples=16 optim.lr=1e-2 train.steps=4 output.dir={folder}",
        (Fault(0, 2, "backward"),),
    ),
]
ON_HUGGING_FACE = [each for each in EXAMPLES if each.file[:2] in ("08", "09", "12")]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("examples")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def with_trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("examples"), *TRAINERS, *MODULES) as made:
        write_data(made.folder)
        save_tiny("llama", made.folder / "llama")
        yield made
        made.assert_nothing_left()


def end_of(here: Site, example: Example, name: str, faults: tuple[Fault, ...]) -> dict[str, object]:
    """Remains of a run: each rank's account of its state, and the bytes of the files that it is for."""
    folder = here.folder / f"{example.file.partition('.')[0]}-{name}"
    folder.mkdir()
    fill = {"folder": folder, "site": here.folder}
    job = folder.name
    flags = [*example.flags.format(**fill).split(), "--job", job]
    if faults:
        plan = here.folder / f"{job}.toml"
        plan.write_text("\n".join(fault.toml() for fault in faults))
        flags += ["--fault-plan", str(plan)]
    script, words = str(FOLDER / example.file), example.words.format(**fill).split()
    if example.file.endswith(".toml"):
        cold = {} if faults else {AGENTS: "0"}  # as users start it: what prepares the data, the agent and its zygote
        done = here.regrow("train", script, *words, *flags, **cold)
    else:
        done = here.regrow("run", *flags, script, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(Ledger(read_records(here.home / "jobs" / job)).injected) == len(faults), done.stderr
    said = sorted({line for line in done.stdout.splitlines() if ", state " in line})
    files = [path for path in folder.rglob("*") if path.suffix in (".pt", ".safetensors") or path.name == "end.json"]
    kept = {str(path.relative_to(folder)): path.read_bytes() for path in files if path.parent.name in (job, "adapter")}
    return {"said": said, **kept}


def case(example: Example) -> object:
    return pytest.param(example, id=example.file.partition(".")[0])


@pytest.mark.parametrize("example", [case(each) for each in EXAMPLES if each not in ON_HUGGING_FACE])
def test_an_example_loses_ranks_and_ends_the_same(here: Site, example: Example) -> None:
    assert_the_same(here, example)


@pytest.mark.parametrize("example", [case(each) for each in ON_HUGGING_FACE])
def test_an_example_on_hugging_face_loses_a_rank_and_ends_the_same(with_trainers: Site, example: Example) -> None:
    assert_the_same(with_trainers, example)


def assert_the_same(here: Site, example: Example) -> None:
    calm = end_of(here, example, "calm", ())
    assert len(calm) > 1 or len(calm["said"]) == example.ranks, calm  # type: ignore[arg-type]
    assert end_of(here, example, "struck", example.faults) == calm


def test_there_are_twelve_and_each_can_be_read_in_a_minute() -> None:
    numbered = sorted(path for path in FOLDER.iterdir() if path.name[0].isdigit())
    assert [path.name for path in numbered] == [example.file for example in EXAMPLES]
    assert {path.name: len(path.read_text().splitlines()) for path in numbered if _lines(path) >= LINES} == {}


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())

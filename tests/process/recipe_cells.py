"""Recipes on tiny models of each family, and data of each kind."""

import json
import os
import pydoc_data.topics
import random
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from safetensors.torch import load_file
from tests.process.elastic import HURRY, Elastic
from tests.process.launching import Site, warm
from tests.process.shadows import proven
from tests.process.training import SCRIPTS, Fault, Outcome, train
from tests.process.warm import run_forked
from tests.process.warm_client import WarmProcess
from tests.scripts.tiny_families import save_tiny

from regrow.core.records import Record, WorkerBuilt, WorkerSpawned
from regrow.observe.ledger import Ledger, read_records
from regrow_recipes.recipes.planning import PlanWorld
from regrow_recipes.recipes.reading import read_recipe
from regrow_recipes.recipes.resolving import resolve

WORLD, STEPS = 4, 5
MODULES = (
    "peft",
    "regrow_recipes.recipes.preparing",
    "regrow_recipes.recipes.training",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
"""Modules that the zygotes of these jobs have imported."""
ALL_BY_PREFERENCE = "dpo-all"
"""Method dpo on all weights."""
KINDS = {"pretrain": "text", "full": "chat", "lora": "chat", "dpo": "preference", ALL_BY_PREFERENCE: "preference"}


def write_data(folder: Path) -> None:
    """Text, conversations and preferences, of English prose that every Python has."""
    topics: dict[str, str] = pydoc_data.topics.topics
    words = " ".join(topics.values()).split()
    draw = random.Random(1)

    def some(least: int, most: int) -> str:
        start = draw.randrange(len(words) - most)
        return " ".join(words[start : start + draw.randint(least, most)])

    def conversation() -> dict[str, object]:
        return {"messages": [{"role": "user", "content": some(2, 4)}, {"role": "assistant", "content": some(3, 8)}]}

    def preference() -> dict[str, object]:
        return {"prompt": some(2, 4), "chosen": some(3, 7), "rejected": some(3, 7)}

    kinds: dict[str, Callable[[], dict[str, object]]] = {
        "text": lambda: {"text": some(5, 40)},
        "chat": conversation,
        "preference": preference,
    }
    for name, record in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record()) + "\n" for _ in range(48)))


def _prepare(words: Sequence[str], streams: tuple[int, ...]) -> WarmProcess:
    """Process that prepares data, forked for a recipe that is resolved here."""
    module = "regrow_recipes.recipes.preparing"
    return warm(MODULES).start(module, words, cwd=os.getcwd(), env=os.environ, streams=streams)


run_prepare = run_forked(_prepare)


def _name(kind: str, family: str, method: str) -> str:
    return f"{family}-{method}-{kind}".replace("_", "")


def _bytes_in(path: Path) -> int:
    """Bytes of all tensors of a file."""
    return sum(tensor.nbytes for tensor in load_file(path).values())


def write_prose(folder: Path) -> None:
    """Prose for a base to learn, and conversations whose answers are other prose, as lists in JSON."""
    topics: dict[str, str] = pydoc_data.topics.topics
    words = " ".join(topics[name] for name in sorted(topics)).split()
    old, new = words[: len(words) // 2], words[len(words) // 2 :]
    texts = ({"text": " ".join(old[at : at + 40])} for at in range(0, 24000, 40))
    (folder / "prose.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    with (folder / "lists.jsonl").open("w") as file:
        for at in range(0, 14000, 14):
            asked, answered = " ".join(new[at : at + 3]), json.dumps({"words": 11, "answer": new[at + 3 : at + 14]})
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            file.write(json.dumps({"messages": turns}) + "\n")


class Cells:
    """Runs of family and method.

    Args:
        site: where jobs run.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        write_data(site.folder)
        write_prose(site.folder)

    def model(self, family: str) -> Path:
        """The folder of a tiny model."""
        folder = self._site.folder / family
        return folder if folder.exists() else save_tiny(family, folder)

    def settings(self, out: Path, family: str, method: str) -> list[str]:
        """Settings of all these recipes."""
        return [
            f'model.path="{self.model(family)}"',
            f'data.train=["{self._site.folder / KINDS[method]}.jsonl"]',
            f'output.dir="{out}"',
            "data.length=96",
            "batch.samples=8",
            "batch.micro=1",  # so that gradients are added up on each rank
            "train.log_every=1",
            "lora.rank=4",
            "optim.lr=1e-3",
        ]

    def play(
        self,
        kind: str,
        family: str,
        method: str,
        *settings: str,
        world: int = WORLD,
        steps: int = STEPS,
        faults: list[Fault] | None = None,
        more: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> Outcome:
        """One run to its end. `more`: what its script is told besides."""
        name = _name(kind, family, method)
        words = ("--run", str(self._run(name, family, method, settings, world)), *more)
        outcome = train(
            self._site, name, world=world, steps=steps, faults=faults, extra=words, script="train_recipe.py", env=env
        )
        assert outcome.code == 0, outcome.output
        assert len(outcome.finals) == world
        assert len(outcome.losses) == world * steps
        return outcome

    def _run(self, name: str, family: str, method: str, settings: Sequence[str], world: int) -> Path:
        """The file that its workers are told."""
        folder = self._site.folder
        words = [*self.settings(folder / name, family, method), *settings]
        if method == ALL_BY_PREFERENCE:
            evaluated = [f'data.eval=["{self._site.folder / KINDS[method]}.jsonl"]', "train.eval_every=2"]
            method, words = "dpo", [*words, *evaluated, "dpo.weights=all"]
        resolved = resolve(read_recipe(method, words), PlanWorld(world))
        path = folder / f"{name}.run.json"
        path.write_bytes(msgspec.json.encode(resolved.run))
        return path

    def shadowed(self, family: str, method: str) -> list[Record]:
        """Train undisturbed until a standby has shown in a rank's shadow what it would compute; what was found."""
        name = _name("shadowed", family, method)
        run = self._run(name, family, method, (), 2)
        words = ["run", "--job", name, "--nproc-per-node", "2", "--standby", "1"]
        words += [str(SCRIPTS / "train_recipe.py"), "--run", str(run), "--steps", "1000", "--pace", "0.1"]
        with self._site.start(*words, "--out", str(self._site.folder / f"{name}.out")) as running:
            found = proven(self._site, name, running, 1)
            running.signal(signal.SIGTERM)
            running.wait()
        return found

    def grow_lose_a_rank_and_shrink(
        self, family: str, method: str, *settings: str, steps: int
    ) -> tuple[Ledger, dict[int, str]]:
        """A replica of two ranks becomes two, of which the newer one loses a rank, and one again; ranks' digests."""
        folder, name = self._site.folder, _name("elastic", family, method)
        run = self._run(name, family, method, settings, 2)
        words = ["run", "--job", name, "--nproc-per-node", "2", "--replicas", "1:2", "--replica-ranks", "2"]
        words += [str(SCRIPTS / "train_recipe.py"), "--run", str(run), "--steps", str(steps), "--pace", "0.4"]
        (folder / HURRY).unlink(missing_ok=True)
        with self._site.start(*words, "--out", str(folder / f"{name}.out")) as started:
            job = Elastic(self._site, name, started)
            job.settled(1)
            job.reach(2)
            job.kill(job.worker("member", 3))
            job.settled(2)
            job.reach(1)
            ledger = job.finish()
        digests = {rank: json.loads((folder / f"{name}.{rank}.json").read_text())["digest"] for rank in range(2)}
        return ledger, digests

    def weights_opened(self, kind: str, family: str, method: str) -> dict[int, list[str]]:
        """Rank to the files of weights that were opened while its last process lived, by whomever."""
        out = self._site.folder / _name(kind, family, method)
        return {rank: out.with_suffix(f".opened.{rank}").read_text().split() for rank in range(WORLD)}

    def processor_seconds(self, kind: str, family: str, method: str) -> dict[int, float]:
        """Rank to what its last process took of a processor until its first step was made."""
        out = self._site.folder / _name(kind, family, method)
        return {rank: float(out.with_suffix(f".built.{rank}").read_text()) for rank in range(WORLD)}

    @staticmethod
    def evaluations(outcome: Outcome) -> list[str]:
        """Evaluations in the output of a run."""
        return re.findall(r"after step .*: eval loss .*", outcome.output)

    def was_struck(self, kind: str, family: str, method: str) -> bool:
        """True if a rank has been killed before its first step."""
        return (self._site.folder / f"{_name(kind, family, method)}.struck").exists()

    def state_of_a_shard(self, family: str, method: str) -> int:
        """Bytes of what half of the ranks share: weights, and two moments of each weight that trains."""
        loaded = _bytes_in(self.model(family) / "model.safetensors")
        if method == "lora":
            out = self._site.folder / _name("calm", family, method)
            return (loaded + 3 * _bytes_in(out / "adapter" / "adapter_model.safetensors")) // 2
        return 3 * loaded // 2

    def built_again(self, kind: str, family: str, method: str) -> list[float]:
        """Seconds in which each replacement was forked, ran its script and came to its steps."""
        records = list(read_records(self._site.home / "jobs" / _name(kind, family, method)))
        joined = {record.worker for record in records if isinstance(record, WorkerSpawned) and record.role == "joiner"}
        return [record.seconds for record in records if isinstance(record, WorkerBuilt) and record.worker in joined]

    def learn(self, job: str, method: str, base: Path, data: str, *settings: str) -> tuple[Path, Ledger]:
        """`regrow train` in two replicas by what a user would write; the folder of the result, and its records."""
        out = self._site.folder / f"out-{job}"
        paths = [f'model.path="{base}"', f'data.train=["{self._site.folder / data}"]', f'output.dir="{out}"']
        words = [*paths, "data.length=128", "batch.samples=16", "batch.micro=8", "optim.lr=1e-2", *settings]
        done = self._site.regrow("train", method, *words, "--nproc-per-node", "2", "--job", job)
        assert done.returncode == 0, done.stdout + done.stderr
        return out, Ledger(read_records(self._site.home / "jobs" / job))

    def train_by_command(self, name: str, faults: list[Fault]) -> Path:
        """`regrow train lora` in two replicas, with evaluations and exports between; the folder of the result."""
        folder, site = self._site.folder, self._site
        out = folder / f"out-{name}"
        words = [*self.settings(out, "llama", "lora"), "train.steps=8", "output.every=4", "train.eval_every=2"]
        words += [f'data.eval=["{folder / "chat.jsonl"}"]']
        flags = ["--nproc-per-node", "2", "--job", f"command-{name}"]
        if faults:
            plan = folder / f"{name}.toml"
            plan.write_text("\n".join(fault.toml() for fault in faults))
            flags += ["--fault-plan", str(plan)]
        done = site.regrow("train", "lora", *words, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step 8/8  loss" in done.stdout and "after step 8: eval loss" in done.stdout, done.stdout
        assert " tokens/s  " in done.stdout and " TFLOP/s a rank  " in done.stdout, done.stdout
        assert "MFU" not in done.stdout, "processors have no peak that is known"
        ledger = Ledger(read_records(site.home / "jobs" / f"command-{name}"))
        assert len(ledger.injected) == len(faults)
        return out

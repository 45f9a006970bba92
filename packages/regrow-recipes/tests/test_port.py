"""Report on a script: its tier, the lines that would change, and its listed habits."""

import ast
import subprocess
from pathlib import Path

import pytest

from regrow.cli import main
from regrow.core.errors import UsageError
from regrow_recipes.port.proposing import Proposal, propose

HEAD = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

"""
SETUP = """\
dist.init_process_group("nccl")
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters())
"""
STEP = """\
for x, y in loader:
    loss = model(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def indented(text: str, by: int = 4) -> str:
    return "".join(" " * by + line if line.strip() else line for line in text.splitlines(keepends=True))


def of(text: str) -> Proposal:
    made = propose(text, "train.py")
    ast.parse(made.text)
    return made


def test_a_plain_loop_over_batches_becomes_one_of_steps() -> None:
    made = of(HEAD + SETUP + STEP)
    assert (made.today, made.then) == (1, 3)
    assert made.text == (
        HEAD.rstrip("\n")
        + "\nimport regrow\n\n"
        + "session = regrow.init(seed=0)\nmodel = DDP(Net())\noptimizer = torch.optim.AdamW(model.parameters())\n"
        + "session.protect(model, optimizer)\n"
        + "for step in session.steps(loader, until=len(loader)):\n"
        + "    with step as (x, y):\n"
        + indented(STEP.partition("\n")[2])
    )


@pytest.mark.parametrize("mark", ["\f\n", "NOTE = 'one\u2028two\x85three\x1cfour'\n"], ids=["form feed", "in a string"])
def test_what_is_no_end_of_a_line_to_python_moves_no_line(mark: str) -> None:
    plain, marked = of(HEAD + "\n" + SETUP + STEP), of(HEAD + mark + SETUP + STEP)
    assert plain.then == marked.then == 3
    assert marked.text.replace(mark, "\n") == plain.text
    assert marked.diff.count("\n") == plain.diff.count("\n")


def test_epochs_keep_their_number_wherever_it_is_used() -> None:
    loop = "for epoch in range(1, args.epochs + 1):\n    sampler.set_epoch(epoch)\n    print(f'{epoch}: {epoch + 1}')\n"
    made = of(HEAD + SETUP + loop + indented(STEP) + "    log(epoch=epoch, name='epoch', at=run.epoch)\n")
    assert "for epoch in session.epochs(loader, args.epochs):" in made.text
    assert "set_epoch" not in made.text
    assert "print(f'{(epoch.number + 1)}: {(epoch.number + 1) + 1}')" in made.text
    assert "log(epoch=(epoch.number + 1), name='epoch', at=run.epoch)" in made.text


def test_steps_in_a_function_of_their_own_are_given_the_epoch() -> None:
    function = (
        "def train(args, model, loader, optimizer, epoch):\n    model.train()\n"
        "    for i, (x, y) in enumerate(tqdm(loader)):\n"
        + indented(STEP.partition("\n")[2])
        + "        if i % args.every == 0:\n            print(epoch, i, loss.item())\n\n\n"
    )
    rest = (
        indented(SETUP)
        + "    for epoch in range(args.epochs):\n        train(args, model, train_loader, optimizer, epoch)\n"
        + "        test(model, epoch)\n"
    )
    made = of(HEAD + function + "def main(args):\n" + rest)
    assert "for epoch in session.epochs(train_loader, args.epochs):" in made.text
    assert "        train(args, model, train_loader, optimizer, epoch)\n        test(model, epoch.number)" in made.text
    assert (
        "    for step in tqdm(epoch):\n        with step as (x, y):\n            i = step.number % len(epoch)\n"
        in made.text
    )
    assert (
        "        if step.committed:\n            if i % args.every == 0:\n                print(epoch.number, i"
        in made.text
    )


def test_functions_with_collectives_between_steps_are_marked_and_texts_are_not_moved() -> None:
    function = "def evaluate():\n    dist.all_reduce(score)\n    return score\n\n\n"
    loop = "for epoch in range(3):\n" + indented(STEP).replace(
        "loss.backward()", 'loss.backward()\n        s = """a\nb"""'
    )
    made = of(HEAD + function + SETUP + loop + "    evaluate()\n")
    assert "@regrow.restartable\ndef evaluate():" in made.text
    assert '            s = """a\nb"""\n' in made.text


def test_what_goes_with_the_model_is_protected_too() -> None:
    more = "scheduler = CosineAnnealingLR(optimizer)\nscaler = torch.amp.GradScaler()\nema = AveragedModel(model)\n"
    made = of(HEAD + SETUP + more + "for epoch in range(3):\n" + indented(STEP))
    assert "session.protect(model, optimizer, scaler, scheduler, ema)\nfor epoch" in made.text


def test_an_optimizer_is_what_is_given_parameters_whatever_its_name() -> None:
    setup = "model = Net().to(device)\nmine = optim.Adadelta(model.parameters(), lr=1)\n"
    made = of(HEAD + setup + STEP.replace("optimizer.", "my_opt.").replace("x, y in", "x in"))
    assert "session.protect(model, mine)" in made.text


def test_a_model_that_is_not_seen_is_not_left_out_in_silence() -> None:
    made = of(HEAD + "optimizer, scheduler = build()\nsteps = StepLR(optimizer)\n" + STEP)
    assert (made.then, made.diff) == (1, "")
    assert "session.protect(...) by hand" in "".join(made.says)


def test_a_training_in_the_methods_of_a_class_is_one_though_its_loop_is_not_seen() -> None:
    made = of("class T:\n    def batch(self, x):\n        self.optimizer.step()\n")
    assert (made.today, made.then) == (1, 1)
    assert "found no loop with an optimizer step" in made.says[0]


def test_comments_and_plain_texts_keep_their_words_and_a_guarded_set_epoch_stays() -> None:
    loop = "for epoch in range(3):\n    if args.spread:\n        sampler.set_epoch(epoch)\n    # the next epoch\n"
    made = of(HEAD + SETUP + loop + "    print('an epoch ', f'of {epoch:>2} epoch')\n" + indented(STEP))
    assert "    if args.spread:\n        sampler.set_epoch(epoch.number)\n    # the next epoch\n" in made.text
    assert "print('an epoch ', f'of {epoch.number:>2} epoch')" in made.text


def test_fsdp2_is_known_and_its_model_is_the_optimizers() -> None:
    setup = "model = Net()\nfully_shard(model)\noptimizer = torch.optim.SGD(model.parameters(), lr=1)\n"
    made = of(HEAD + setup + STEP)
    assert "parallel by FSDP2" in made.says[0]
    assert "session = regrow.init(seed=0)\nmodel = Net()" in made.text
    assert "session.protect(model, optimizer)" in made.text


@pytest.mark.parametrize("name", ["FSDP", "FullyShardedDataParallel"])
def test_fsdps_first_form_is_no_wrapper_that_is_known_and_has_to_be_changed_by_hand(name: str) -> None:
    alias = "" if name == "FullyShardedDataParallel" else f" as {name}"
    head = f"import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel{alias}\n"
    made = of(head + f"model = {name}(Net())\noptimizer = torch.optim.SGD(model.parameters(), lr=1)\n" + STEP)
    assert (made.today, made.then, made.diff) == (1, 1, "")
    assert "parallel by FullyShardedDataParallel" in made.says[0]
    assert any("fully_shard" in said for said in made.says), made.says


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "from transformers import AutoModel, Trainer as T, TrainingArguments\nT(model).train()\n",
            "from transformers import AutoModel\nfrom regrow_recipes.adapters.transformers import Trainer as T",
        ),
        (
            "from trl import (\n    SFTConfig,\n    SFTTrainer,\n)\n",
            "from regrow_recipes.adapters.trl import SFTConfig, SFTTrainer\n",
        ),
        (
            "from lightning.pytorch import LightningModule, Trainer\nTrainer().fit(model)\n",
            "from lightning.pytorch import LightningModule\nfrom regrow_recipes.adapters.lightning import Trainer\n",
        ),
        ("from pytorch_lightning import Trainer\n", "from regrow_recipes.adapters.lightning import Trainer\n"),
        (
            "import lightning as L\nmodel = Net()\nL.Trainer().fit(model)\n",
            "import lightning as L\nimport regrow_recipes.adapters.lightning as regrow_lightning\nmodel = Net()\n"
            "regrow_",
        ),
        (
            "import transformers\ntransformers.Trainer(m, transformers.TrainingArguments()).train()\n",
            "import transformers\nimport regrow_recipes.adapters.transformers as regrow_transformers\n"
            "regrow_transformers.Trainer(m, regrow_transformers.TrainingArguments()).train()\n",
        ),
        (
            "import transformers\n\nclass Mine(transformers.Trainer):\n    pass\n",
            "import transformers\nimport regrow_recipes.adapters.transformers as regrow_transformers\n\n"
            "class Mine(regrow_tr",
        ),
        (
            "from transformers.trainer import Trainer\n\nclass Mine(Trainer):\n    pass\n",
            "from regrow_recipes.adapters.transformers import Trainer\n\nclass Mine(Trainer):\n",
        ),
        (
            "try:\n    from trl.trainer.sft_trainer import SFTTrainer\nexcept ImportError:\n    SFTTrainer = None\n",
            "try:\n    from regrow_recipes.adapters.trl import SFTTrainer\nexcept",
        ),
        (
            "from transformers import TrainingArguments\nfrom trl import SFTTrainer\nSFTTrainer(TrainingArguments())\n",
            "from regrow_recipes.adapters.transformers import TrainingArguments\n"
            "from regrow_recipes.adapters.trl import SFTTrainer\n",
        ),
        (
            "from transformers import TrainingArguments\nfrom mine import MyTrainer\nMyTrainer(TrainingArguments())\n",
            "from regrow_recipes.adapters.transformers import TrainingArguments\nfrom mine import MyTrainer\n"
            "from regrow_recipes.adapters.transformers import recoverable\n"
            "recoverable(MyTrainer)(TrainingArguments())\n",
        ),
        (
            "from trl import KTOConfig, KTOTrainer\nKTOTrainer(m).train()\n",
            "from trl import KTOConfig, KTOTrainer\nfrom regrow_recipes.adapters.transformers import recoverable\nreco",
        ),
        (
            "from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer(m).train()\n",
            "from regrow_recipes.adapters.trl import GRPOConfig, GRPOTrainer\n",
        ),
    ],
)
def test_a_frameworks_trainer_needs_another_import(text: str, line: str) -> None:
    made = of(text)
    assert made.text.startswith(line)
    assert made.then == 3
    assert "its imports change" in made.says


ACCELERATE = (
    "from accelerate import Accelerator\n\naccelerator = Accelerator()\n"
    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
)
EPOCHS = (
    "for epoch in range(1, epochs + 1):\n    model.train()\n    for step, batch in enumerate(loader):\n"
    "        accelerator.backward(model(**batch).loss)\n        optimizer.step()\n"
    "    evaluate()\n    print(epoch)\n"
)


def test_accelerates_bodies_keep_their_place() -> None:
    made = of(ACCELERATE + EPOCHS)
    assert (made.today, made.then) == (1, 3)
    assert "its imports change and the heads of its two loops" in made.says
    assert made.text == ACCELERATE.replace("accelerate import", "regrow_recipes.adapters.accelerate import") + (
        "for step in accelerator.steps(loader, epochs=epochs):\n    model.train()\n    with step as batch:\n"
        "        accelerator.backward(model(**batch).loss)\n        optimizer.step()\n"
        "    if not accelerator.ends_epoch(step):\n        continue\n"
        "    evaluate()\n    print((accelerator.epoch + 1))\n"
    )


def test_an_accelerate_loop_that_asks_for_the_batchs_number_before_its_update_asks_for_the_steps() -> None:
    made = of(
        (ACCELERATE + EPOCHS).replace(
            "        optimizer", "        if (step + 1) % gathered == 0:\n            optimizer"
        )
    )
    assert "        if (step.number + 1) % gathered == 0:\n            optimizer.step()\n" in made.text
    assert made.then == 3
    (told,) = (each for each in made.says if each.startswith("line 9: "))
    assert "skips the update of some batches (a divisor above 1 does), give Accelerator(gradient_acc" in told


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        optimizer", "        if step % 4 == 0:\n            optimizer"),
        ("        optimizer", "        if step % gathered == 0 or step == 7:\n            optimizer"),
        ("Accelerator()", "Accelerator(gradient_accumulation_steps=4)"),
        ("    model.train()\n", "    model.train()\n    total = 0\n"),
        ("        optimizer.step()\n", "        optimizer.step()\n        if step > 9: break\n"),
        ("enumerate(loader)", "skip_first(loader)"),
    ],
    ids=["every fourth batch", "its number", "accumulates", "more before", "left", "no loader"],
)
def test_an_accelerate_loop_that_has_more_in_it_is_changed_by_hand(before: str, after: str) -> None:
    made = of((ACCELERATE + EPOCHS).replace(before, after))
    assert (made.today, made.then, made.diff) == (1, 1, "")
    assert any("by hand" in each for each in made.says)


def test_what_cannot_be_changed_by_a_diff_is_told_with_what_to_write() -> None:
    accumulated = STEP.replace("    optimizer.step()", "    if (i + 1) % 4 == 0:\n        optimizer.step()")
    for text, words in [
        (HEAD + SETUP + accumulated, "line 12: gradients are accumulated over several batches"),
        (
            HEAD + SETUP + STEP.replace("x, y in loader", "it in range(9)"),
            "line 8: its batches do not come from a loader",
        ),
        (HEAD + SETUP + STEP.replace("for x, y in loader", "while True"), "line 8: a `while` loop"),
        ("import lightning as L\nL.Fabric().launch()\n", "Fabric's loops are like plain ones"),
        ("from accelerate import Accelerator\n", "its import changes to regrow_recipes.adapters.accelerate"),
    ]:
        made = of(text)
        assert (made.today, made.then, made.diff) == (1, 1, ""), text
        assert any(each.startswith(words) for each in made.says), made.says


def test_habits_are_named_with_their_lines() -> None:
    text = HEAD + "rank = dist.get_rank()\n" + SETUP.replace("Net()", "Net(), static_graph=True")
    loop = "for epoch in range(3):\n" + indented(STEP + "    dist.all_reduce(loss)\n    if bad: break\n")
    found = "\n".join(of(text + loop + "    if rank == 0:\n        torch.save(model, 'best.pt')\n").says)
    for words in (
        "line 5: `rank` keeps the rank of the start",
        "line 7: DDP(static_graph=True)",
        "line 10: `break` may end an epoch before its end",
        "line 15: all_reduce after the update",
        "line 17: a file that one rank writes",
    ):
        assert words in found, found


def test_a_start_epoch_and_a_guarded_beginning_are_told() -> None:
    loop = "    for epoch in range(start, 9):\n" + indented(STEP, 8)
    setup = indented("if args.distributed:\n" + indented(SETUP[:33]) + "\n" + SETUP[SETUP.index("model") :])
    found = "\n".join(of(HEAD + "def main(start):\n" + setup + loop).says)
    assert "`start`: start at the first epoch; --resume continues at the right one" in found
    assert "move it out of the branch" in found


def test_clocks_behind_the_update_are_no_part_of_the_step() -> None:
    made = of(HEAD + SETUP + STEP + "    meter.update(1)\n")
    assert "    if step.committed:\n        meter.update(1)\n" in made.text


def test_what_trains_nothing_or_knows_regrow_already_is_left_alone() -> None:
    for text, today, words in [
        ("print('hello')\n", 0, "no training was found"),
        ("import regrow\n", 3, "uses regrow already"),
    ]:
        made = of(text)
        assert (made.today, made.then, made.diff) == (today, today, "")
        assert words in made.says[0]


def test_what_is_no_script_is_told_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"train.py, line 1 is not Python"):
        of("for for\n")
    assert main(["port", str(tmp_path / "nothing.py")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "train.py").write_text(HEAD + SETUP + STEP)
    assert main(["port", str(tmp_path / "train.py")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("--- ") and "+session.protect(model, optimizer)" in said.out
    assert "regrow: today, as it is: tier 1" in said.err


def patched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], name: str = "train.py"
) -> bytes:
    """A script after `regrow port` and `patch`."""
    monkeypatch.chdir(folder)
    assert main(["port", str(folder / name)]) == 0
    subprocess.run(["patch", "-p0", "--binary", "-s"], input=capfdbinary.readouterr().out, cwd=folder, check=True)
    return (folder / name).read_bytes()


@pytest.mark.parametrize(
    ("before", "end", "encoding"),
    [
        ("", "\n", "utf-8"),
        ("", "\r\n", "utf-8"),
        ("", "\n", "utf-8-sig"),
        ("# -*- coding: latin-1 -*-\n", "\n", "latin-1"),
        ("# coding: cp1252\n", "\r\n", "cp1252"),
    ],
    ids=["plain", "CRLF", "byte order mark", "coding line", "coding line and CRLF"],
)
@pytest.mark.parametrize("last", ["\n", ""], ids=["", "no end of the last line"])
def test_the_diff_of_any_file_of_python_can_be_applied(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    before: str,
    end: str,
    encoding: str,
    last: str,
) -> None:
    text = before + HEAD + "NAME = 'Zoë'\n" + SETUP + STEP.rstrip("\n") + last
    (tmp_path / "train.py").write_bytes(text.replace("\n", end).encode(encoding))
    after = patched(tmp_path, monkeypatch, capfdbinary).decode(encoding)
    assert ast.dump(ast.parse(after.replace("\r\n", "\n"))) == ast.dump(ast.parse(of(text).text))
    assert after.count(end) == after.count("\n") and "Zoë" in after


def test_a_training_in_a_module_beside_the_script_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "main.py").write_text("from engine import run\nrun()\n")
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("from engine.train import run\n")
    (tmp_path / "engine" / "train.py").write_text(HEAD + SETUP + STEP)
    assert main(["port", str(tmp_path / "main.py")]) == 1
    said = capfd.readouterr()
    assert said.out == "" and f"its training is in {tmp_path / 'engine' / 'train.py'}, line 8" in said.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            HEAD + SETUP + STEP.replace("    loss =", "    if x is None:\n        break\n    loss ="),
            "`break` before the",
        ),
        (HEAD + SETUP + STEP + "torch.multiprocessing.spawn(work, nprocs=2)\n", "call work in its place, with int(os."),
        ("import lightning as L\nfabric = L.Fabric()\nname = 'Trainer'\n", "Lightning's Fabric"),
    ],
)
def test_what_a_diff_cannot_change_has_no_diff_and_says_why(text: str, words: str) -> None:
    made = of(text)
    assert (made.then, made.diff) == (1, "")
    assert any(words in each for each in made.says), made.says


def test_collectives_of_its_own_and_a_rank_that_is_only_used_are_no_faults() -> None:
    plain = "model = Net()\noptimizer = torch.optim.AdamW(model.parameters())\n"
    said = "\n".join(of(HEAD + plain + STEP.replace("    loss =", "    x = x.to(dist.get_rank())\n    loss =")).says)
    assert "keeps the rank" not in said and "on one process, as far as this file shows" in said
    reduced = STEP.replace("    optimizer.step()", "    dist.all_reduce(model.weight.grad)\n    optimizer.step()")
    assert "collectives of its own (all_reduce)" in of(HEAD + plain + reduced).says[0]
    assert "`rank, world` keeps the rank" not in said
    asked = of("rank, world = dist.get_rank(), dist.get_world_size()\n" + HEAD + plain + STEP)
    assert any("keeps the rank of the start" in each for each in asked.says)

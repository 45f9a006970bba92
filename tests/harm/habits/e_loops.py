"""Loops, and what stands between steps."""

import copy
import itertools
from pathlib import Path
from typing import Any

import torch
from tests.harm.frame import Trial, backward, batch, ddp, mlp, mse
from tests.harm.table import BATCHES_OF_A_RANK, DRAWS, habit
from tqdm import tqdm

import regrow


def between(t: Trial, function: Any) -> Any:
    """`@regrow.restartable`, where there is regrow."""
    return regrow.restartable(function) if isinstance(t.session, regrow.Session) else function


@habit(
    "nested epochs, a `session.steps` for each",
    refused="session.steps is called within another loop",
    instead="`for epoch in session.epochs(loader, epochs)`, and in it `for step in epoch`",
)
def nested_epochs(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for epoch in range(3):
        words = {} if isinstance(t.session, regrow.Session) else {"start": 4 * epoch}
        for step in t.steps(until=4 * epoch + 4, **words):
            with step as (x, y):
                loss = mse(model(x), y)
                step.log(loss=loss)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit("a single epoch, in a loop that has one turn")
def one_epoch(t: Trial) -> dict[str, Any]:
    model, epochs = ddp(mlp()), 1
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for _ in range(epochs):
        for step in t.steps():
            with step as (x, y):
                loss = mse(model(x), y)
                step.log(loss=loss)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit(
    "nested epochs: `for step in islice(steps, n)`",
    refused="itertools.islice(...) counts what session.steps gives",
    instead="`session.epochs(loader, epochs, length=n)`",
)
def epochs_by_islice(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    steps = t.steps()
    for _ in range(3):
        for step in itertools.islice(steps, 4):
            with step as (x, y):
                loss = mse(model(x), y)
                step.log(loss=loss)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit(
    "nested epochs: `groupby(steps, key=epoch of step.number)`, an evaluation after each",
    refused="itertools.groupby(...) asks for the next step before the script has run the code after the last one",
    instead="`session.epochs(loader, epochs, length=n)`",
)
def epochs_by_groupby(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)

    @lambda function: between(t, function)
    def evaluate() -> float:
        x, y = batch(5)
        with torch.no_grad():
            torch.distributed.all_reduce(score := mse(model.module(x), y))
        return float(score)

    for _, steps in itertools.groupby(t.steps(), lambda step: step.number // 4):
        for step in steps:
            with step as (x, y):
                loss = mse(model(x), y)
                step.log(loss=loss)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
        evaluate()
    return {"model": model, "optimizer": optimizer}


@habit(
    "nested epochs: `session.epochs`; after each a score (`@regrow.restartable`), the best weights, early stopping",
    between=True,
)
def epochs_of_the_session(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    t.session.protect(model, optimizer, scheduler)
    best, bad, lasted, scores = 1e9, 0, 0, []

    @lambda function: between(t, function)
    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            x, y = batch(5)
            torch.distributed.all_reduce(score := mse(model(x), y))
        return float(score) / torch.distributed.get_world_size()

    for epoch in t.epochs(t.until // 3 + 2, 3):
        model.train()
        for step in epoch:
            with step as (x, y):
                loss = mse(model(x), y)
                step.log(loss=loss)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
        score = evaluate()
        scheduler.step(score)
        scores.append(score)
        lasted = epoch.number
        if score < best - 0.02:
            best, bad = score, 0
            if t.session.is_main:
                torch.save(copy.deepcopy(model.module.state_dict()), t.folder / "best.pt")
        else:
            bad += 1
        if bad >= 9 or 3 * epoch.number + 3 >= t.until:
            break
    saved = torch.load(t.folder / "best.pt", weights_only=False) if t.session.is_main else {}
    return {"model": model, "optimizer": optimizer, "best": best, "scores": scores, "lasted": lasted, "saved": saved}


@habit("nested epochs: `session.epochs`, a collective after each that is not marked")
def epochs_with_a_lone_collective(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for epoch in t.epochs(t.until // 3, 3):
        running = 0.0
        for step in epoch:
            with step as (x, y):
                loss = mse(model(x), y)
                step.log(loss=loss)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
            if step.committed:
                running += float(loss.detach())
        torch.distributed.all_reduce(total := torch.tensor(running))
        if t.session.is_main and epoch.number % 2:
            torch.save(total, t.folder / f"total-{epoch.number}.pt")
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return {"model": model, "optimizer": optimizer}


@habit("one flat loop with an evaluation (collectives, `@regrow.restartable`) after each epoch", between=True)
def flat_epochs_with_evaluation(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)

    @lambda function: between(t, function)
    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            x, y = batch(5)
            torch.distributed.all_reduce(score := mse(model(x), y))
        model.train()
        return float(score)

    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        if step.number % 3 == 2:
            evaluate()
    return {"model": model, "optimizer": optimizer, "score": evaluate()}


@habit(
    "an evaluation with collectives between steps that is not marked",
    instead="each of its collectives is made again; `@regrow.restartable` runs the function again as one",
    between=True,
)
def evaluation_not_marked(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        with torch.no_grad():
            x, y = batch(5)
            torch.distributed.all_reduce(mse(model.module(x), y))
    return {"model": model, "optimizer": optimizer}


@habit(
    "the same after each third step, and a scheduler goes by its score",
    between=True,
    differs="the score is of as many batches as there are ranks",
)
def evaluation_not_marked_decides(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    t.session.protect(model, optimizer, scheduler)
    for step in t.steps(until=16):
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        if step.committed and step.number % 3 == 0:
            with torch.no_grad():
                x, y = batch(5 + t.session.rank)
                torch.distributed.all_reduce(score := mse(model.module(x), y))
                everybody: list[Any] = [None] * t.session.world_size
                torch.distributed.all_gather_object(everybody, {"rank": t.session.rank, "score": float(score)})
            scheduler.step(sum(each["score"] * (1 + each["rank"]) for each in everybody))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@habit("a validation of each rank's own after the body, `eval()` and `train()`", differs=DRAWS)
def validation_of_ones_own(t: Trial) -> dict[str, Any]:
    model = ddp(mlp(1, 8, 1, torch.nn.LayerNorm(16), torch.nn.Dropout(0.2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        if step.number % 2:
            model.eval()
            with torch.no_grad():
                x, y = batch(5)
                mse(model.module(x), y)
            model.train()
    return {"model": model, "optimizer": optimizer}


@habit("early stopping by counters in a protected object, after a step that has happened")
def early_stopping_protected(t: Trial) -> dict[str, Any]:
    class Patience:
        def __init__(self) -> None:
            self.best, self.bad = 1e9, 0

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.best, "bad": self.bad}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.best, self.bad = state["best"], state["bad"]

    model, patience = ddp(mlp()), Patience()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer, patience=patience)
    for step in t.steps(until=40):
        with step as (x, y):
            loss = mse(model(x), y)
            torch.distributed.all_reduce(shared := loss.detach().clone())
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            patience.bad = 0 if float(shared) < patience.best else patience.bad + 1
            patience.best = min(patience.best, float(shared))
        if step.committed and patience.bad > 3 and step.number >= t.until - 1:
            break
    return {"model": model, "optimizer": optimizer, "patience": patience}


@habit("early stopping by the step's number, unguarded")
def early_stopping_unguarded(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for step in t.steps(until=40):
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        if step.number >= t.until - 2:
            break
    return {"model": model, "optimizer": optimizer}


@habit("early stopping by local counters")
def early_stopping_local(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    seen = 0
    for step in t.steps(until=40):
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        if step.committed:
            seen += 1
        if seen >= t.until:
            break
    return {"model": model, "optimizer": optimizer}


@habit("the best checkpoint is saved by rank 0, asked late (`session.is_main`)")
def best_checkpoint(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    best = t.folder / "best.pt"
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        if step.committed and t.session.is_main:
            torch.save(copy.deepcopy(model.module.state_dict()), best)
    return {"model": model, "optimizer": optimizer}


@habit("rank asked once at the top, checkpoints and logs by who was rank 0 then")
def rank_asked_at_the_top(t: Trial) -> dict[str, Any]:
    main = torch.distributed.get_rank() == 0
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    saved: Path = t.folder / "last.pt"
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        if main and step.committed:
            torch.save({"step": step.number, "model": model.module.state_dict()}, saved)
    torch.distributed.barrier()
    return {"model": model, "optimizer": optimizer, "saved": torch.load(saved, weights_only=False)}


@habit("data and numbers by a rank that was asked at the top", fixed=BATCHES_OF_A_RANK)
def rank_decides_the_data(t: Trial) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for step in t.steps(lambda number: batch(1000 * number + rank)):
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit("a log file that rank 0 opens at the top (`open(...) if is_main else None`)")
def log_file_of_rank_0(t: Trial) -> dict[str, Any]:
    log = open(t.folder / "train.log", "a") if t.session.is_main else None  # noqa: SIM115 - as its author would
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        if t.session.is_main and step.committed:
            assert log is not None
            log.write(f"{step.number} {float(loss)}\n")
            log.flush()
    return {"model": model, "optimizer": optimizer}


@habit("`tqdm` around the steps, with a postfix")
def progress_bar(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    bar = tqdm(t.steps(), total=t.until, disable=t.session.rank != 0)
    for step in bar:
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        bar.set_postfix(loss=float(loss))
    return {"model": model, "optimizer": optimizer}


@habit(
    "`enumerate(steps)` as the number of the step",
    refused="enumerate(...) counts what session.steps gives",
    instead="`step.number`: a newcomer starts in the middle",
)
def enumerated_steps(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for number, step in enumerate(t.steps()):
        with step as (x, y):
            loss = mse(model(x), y) / (1 + number)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit(
    "`zip(rates, steps)`: a schedule beside the steps",
    refused="zip(...) counts what session.steps gives",
    instead="`rates[step.number]`",
)
def zipped_steps(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    rates = [5e-2 * 0.9**n for n in range(100)]
    for step, rate in zip(t.steps(), rates, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model}


@habit(
    "a local count of samples decides the loss's weight",
    instead="protect the count where it must outlast `--resume`",
    differs="a rank counts the samples of its own part of the batch",
)
def local_count(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    samples = 0
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y) / (1 + samples)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            samples += len(x)
    return {"model": model, "optimizer": optimizer}


def protected(session: Any, net: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Its replica by DDP and its optimizer."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = ddp(net)
    session.protect(model, optimizer)
    return model, optimizer


@habit(
    "folds by `map`",
    refused="session.steps is called by map",
    instead="`for training in session.trainings(names):` ([trainings](trainings.md))",
)
def folds_by_map(t: Trial) -> dict[str, Any]:
    session, net = t.session, mlp()
    model, optimizer = protected(session, net)

    def fold(number: int) -> int:
        for step in session.steps(t.batch, until=3):
            with step as (inputs, targets):
                backward(mse(model(inputs), targets))
                optimizer.step()
        return number

    return {"folds": list(map(fold, range(2))), "model": net}


@habit(
    "pretraining, and behind it a second loop in the same script",
    refused="session.steps is followed by another training",
    instead='`for training in session.trainings(["pretrain", "tune"]):`, or one loop whose body looks at `step.number`',
)
def one_loop_behind_another(t: Trial) -> dict[str, Any]:
    session, net = t.session, mlp()
    model, optimizer = protected(session, net)
    for step in session.steps(t.batch, until=3):
        with step as (inputs, targets):
            backward(mse(model(inputs), targets))
            optimizer.step()
    for step in session.steps(t.batch, until=6):
        with step as (inputs, targets):
            backward(mse(model(inputs), 2 * targets))
            optimizer.step()
    return {"model": net}

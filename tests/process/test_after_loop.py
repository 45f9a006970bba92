"""Code behind the loop goes through the death of any rank, and comes to the same result."""

import functools
import json
import signal
from collections.abc import Callable, Iterator

import pytest
from tests.process.launching import Site, site

WORLD = 3
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
import regrow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

how, out, kills = sys.argv[1:]
KILLS = [(int(rank), place) for rank, _, place in (kill.partition("@") for kill in kills.split(",") if kill)]
torch.set_num_threads(1)
session = regrow.init(seed=3)
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
session.protect(model, optimizer, scheduler)
LENGTH, EPOCHS = 3, 2


def at(place):
    if (session.rank, place) in KILLS:
        try:
            os.close(os.open(f"{out}.{session.rank}.{place}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(97 * step + session.rank))


def update(step):
    with step as x:
        loss = model(x).square().mean()
        step.log(loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def score(marked):
    model.eval()
    with torch.no_grad():
        total = model(torch.full((2, 8), 0.1 + session.rank)).sum() + torch.rand(())
    at(f"{marked} before")
    dist.all_reduce(total)
    at(f"{marked} after")
    return total.item()


evaluate = regrow.restartable(score)
best, told = float("inf"), []
if how == "epochs":
    for epoch in session.epochs(batch, EPOCHS, length=LENGTH):
        for step in epoch:
            update(step)
        scheduler.step()
        best = min(best, evaluate("epoch"))
elif how == "broken":
    for step in session.steps(batch, until=1000):
        update(step)
        best = min(best, evaluate("epoch"))
        if step.number + 1 == LENGTH * EPOCHS:
            break
else:
    for step in session.steps(batch, until=LENGTH * EPOCHS):
        update(step)
        if how == "guarded":
            scheduler.step()
at("behind")
told.append(evaluate("first"))
at("between")
total = torch.tensor([session.rank + 1.0])
dist.all_reduce(total)
at("alone")
told += [total.item(), evaluate("last")]
if session.rank == 0:
    at("save")
    Path(f"{out}.weights").write_text(session.digest())
if how == "left":
    at("leaving")
    dist.destroy_process_group()
final = {"told": told, "digest": session.digest(), "rate": scheduler.get_last_lr(), "best": best}
Path(f"{out}.{session.rank}.new").write_text(json.dumps(final))
os.replace(f"{out}.{session.rank}.new", f"{out}.{session.rank}.json")
if how != "left":
    at("end")
if how == "raises" and session.rank == 1:
    raise RuntimeError("what the script does last is wrong")
if how == "exits" and session.rank == 1:
    sys.exit(3)
if how == "gone" and session.rank == 1:
    os._exit(0)
if how == "thread" and session.rank == 1:
    import threading, time

    threading.Thread(target=time.sleep, args=(1000,), name="upload").start()
    threading.Timer(0.5, print, ("all is done but a thread",)).start()
if how == "torn" and session.rank == 1:  # when Python is taken down, behind its exit handlers, as drivers do

    class Torn:
        def write(self, text): ...

        def flush(self):
            os.abort()

    sys.stdout = Torn()
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("after")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, how: str, *kills: str, flags: tuple[str, ...] = ()) -> tuple[int, str, list[object]]:
    words = ("run", "--nproc-per-node", str(WORLD), "--job", name, *flags)
    done = here.regrow(*words, here.script(SCRIPT), how, name, ",".join(kills))
    finals = [here.folder / f"{name}.{rank}.json" for rank in range(WORLD)]
    found: list[object] = [json.loads(path.read_text()) for path in finals if path.exists()]
    weights = here.folder / f"{name}.weights"
    return done.returncode, done.stdout + done.stderr, [*found, weights.read_text() if weights.exists() else ""]


@pytest.fixture(scope="module")
def calm(here: Site) -> Callable[[str], list[object]]:
    """Result of the undisturbed run, run when it is asked for first."""

    @functools.cache
    def of(how: str) -> list[object]:
        code, output, found = run(here, f"calm-{how}", how)
        assert code == 0, output
        assert len(found) == WORLD + 1
        return found

    return of


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("how", "kills"),
    [
        pytest.param("steps", ["0@first before", "1@first after"], marks=FULL),
        pytest.param("steps", ["2@between", "0@alone"], marks=FULL),
        ("steps", ["1@last before", "0@save"]),
        pytest.param("steps", ["0@last after", "0@end", "2@end"], marks=FULL),
        pytest.param("epochs", ["1@first before", "0@last before"], marks=FULL),
        pytest.param("epochs", ["0@epoch before", "2@between", "0@save"], marks=FULL),
        ("epochs", ["1@behind", "0@alone"]),
        pytest.param("broken", ["0@behind", "1@first before", "0@last after"], marks=FULL),
        pytest.param("broken", ["1@between", "0@save", "2@end"], marks=FULL),
        pytest.param("guarded", ["0@first before", "1@end"], marks=FULL),
        pytest.param("left", ["0@first before", "1@leaving", "0@leaving"], marks=FULL),
    ],
)
def test_what_stands_behind_the_loop_goes_through_kills(
    here: Site, calm: Callable[[str], list[object]], how: str, kills: list[str]
) -> None:
    name = f"{how}-" + "-".join(kills).replace(" ", "").replace("@", "")
    code, output, found = run(here, name, how, *kills)
    assert code == 0, output
    for kill in kills:
        assert (here.folder / f"{name}.{kill.replace('@', '.')}").exists(), f"{kill} did not happen"
    assert found == calm(how)


def test_an_error_behind_the_loop_ends_the_job_and_is_told_first_and_whole(here: Site) -> None:
    code, output, _ = run(here, "raises", "raises")
    assert code == 1
    assert "RuntimeError: what the script does last is wrong" in output
    assert "Traceback" in output
    assert "incident" not in output, "an error of the script's own is no fault"


@pytest.mark.full
def test_an_error_behind_the_loop_is_told_after_kills_there_too(here: Site) -> None:
    code, output, _ = run(here, "raises-killed", "raises", "1@first before", "0@end")
    assert code == 1
    assert "RuntimeError: what the script does last is wrong" in output


@pytest.mark.full
def test_a_script_that_ends_itself_with_a_code_ends_the_job(here: Site) -> None:
    code, output, _ = run(here, "exits", "exits")
    assert code == 1
    assert "rank 1 exited with code 3 in the code after its last step" in output


@pytest.mark.full
def test_nobody_waits_for_a_rank_whose_process_has_ended_well(here: Site) -> None:
    code, output, found = run(here, "gone", "gone")
    assert code == 0, output
    assert len(found) == WORLD + 1


def test_a_process_that_dies_while_it_is_taken_down_ends_nothing(here: Site) -> None:
    code, output, found = run(here, "torn", "torn")
    assert code == 0, output
    assert "rank 1 was ended by SIGABRT when its script and all its exit handlers had ended" in output
    assert len(found) == WORLD + 1


@pytest.mark.full
def test_a_stop_while_a_thread_alone_keeps_a_finished_job_is_no_failure(here: Site) -> None:
    words = ("run", "--nproc-per-node", str(WORLD), "--job", "thread", "--drain-grace", "8s", here.script(SCRIPT))
    with here.start(*words, "thread", "thread", "") as job:
        job.wait_for("all is done but a thread")
        job.signal(signal.SIGTERM)
        assert job.wait() == 0, job.output
    assert len(list(here.folder.glob("thread.?.json"))) == WORLD

"""With `--no-script-rewrite` a script's frames stay as they are: kills are survived, and what needs more is refused."""

import json
from pathlib import Path

import pytest
from tests.process.launching import Site
from tests.process.training import Fault

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
import regrow
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from regrow.core.process import rewriting

how, out = sys.argv[1:]


def named(name):
    function = getattr(rewriting, name)

    def call(*args, **kwargs):
        with open(f"{out}.{os.getpid()}.called", "a") as file:
            file.write(name)
        return function(*args, **kwargs)

    return call


# Where they are defined, and where they were imported to.
functions = [name for name, each in vars(rewriting).items() if getattr(each, "__module__", "") == rewriting.__name__]
for name in functions:
    if name[0] != "_" and not isinstance(getattr(rewriting, name), type):
        given = getattr(rewriting, name)
        for module in [each for each in list(sys.modules.values()) if getattr(each, name, None) is given]:
            if module is not rewriting:
                setattr(module, name, named(name))
if type(os.environ) is not os._Environ:
    Path(f"{out}.{os.getpid()}.called").write_text("watch_environment, before the script")
torch.set_num_threads(1)
session = regrow.init(seed=3)
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(net, bucket_cap_mb=0.0001)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Meter:
    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


meter = Meter()
session.protect(model, optimizer, meter=meter)


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(97 * step + session.rank))


def train_step(step):
    loss = None
    with step as x:
        loss = model(x).square().mean() * (1 + meter.seen / 100)
        step.log(loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.seen += 1
    return loss


def clean():
    for step in session.steps(batch, until=12):
        shown = float(step.number)
        loss = train_step(step)
        if step.committed and step.number == 9:
            shown += loss.item()
            break


def counts():
    seen = 0
    for step in session.steps(batch, until=12):
        loss = train_step(step)
        seen += 1
    print(seen)


def late():
    best = 0.0
    for step in session.steps(batch, until=12):
        loss = train_step(step)
        if step.number == 3:
            best = loss.item()
    print(f"the best was {best}")


def leaves():
    for step in session.steps(batch, until=12):
        train_step(step)
        if step.number == 9:
            break


globals()[how]()
Path(f"{out}.{session.rank}.json").write_text(json.dumps({"digest": session.digest(), "seen": meter.seen}))
"""
RUN = ("run", "--nproc-per-node", "2", "--standby", "1")
FAULTS = [Fault(1, 4, "reduce"), Fault(0, 9)]
SWITCH = "--no-script-rewrite"


def finals(here: Site, name: str) -> list[dict[str, object]]:
    return [json.loads(Path(here.folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]


def test_a_script_whose_state_is_protected_comes_through_kills_without_a_change_of_its_frames(here: Site) -> None:
    script = here.script(SCRIPT)
    calm = here.regrow(*RUN, "--job", "calm", script, "clean", "calm")
    assert calm.returncode == 0, calm.stderr
    (here.folder / "plan.toml").write_text("".join(each.toml() for each in FAULTS))
    struck = here.regrow(*RUN, SWITCH, "--job", "struck", "--fault-plan", "plan.toml", script, "clean", "struck")
    assert struck.returncode == 0, struck.stdout + struck.stderr
    assert finals(here, "struck") == finals(here, "calm")
    assert not list(here.folder.glob("struck.*.called"))


def test_what_a_body_carries_and_a_loop_that_may_be_left_are_refused_by_name_before_step_0(here: Site) -> None:
    script = here.script(SCRIPT)
    for how, names in (("counts", "`seen` of counts (__main__)"), ("leaves", "the loop whose body begins in line")):
        done = here.regrow(*RUN, SWITCH, "--job", how, script, how, how)
        assert done.returncode not in (0, 76), done.stdout
        assert names in done.stderr + done.stdout, done.stdout + done.stderr
        assert SWITCH in done.stderr + done.stdout
        assert not list(here.folder.glob(f"{how}.*.json"))


@pytest.mark.full
def test_without_the_switch_the_same_kills_have_that_file_called(here: Site) -> None:
    script = here.script(SCRIPT)
    (here.folder / "plan.toml").write_text("".join(each.toml() for each in FAULTS))
    struck = here.regrow(*RUN, "--job", "usual", "--fault-plan", "plan.toml", script, "clean", "usual")
    assert struck.returncode == 0, struck.stdout + struck.stderr
    called = "".join(each.read_text() for each in here.folder.glob("usual.*.called"))
    assert "unwatch_environment" in called, "in each newcomer; whether a body is cut off is a matter of moments"


@pytest.mark.full
def test_what_appears_only_later_is_told_and_the_job_does_not_end_with_0(here: Site) -> None:
    script = here.script(SCRIPT)
    (here.folder / "plan.toml").write_text(Fault(1, 8).toml())
    done = here.regrow(*RUN, SWITCH, "--job", "late", "--fault-plan", "plan.toml", script, "late", "late")
    assert done.returncode == 76, done.stdout + done.stderr
    assert "`best` of late (__main__) is not put back" in done.stdout + done.stderr

"""DDP where scripts have it: found, kept alike on all ranks, run again; or refused in a sentence."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.process.comm_world import Seat, play
from tests.process.launching import Site
from tests.process.training import SCRIPTS, Fault, assert_equal, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from regrow.comm.groups import Groups
from regrow.core.errors import UsageError
from regrow.train.gradients.wrappers import Modules

STEPS = 10
FAULTS = [Fault(1, 3, "reduce"), Fault(2, 5, "forward"), Fault(0, 7, "update")]


def test_ddp_below_compile_inside_a_module_and_made_after_protect_recovers(here: Site) -> None:
    calm = train(here, "calm", steps=STEPS, script="train_wrapped.py")
    struck = train(here, "struck", steps=STEPS, faults=FAULTS, script="train_wrapped.py")
    assert_equal(struck, calm, faults=len(FAULTS))
    assert len({str(final["digest"]) for final in calm.finals.values()}) == 1


def test_it_runs_alone_under_plain_python_too(here: Site) -> None:
    out = here.folder / "alone.out"
    words = [sys.executable, str(SCRIPTS / "train_wrapped.py"), "--steps", "3", "--out", str(out)]
    done = subprocess.run(words, env=here.environment(), capture_output=True, text=True, timeout=here.patience)
    assert done.returncode == 0, done.stderr
    assert out.with_suffix(".0.json").exists()


class Kept:
    """A hook's state that a script can protect."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _counting(state: Any, bucket: Any) -> Any:
    if state is not None:
        state.count += 1
    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]


_counting.__annotations__.clear()


def rehearsed(_: Seat) -> dict[str, str]:
    """Messages about DDP modules by the end of the rehearsal, with echo groups around."""
    groups, said = Groups(), {}
    groups.install(rank=0, world=2, formation=None, form_s=1.0)

    def ask(name: str, *, hook: Any = None, state: Any = None, protect_state: bool = False, **options: Any) -> None:
        net = nn.Linear(64, 64)
        try:
            modules = Modules([net, *([state] if protect_state else [])], recovers=True)
            ddp = DistributedDataParallel(net, **options)
            if hook is not None:
                ddp.register_comm_hook(state, hook)
            modules.complete()
            assert [found is ddp for found in modules.replicated] == [True]
            with groups.echo():
                ddp(torch.ones(2, 64)).sum().backward()
                modules.settle(all_of_them=True)
            modules.check_hooks()
            assert modules.buckets()
            said[name] = "taken"
        except UsageError as error:
            said[name] = str(error)

    power = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    ask("plain")
    ask("static graph", static_graph=True)
    ask("compressed", hook=default_hooks.fp16_compress_hook)
    ask("power", hook=powerSGD_hook.powerSGD_hook, state=power)
    ask("counting", hook=_counting, state=Kept())
    ask("counting, protected", hook=_counting, state=Kept(), protect_state=True)
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found: dict[str, str] = play(1, tmp_path_factory.mktemp("ddp"), rehearsed)[0]
    return found


@pytest.mark.parametrize("name", ["plain", "compressed", "counting, protected"])
def test_what_keeps_no_state_of_its_own_is_taken(said: dict[str, str], name: str) -> None:
    assert said[name] == "taken"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("static graph", "DDP(static_graph=True) cannot run a step again"),
        ("power", "the communication hook powerSGD_hook of DDP keeps a state that every step changes"),
        ("counting", "not protected: a Kept (use a hook without one, or give the state state_dict()"),
    ],
)
def test_what_could_not_run_again_is_refused_before_the_first_step(
    said: dict[str, str], name: str, sentence: str
) -> None:
    assert sentence in said[name]

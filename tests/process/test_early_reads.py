"""A script that asks for its rank before its loop is right after a fault too; one that asks late gets a standby."""

from pathlib import Path

from tests.process.elastic import Elastic
from tests.process.launching import Site
from tests.process.training import Fault

from regrow.observe.ledger import Ledger, read_records

SCRIPT = """
import os, sys, time
with open(sys.argv[2] + ".imports", "a") as file:
    file.write(f"{'hypothesis' in sys.modules}\\n")
import hypothesis
import torch
from torch.nn.parallel import DistributedDataParallel
import regrow

how, out, steps, holds = sys.argv[1], sys.argv[2], int(sys.argv[3]), [int(number) for number in sys.argv[4:]]
session = regrow.init(seed=1)
torch.set_num_threads(1)
ask = {
    "environment": lambda: int(os.environ["RANK"]),
    "late": lambda: None,
}
main = ask[how]() == 0
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
session.protect(model, optimizer)
log = open(out, "a") if main else None
for step in session.steps(lambda number: torch.arange(8.0).add(number).sin(), until=steps):
    with step as batch:
        if step.number in holds and not step.rehearsal:
            print(f"waits in step {step.number}", flush=True)
            while not os.path.exists(f"{out}.{step.number}"):
                time.sleep(0.005)
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if how == "late" and session.is_main and step.committed:
        log = log or open(out, "a")
    if log is not None and step.committed:
        log.write(f"{step.number} {loss.item()!r}\\n")
        log.flush()
"""
STEPS = 36


def trained(site: Site, how: str, faults: list[Fault]) -> tuple[list[str], Ledger, str]:
    """Lines of the main rank, the records, and the output. Before each fault a standby is waited for."""
    name = f"{how}-{len(faults)}"
    out, words = site.folder / f"{name}.log", ["run", "--job", name, "--nproc-per-node", "2", "--standby", "1"]
    if faults:
        plan = site.folder / f"{name}.toml"
        plan.write_text("\n".join(fault.toml() for fault in faults))
        words += ["--fault-plan", str(plan)]
    holds = [fault.step - 1 for fault in faults]
    with site.start(*words, site.script(SCRIPT), how, str(out), str(STEPS), *map(str, holds)) as started:
        job = Elastic(site, name, started)
        for step in holds:
            started.wait_for(f"waits in step {step}\n", times=2)
            job.standby("idle" if how == "environment" else "ready")
            Path(f"{out}.{step}").touch()
        assert started.wait() == 0, started.output
    return out.read_text().splitlines(), Ledger(read_records(site.home / "jobs" / name)), started.output


def test_what_a_script_does_on_rank_0_goes_on_whenever_it_asks_whether_it_is_that(here: Site) -> None:
    undisturbed, _, said = trained(here, "late", [])
    assert len(undisturbed) == STEPS
    assert "reads its rank" not in said
    kills = [Fault(0, 18), Fault(0, 30)]
    for how in ("environment", "late"):
        lines, ledger, said = trained(here, how, kills)
        assert len(ledger.injected) == 2, said
        assert lines == undisturbed, how
        assert ("reads its rank before its loop" in said) == (how != "late"), said
        assert said.count("reads its rank") <= 1
        if how == "late":
            assert "standby" in {incident.rung for incident in ledger.incidents}
        else:
            assert "train.py:" in said
            # The ranks and the standby that is not used import for themselves; who waits has done it when it is seated.
            imports = (here.folder / f"{how}-2.log.imports").read_text().split()
            assert imports == ["False"] * 3 + ["True"] * 2

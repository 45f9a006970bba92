"""A small training with everything that must survive: dropout, running statistics, AdamW's lazy state, a scheduler."""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import holding_lock  # type: ignore[import-not-found]  # beside this script
import torch
from failing import fail_newcomers  # type: ignore[import-not-found]
from falling_behind import Standstill, WaitsOfSteps  # type: ignore[import-not-found]
from pacing import pause  # type: ignore[import-not-found]
from placing import DEVICE, break_device, group_options, spoil, take_place  # type: ignore[import-not-found]
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path)
parser.add_argument("--failing", type=int, default=0, help="so many newcomers fail as they build; -1: all")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--log-after", action="store_true", help="log after the step's body instead of in it")
parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in every step")
parser.add_argument("--pace", type=float, default=0.0, help="see pacing.py")
parser.add_argument("--hold", nargs="*", default=[], metavar="STEP:FILE", help="wait in that step for the file")
parser.add_argument("--say-steps", action="store_true")
parser.add_argument("--stand-still", nargs="*", default=[], metavar="RANK:STEP", help="see falling_behind.py")
parser.add_argument("--go-on", action="store_true", help="at the next body the device goes on")
parser.add_argument("--count-waits", action="store_true", help="how often each step waits for the device")
parser.add_argument("--spoil", default="", metavar="RANK:STEP", help="a bit of that rank's optimizer state flips, once")
parser.add_argument("--drift", action="store_true", help="every rank changes its parameters in a way of its own")
parser.add_argument("--own-buffers", action="store_true", help="every rank has running statistics of its own")
parser.add_argument(
    "--nan", default="::", metavar="RANK:STEP:HOW", help="that rank's loss is NaN, or part of a gradient"
)
parser.add_argument(
    "--break-device", default="", metavar="RANK:STEP:WHERE", help="`body` or `after` it, once; or `always` in it"
)
parser.add_argument("--spoil-groups", default="::", metavar="RANK:STEP:HOW", help="see placing.py; once")
parser.add_argument("--capture", action="store_true", help="that reduction is recorded in a graph")
parser.add_argument("--also-reduce", action="store_true", help="a reduction of the script's own in each step")
parser.add_argument("--skip", default="", metavar="RANK:STEP:TIMES", help="that rank skips it")
parser.add_argument("--own-groups", action="store_true", help="one of gloo and one with options, used in each step")
parser.add_argument("--launch-holding", type=int, default=0, metavar="TIMES", help="in each step, see holding_lock.py")
parser.add_argument(
    "--die-behind", default="", metavar="RANK:STEP", help="as another rank launches, see holding_lock.py"
)
args = parser.parse_args()

session = regrow.init(seed=3)
fail_newcomers(session, args.failing, args.out)
take_place(lambda: session.local_rank)
first = nn.Linear(16, args.width)
net = nn.Sequential(first, nn.BatchNorm1d(args.width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(args.width, 1)).to(DEVICE)
# Small buckets: several reductions a step, so that a fault can strike between them.
model = DistributedDataParallel(net, bucket_cap_mb=0.002, broadcast_buffers=not args.own_buffers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
session.protect(model, optimizer, scheduler)
own_groups = []
if args.own_groups:
    own_groups = [torch.distributed.new_group(backend="gloo"), torch.distributed.new_group(pg_options="urgent")]
standstill = Standstill(args.stand_still, until_next=args.go_on)
waits = WaitsOfSteps() if args.count_waits else None

numbers = torch.Generator().manual_seed(5)
inputs = torch.randn(240, 16, generator=numbers)
targets = inputs.sum(1, keepdim=True).sin()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=6, shuffle=True)

unspoiled = True
nan_rank, nan_step, nan_how = args.nan.split(":")


def strikes(number: int, *how: str) -> bool:
    """True if a number of this rank is to be spoilt now; `always`, or once in the job."""
    if args.nan == "::" or (session.rank, number) != (int(nan_rank), int(nan_step)) or nan_how not in how:
        return False
    struck = nan_how != "always" and Path("struck").exists()
    Path("struck").touch()
    return not struck


def breaks(number: int, where: str) -> bool:
    """True if this rank's device is to fail now, once in the job."""
    if args.break_device == f"{session.rank}:{number}:always":
        return where == "body"
    if args.break_device != f"{session.rank}:{number}:{where}" or Path(f"broken-{where}").exists():
        return False
    Path(f"broken-{where}").touch()
    return True


def first_times(name: str, most: int) -> bool:
    """True if this has happened less than `most` times in the job; it counts as once more."""
    made = (Path(f"{name}.{count}") for count in range(most))  # not in an undisturbed run of the same words after it
    next_one = next((each for each in made if not each.exists()), None)
    if next_one is not None:
        next_one.touch()
    return next_one is not None


def reduce_also(number: int) -> None:
    """A reduction of another size than all others."""
    if not args.also_reduce:
        return
    rank, at, most = (int(each) for each in (args.skip or "-1:0:0").split(":"))
    if (session.rank, number) == (rank, at) and first_times(f"skipped-{args.skip}", most):
        return
    with torch.get_device_module(DEVICE).capture() if args.capture else nullcontext():
        torch.distributed.all_reduce(torch.ones(3, device=DEVICE))


def use_own_groups(number: int) -> None:
    """Sums over groups of the script's own; that of gloo is of the processor's tensors."""
    for group, device in zip(own_groups, ("cpu", DEVICE), strict=False):
        total = torch.full((3,), float(session.rank + number), device=device)
        torch.distributed.all_reduce(total, group=group)
        expected = float(sum(rank + number for rank in range(session.world_size)))
        if number >= 0 and total.tolist() != [expected] * 3:
            raise RuntimeError(f"a sum of rank {session.rank} in step {number} came to {total}, and not to {expected}")


def spoil_groups(number: int) -> None:
    rank, at, how = args.spoil_groups.split(":")
    if (str(session.rank), str(number)) == (rank, at) and first_times(f"spoilt-{args.spoil_groups}", 1):
        spoil(how)


def die_behind(number: int) -> None:
    if args.die_behind == f"{session.rank}:{number}" and first_times("dies-behind", 1):
        holding_lock.await_kill()


def launch_holding(number: int, *, rehearsal: bool) -> None:
    """Launches that keep the interpreter's lock; one of them may stand behind a sum that a dead rank never joins."""
    if args.launch_holding:
        rank, at = (int(each) for each in (args.die_behind or "-1:-1").split(":"))
        kills = not rehearsal and number == at and session.rank != rank and first_times("killed-behind", 1)
        holding_lock.launch(args.launch_holding, holding_lock.victim() if kills else 0)


holds = {int(number): name for number, name in (each.split(":") for each in args.hold)}
for step in session.steps(loader, until=args.steps):
    with step as (x, y):
        if args.stand_still:
            standstill.enters()
        if waits is not None and not step.rehearsal:
            waits.enters(step.number)
        while not step.rehearsal and step.number in holds and not Path(holds[step.number]).exists():
            time.sleep(0.005)
        time.sleep(0 if step.rehearsal else args.pause)
        pause(0.0 if step.rehearsal else args.pace, step.number, args.steps)
        loss = nn.functional.mse_loss(model(x.to(DEVICE)), y.to(DEVICE))
        if not step.rehearsal and strikes(step.number, "once", "always"):
            loss = loss * torch.nan
        if not step.rehearsal and strikes(step.number, "backward"):
            loss.register_hook(lambda gradient: gradient * torch.nan)  # type: ignore[no-untyped-call]
        if not step.rehearsal and breaks(step.number, "body"):
            break_device()
        if not step.rehearsal:
            spoil_groups(step.number)
            die_behind(step.number)
        reduce_also(-1 if step.rehearsal else step.number)
        use_own_groups(-1 if step.rehearsal else step.number)
        if not args.log_after:
            step.log(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        launch_holding(step.number, rehearsal=step.rehearsal)
        optimizer.step()
        if args.stand_still and not step.rehearsal:
            standstill.updated(session.rank, step.number, session.world_size)
        scheduler.step()
        optimizer.zero_grad()
        if args.spoil == f"{session.rank}:{step.number}" and unspoiled and not step.rehearsal:
            unspoiled = False
            optimizer.state[first.weight]["exp_avg"].view(torch.int32)[0, 0] ^= 1 << 20
        if args.drift:
            first.weight.data += 1e-3 * session.rank
    if args.stand_still and step.committed:
        standstill.committed(session.rank, step.number)
    if args.log_after:
        step.log(loss=loss)
    if not step.rehearsal and breaks(step.number, "after"):
        break_device()
    if args.say_steps and session.is_main and not step.rehearsal:
        sys.stdout.write(f"step {step.number}\n")

if waits is not None:
    waits.tell(session.rank)
if args.own_groups:
    found = {"backend": torch.distributed.get_backend(own_groups[0]), "options": group_options()}
    Path(f"groups.{session.rank}.json").write_text(json.dumps(found))
if args.out is not None:
    digest = {"digest": session.digest(), "lr": scheduler.get_last_lr()[0], "rank": session.rank}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(digest))

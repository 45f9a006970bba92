"""Run time of the simulator for 100,000 ranks, and its forecast of the goodput of a real job.

The real job is the demo's: a small GPT in four workers with a standby, three of which are killed. The cost of recovery
is measured in one run; from it alone the goodput of other runs, with kills at other times, is predicted.

python benchmarks/simulator.py [--quick] [--json FILE]
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from statistics import fmean

from targets import tell, warn_if_busy

from regrow.launch.demo import KILLS, STEPS, WORLD, fault_plan, find_script
from regrow.observe.tail import read_records
from regrow_lab.fleet.calibration import MeasuredRun, calibration_lines, measured
from regrow_lab.fleet.reading import decode_costs, decode_scenario
from regrow_lab.fleet.simulation import simulate

LARGE = Path(__file__).with_name("scenarios") / "hundred_thousand.toml"
_SEEDS = 200


def demo_run(home: Path, *, seed: int, steps: int = STEPS) -> MeasuredRun:
    """The disturbed half of the demo; returns its measurements. Raises `SystemExit` if it fails."""
    plan, job = home / f"faults-{seed}.toml", f"demo-{seed}"
    plan.write_text(fault_plan(steps=steps, seed=seed), encoding="utf-8")
    command = [sys.executable, "-m", "regrow", "run", "--standalone", f"--nproc-per-node={WORLD}", "--quiet"]
    command += ["--standby=1", "--warmth=built", f"--fault-plan={plan}", "--redirects=3", f"--job={job}"]
    command += [str(find_script()), f"--steps={steps}", "--seed=0"]
    done = subprocess.run(command, env={**os.environ, "REGROW_HOME": str(home)}, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"the demo's training ended with {done.returncode}")
    return measured(read_records(home / "jobs" / job), job)


def foretold(run: MeasuredRun, *, steps: int = STEPS, faults: int = KILLS) -> float:
    """Predicted goodput of `steps` steps and `faults` faults, with the costs of a measured run."""
    costs = decode_costs(
        tomllib.loads("\n".join(calibration_lines([("a run", run)], of="regrow"))), place="calibration"
    )
    work = steps * run.step
    # Each rank is a replica, and the smallest replica of a scenario is a node: so each rank has a node.
    kills = {"kind": "kill", "per_node_hour": faults / WORLD / (work / 3600)}
    scenario = decode_scenario(
        {
            "job": {"work": work, "step": run.step, "ranks_per_node": 1, "overhead": run.overhead},
            "hardware": [{"nodes": WORLD, "faults": [kills]}],
            "policy": [{"name": "demo", "recovers": "regrow", "standbys": 1}],
        },
        place="the demo",
        costs=costs,
    )
    return fmean(simulate(scenario, scenario.policy[0], seed).goodput for seed in range(_SEEDS))


def large() -> dict[str, float]:
    """Run all policies of the large scenario, by its command. Raises `SystemExit` if it fails."""
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "regrow", "sim", "run", str(LARGE)], check=False)
    if done.returncode:
        raise SystemExit(f"the simulation ended with {done.returncode}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {"large_s": time.monotonic() - begun, "large_mib": peak}


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs of the demo instead of four")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    words = parser.parse_args()
    warn_if_busy()
    figures = large()
    with tempfile.TemporaryDirectory(prefix="regrow-simulator-") as folder:
        runs = [demo_run(Path(folder), seed=seed) for seed in range(2 if words.quick else 4)]
    wrong = []
    for number, (known, unknown) in enumerate(zip(runs, [*runs[1:], runs[0]], strict=True)):
        expected = foretold(known)
        wrong.append(abs(expected / unknown.goodput - 1))
        print(
            f"run {number}: goodput of the next {100 * expected:.1f} % foretold, {100 * unknown.goodput:.1f} % measured"
        )
    tell("simulator", figures | {"demo_error_most": max(wrong)}, words.json, cores=os.cpu_count())


if __name__ == "__main__":
    main()

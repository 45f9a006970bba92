"""Time until a job submitted to Slurm trains: from `regrow slurm submit` to the first committed step.

    python benchmarks/slurm_submit.py --json out.json
    python benchmarks/slurm_submit.py --quick                 # one round

A real Slurm between network namespaces of this machine, as in `tests/slurm` (needs root, and slurm-wlm and munge, which
`REGROW_TEST_INSTALL=1` installs). A gang of two replicas on two idle nodes. `submit_to_first_step_whole_s` is the total
time, `own_start_s` that of the same script in plain Python to the end of its first step, measured before each round,
`submit_to_first_step_s` the difference. Each is the median of the rounds.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from own_start import beyond, own_start
from targets import tell, warn_if_busy
from tests.slurm.jobs import slurm_job
from tests.slurm.rig import SlurmCluster, slurm_cluster

STEPS = 20
NODES = 2


def _round(cluster: SlurmCluster, folder: Path) -> float:
    """Run one job from its submission to its end; returns the seconds to its first step."""
    with slurm_job(cluster, folder) as job:
        gang = job.submit(steps=STEPS, pace=0.0)
        cluster.until(lambda: job.ledger(gang).commits or None, "the first step")
        took = time.monotonic() - job.submitted_at
        job.finish(gang)
    return took


def _measure(rounds: int) -> dict[str, float]:
    whole, own = [], []
    with slurm_cluster(NODES) as cluster, tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            here = Path(folder) / f"round{number}"
            here.mkdir()
            own.append(own_start(here))
            whole.append(_round(cluster, here))
    return beyond("submit_to_first_step", whole, own)


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    try:
        figures = _measure(1 if args.quick else 5)
    except pytest.skip.Exception as reason:
        print(f"nothing was measured: {reason}")
        return 1
    print(", ".join(f"{name}: {value:.3g}" for name, value in figures.items()))
    tell("slurm_submit", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

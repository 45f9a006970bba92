"""The example in the documentation does what it says: it is scaled while it trains, and nothing comes out different."""

import json
import subprocess
import sys
from pathlib import Path

from tests.process.elastic import HURRY
from tests.process.launching import PATIENCE, site
from tests.process.training import SCRIPTS

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "07-elastic.py")
STEPS = "40"
WORDS = ("--steps", STEPS, "--microbatches", "4", "--batch-size", "2", "--megabytes", "0.2", "--invariant")


def test_a_run_that_was_scaled_ends_as_the_one_alone_and_its_plot_shows_it(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        run = ("run", "--nproc-per-node", "1", "--replicas", "1:2", "--job", "scaled")
        paced = (str(SCRIPTS / "paced.py"), "0.3", STEPS, EXAMPLE)
        with here.start(*run, *paced, *WORDS, "--out", "scaled.json") as job:
            job.wait_for("step 0: loss")
            asked = here.regrow("scale", "--replicas", "2", "scaled")
            assert asked.returncode == 0, asked.stderr
            job.wait_for("grow: 1 replicas before, 2 now")
            asked = here.regrow("scale", "--replicas", "1", "scaled")
            assert asked.returncode == 0, asked.stderr
            job.wait_for("shrink: 2 replicas before, 1 now")
            (tmp_path / HURRY).touch()
            assert job.wait() == 0, job.output
        here.assert_nothing_left()

        plotted = here.regrow("plot", "scaled", "--out", str(tmp_path))
        assert plotted.returncode == 0, plotted.stderr
        drawn = (tmp_path / "plot.svg").read_text()
        for text in ("(replicas)", "(tokens/s)", f"{STEPS} steps in", ">grow, ", ">shrink, "):
            assert text in drawn, text

        command = [sys.executable, EXAMPLE, *WORDS, "--out", "alone.json"]
        alone = subprocess.run(
            command, cwd=tmp_path, env=here.environment(), capture_output=True, text=True, timeout=PATIENCE
        )
        assert alone.returncode == 0, alone.stderr
        assert json.loads((tmp_path / "scaled.json").read_text()) == json.loads((tmp_path / "alone.json").read_text())

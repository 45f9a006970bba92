"""`regrow plot` draws a job that really ran: by its name and from its folder."""

import re
from pathlib import Path

from tests.process.launching import site
from tests.process.training import Fault, train

from regrow.observe.story import seconds


def test_a_job_that_lost_a_worker_is_drawn_with_its_fault(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        done = train(here, "drawn", world=2, steps=12, faults=[Fault(rank=1, step=6)])
        assert done.code == 0, done.output
        (incident,) = done.ledger.incidents
        folder = here.home / "jobs" / "drawn"

        plotted = here.regrow("plot", "drawn")
        assert plotted.returncode == 0, plotted.stderr
        assert plotted.stdout.splitlines() == [str(folder / "plot.png"), str(folder / "plot.svg")]
        assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
        words = re.sub(r"<[^>]+>", "\n", (folder / "plot.svg").read_text())
        for text in ("drawn", "12 steps in", "world size", "(ranks)", "throughput", "loss", "time since the start (s)"):
            assert text in words, f"no {text!r} in {words}"
        assert f"fault, {seconds(incident.total)}" in words

        elsewhere = here.regrow("plot", str(folder), "--x", "step", "--out", str(tmp_path / "by-step.svg"))
        assert (elsewhere.returncode, elsewhere.stdout) == (0, f"{tmp_path / 'by-step.svg'}\n"), elsewhere.stderr
        assert ">step<" in (tmp_path / "by-step.svg").read_text()

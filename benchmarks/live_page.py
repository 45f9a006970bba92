"""The live page in a browser: its drawing rate for 2,000 ranks, and screenshots while ranks of a job are killed.

A simulated job of 2,000 ranks reports commits all the time and has an incident every two seconds; the page gets more
updates than it should draw, and the drawn ones are counted. Then a job of four ranks is trained, and two of them are
killed: one by `regrow kill`, and one by the page itself, with its keyboard alone. Screenshots are taken before, during
and after each recovery, the first in light mode and the second in dark mode.

python benchmarks/live_page.py [--quick] [--json FILE] [--shots DIR] [--chromium PATH]
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from browser import NAMES, BrowserPage, chromium, find_chromium
from targets import tell, warn_if_busy

from regrow.core.ids import Generation, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.vocabulary import Role
from regrow.core.records import GenerationFormed, IncidentClosed, IncidentOpened, JobStarted, WorkerSpawned
from regrow.observe.watch.site import WatchSite

RANKS, PER_NODE = 2_000, 8
OFFERED_S = 0.02
"""Seconds between two updates that are offered to the page."""
TOLD_S = 0.2
"""Seconds between two reports of a node's newest commits, as agents send them."""
INCIDENT_S = 2.0
ROOT = Path(__file__).parents[1]
PATIENCE_S = 300.0
TRIES = 5
"""Number of tries, since a world may have recovered before its screenshot."""


# --- 2,000 ranks ---------------------------------------------------------------------------------------------------


async def simulate(site: WatchSite) -> None:
    """Run a job of 2,000 ranks until cancelled."""
    began = time.monotonic()
    workers = [WorkerId(f"w{rank}") for rank in range(RANKS)]
    site.feed(JobStarted(began, JobId("simulated"), RANKS, RANKS // PER_NODE, 0, ["train.py"]))
    for rank, worker in enumerate(workers):
        node = NodeId(f"node{rank // PER_NODE}")
        site.feed(WorkerSpawned(began, worker, node, Role.RANK, Rank(rank), Generation(1)))
    members = {str(rank): worker for rank, worker in enumerate(workers)}
    site.feed(GenerationFormed(began, Generation(1), StepNo(0), members))
    step, incidents = 0, 0
    while True:
        now = time.monotonic()
        if now - began > INCIDENT_S * (incidents + 1):
            incidents += 1
            place = (incidents, Generation(incidents), StepNo(step), "exit", [Rank(incidents % RANKS)], "simulated")
            site.feed(IncidentOpened(now, *place))
            await asyncio.sleep(0.3)
            site.feed(GenerationFormed(now, Generation(incidents + 1), StepNo(step), members))
            stages = (0.01, 0.02, 0.2, 0.07, 0.1, 0.4)
            site.feed(IncidentClosed(time.monotonic(), *place, "standby", 1, *stages, 0, 1 << 30, now, now))
        generation = Generation(incidents + 1)
        for number in range(RANKS // PER_NODE):
            commits = [
                facts.WorkerCommitted(
                    workers[rank], generation, StepNo(step), now, 0.15 + 0.0001 * (rank % 97), {"loss": 3 / (step + 1)}
                )
                for rank in range(number * PER_NODE, (number + 1) * PER_NODE)
            ]
            site.feed(facts.NodeProgress(NodeId(f"node{number}"), commits))
        step += 1
        await asyncio.sleep(TOLD_S)


async def count_drawings(page: BrowserPage, seconds: float, rounds: int, shots: Path) -> dict[str, float]:
    """Drawings a second of the page of 2,000 ranks, the median of the rounds and the least."""
    async with WatchSite("127.0.0.1", 0, say=print, every=OFFERED_S) as site:
        simulating = asyncio.create_task(simulate(site))
        try:
            await page.open(site.address, height=1400)
            await page.wait_for("state.drawn > 5 && state.snap.ranks.length === 2000")
            found = []
            for _ in range(rounds):
                drawn, since = await page.look("state.drawn"), time.monotonic()
                await asyncio.sleep(seconds)
                found.append((await page.look("state.drawn") - drawn) / (time.monotonic() - since))
            for scheme in ("light", "dark"):
                await page.use_scheme(scheme)
                await page.look("new Promise(requestAnimationFrame)")
                await page.screenshot(shots / f"2000-ranks-{scheme}.png")
            drawing = await page.look(
                "(() => { const t = performance.now(); drawAll(); return performance.now() - t })()"
            )
        finally:
            simulating.cancel()
            await asyncio.wait([simulating])
        return {"updates_per_s": median(found), "updates_per_s_least": min(found), "drawing_ms": drawing}


# --- four ranks ----------------------------------------------------------------------------------------------------


class TrainingJob:
    """`regrow run` of four ranks."""

    def __init__(self, process: asyncio.subprocess.Process, environment: dict[str, str], address: str) -> None:
        self._process, self._environment = process, environment
        self.address = address

    def regrow(self, *words: str) -> str:
        """Output of another regrow command for the job."""
        command = [sys.executable, "-m", "regrow", *words]
        done = subprocess.run(
            command, env=self._environment, check=True, capture_output=True, text=True, timeout=PATIENCE_S
        )
        return done.stdout.strip()


@asynccontextmanager
async def training() -> AsyncIterator[TrainingJob]:
    """A job that trains until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="regrow-live-") as home:
        environment = {**os.environ, "REGROW_HOME": home}
        words = ["run", "--job", "live-page", "--nproc-per-node", "4", "--watch", "0", "--no-health"]
        words += [str(ROOT / "examples" / "02-ddp.py"), "--steps", "1000000", "--batch-size", "1"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "regrow",
            *words,
            env=environment,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        draining = None
        try:
            address, said = "", b""
            while process.stderr is not None and not address and (line := await process.stderr.readline()):
                said += line
                address = found[1].decode() if (found := re.search(rb"live view (http://\S+/)", line)) else ""
            if not address:
                raise RuntimeError(f"the job did not start: {said.decode(errors='replace')}")
            draining = asyncio.create_task(process.stderr.read()) if process.stderr is not None else None
            yield TrainingJob(process, environment, address)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()
            if draining is not None:
                await draining


STATUS = "document.getElementById('status').dataset.is"
TRAINING = f"{STATUS} === 'training' && state.tick.states === 'tttt'"


async def shoot(page: BrowserPage, job: TrainingJob, shots: Path) -> dict[str, float]:
    """Take screenshots of both kills; returns figures on errors of the page."""
    await page.open(job.address)
    incidents = 0
    for scheme in ("light", "dark"):
        await page.use_scheme(scheme)
        await page.wait_for(
            f"state.snap && {TRAINING} && state.tick.step > 5 && !state.tick.incident", within=PATIENCE_S
        )
        await asyncio.sleep(3.0)  # collects some points for the curves
        await page.screenshot(shots / f"before-{scheme}.png")
        for _ in range(TRIES):
            if scheme == "light":
                await asyncio.to_thread(job.regrow, "kill", "live-page", "--rank", "1")
            else:
                await kill_by_keyboard(page, job, shots)
            incidents += 1
            await page.wait_for(f"{STATUS} === 'mending' || state.snap.incidents.length >= {incidents}")
            await page.screenshot(shots / f"during-{scheme}.png")
            still = await page.look(f"{STATUS} === 'mending'")
            await page.wait_for(
                f"state.snap.incidents.length >= {incidents} && !state.tick.incident && {TRAINING}", within=PATIENCE_S
            )
            if still:
                break
        else:
            raise RuntimeError(f"{TRIES} times the job was mended before its picture was taken")
        await asyncio.sleep(3.0)
        await page.screenshot(shots / f"after-{scheme}.png")
    told = await page.look("document.getElementById('incidents').rows.length")
    return {"incidents_shown": told, "incidents_made": incidents}


async def kill_by_keyboard(page: BrowserPage, job: TrainingJob, shots: Path) -> None:
    """Kill a rank by the page's keyboard: Tab, Enter and the token."""
    if await page.look("document.querySelectorAll('#acts button').length === 0"):
        if await page.look("document.querySelectorAll('button').length"):
            raise RuntimeError("there are buttons without the token")
        await tab_to(page, "document.activeElement.id === 'token'")
        await page.write("not the token")
        await page.press("Enter")
        await page.wait_for("document.getElementById('acted').textContent.includes('not this job')")
        await page.write(await asyncio.to_thread(job.regrow, "token", "live-page"))
        await page.press("Enter")
        await page.wait_for("document.querySelectorAll('#acts button').length === 3")
    await tab_to(page, "document.activeElement.matches('[data-act=kill] input')")
    await page.press("Enter")
    await page.wait_for("document.getElementById('sure').open")
    await page.press("Escape")
    await page.wait_for("document.getElementById('acted').textContent === 'nothing was done'")
    await page.press("Enter")
    await page.wait_for("document.getElementById('sure').open")
    await tab_to(page, "document.activeElement.textContent.startsWith('Kill rank')")
    await page.screenshot(shots / "asked-dark.png")
    await page.press("Enter")


async def tab_to(page: BrowserPage, there: str) -> None:
    """Press Tab until the element has the focus."""
    for _ in range(30):
        if await page.look(there):
            return
        await page.press("Tab")
    raise RuntimeError(f"the keyboard does not reach {there}")


# --- all of it -----------------------------------------------------------------------------------------------------


async def measure(program: str, *, quick: bool, shots: Path) -> dict[str, float]:
    """All figures."""
    async with chromium(program) as page:
        figures = await count_drawings(page, 3.0 if quick else 10.0, 1 if quick else 3, shots)
        errors, asked = list(page.errors), list(page.requests)
    async with training() as job, chromium(program) as page:
        figures |= await shoot(page, job, shots)
        expected = "401 (Unauthorized)"  # the browser's message about the wrong token, which is intended
        errors += [error for error in page.errors if expected not in error]
        asked += page.requests
    elsewhere = [address for address in asked if not re.match(r"http://127\.0\.0\.1:|data:|about:", address)]
    for error in errors:
        print(f"the page complains: {error}")
    return figures | {"page_errors": len(errors), "requests_elsewhere": len(elsewhere)}


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of three seconds instead of three of ten")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--shots", type=Path, default=Path("build/live-page"), metavar="DIR", help="of the screenshots")
    parser.add_argument("--chromium", default="", metavar="PATH", help="the browser; or $CHROMIUM")
    words = parser.parse_args(argv)
    program = find_chromium(words.chromium)
    if program is None:
        print(f"skipped: no Chromium here (looked for {', '.join(NAMES)}); give --chromium PATH or set CHROMIUM")
        return 0
    warn_if_busy()
    words.shots.mkdir(parents=True, exist_ok=True)
    figures = asyncio.run(measure(program, quick=words.quick, shots=words.shots))
    for name, value in figures.items():
        print(f"{name:24} {value:.4g}")
    print(f"screenshots: {words.shots}")
    tell("live_page", figures, words.json, ranks=RANKS, cores=os.cpu_count())
    return 0


if __name__ == "__main__":
    sys.exit(main())

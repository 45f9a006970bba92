"""Ten minutes with one GPU: all checks that need a GPU, the riskiest first, each part in processes of its own.

    python benchmarks/gpu_session.py                        # all parts on CUDA, 12 minutes at most
    python benchmarks/gpu_session.py --parts 1-9 --budget 480 --out seen.jsonl
    python benchmarks/gpu_session.py --device cpu           # parts that make sense on a CPU; the others report why not

Each part prints one line of JSON at its end, even if it is killed at its limit: its number and name, the result
(`passed`, `failed`, `killed`, `skipped`, `interrupted`), seconds, and its measurements so far. A part that does not fit
into the rest of the budget is skipped, and a shorter later one may run. All processes of a part end with it. Needs
torch 2.11 or newer, Linux, and `src` beside this folder; regrow need not be installed (docs/cuda.md).

Exits with 1 if a part failed, was killed or left processes behind.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

import psutil

HERE = Path(__file__).resolve().parent
PARTS_FOLDER = HERE / "gpu_parts"
SKIPPED = 77
"""Exit code of a part that cannot run here; its last line of JSON has the reason, as `skipped`."""
LEAST_S = 15.0
"""A part is skipped if less than this remains, or less than half its limit."""
END_S = 10.0
GOODBYE_S = 3.0
SETTLE_S = 5.0
"""Time that processes of a part may outlive it before they count as left behind."""
TAIL, LAST = 800, 200
_SUBREAPER = 36
# Several ranks on one GPU: NCCL 2.30 or newer.
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


class Part(NamedTuple):
    """One part of a session.

    Attributes:
        number: in the order of the session.
        name: short.
        limit: the most seconds that it may take.
        command: after Python.
        not_on_cpu: reason why it cannot run on a CPU; empty: it can.
    """

    number: int
    name: str
    limit: float
    command: tuple[str, ...]
    not_on_cpu: str = ""


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(PARTS_FOLDER / f"{name}.py"), *arguments)


def _tests(path: str, cases: str = "") -> tuple[str, ...]:
    chosen = ("-k", cases) if cases else ()
    return ("-m", "pytest", "-v", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", path, *chosen)


PARTS = (
    Part(1, "versions", 40, _script("versions")),
    Part(2, "device_assert", 60, _script("device_assert"), "a processor has no device-side assert"),
    Part(3, "skipped_all_reduce", 60, _script("skipped_all_reduce")),
    Part(4, "hydration_beside_work", 40, _script("hydration_beside_work"), "a processor has no streams"),
    Part(5, "death_before_connect", 45, _script("death_before_connect"), "the CPU transport has no NCCL to connect"),
    Part(6, "memory_comes_back", 45, _script("memory_comes_back"), "a process's host memory ends with it"),
    Part(7, "gil", 60, _script("gil"), "a processor has no launch queue"),
    Part(8, "graph", 60, _script("graph"), "a processor captures no graphs"),
    Part(9, "tests_gpu", 60, _tests("tests/gpu"), "tests/gpu skips itself without a GPU"),
    Part(10, "pipelines", 90, _tests("tests/process/test_parallel_kills.py", "every_stage and pp_dp")),
    Part(11, "steady", 90, _script("steady")),
    Part(12, "recovery", 90, _script("recovery")),
)


# --- decisions --------------------------------------------------------------------------------------------------------


def chosen(text: str, parts: Sequence[Part] = PARTS) -> list[Part]:
    """The parts of a list such as `1,3,5-8`, in the session's order; empty: all. Raises `ValueError` for others."""
    wanted: set[int] = set()
    for piece in filter(None, text.replace(" ", "").split(",")):
        first, _, last = piece.partition("-")
        wanted |= set(range(int(first), int(last or first) + 1))
    if unknown := wanted.difference(part.number for part in parts):
        raise ValueError(f"there is no part {min(unknown)}: they are 1 to {parts[-1].number}")
    return [part for part in parts if not wanted or part.number in wanted]


def allowance(part: Part, left: float) -> float:
    """The seconds that a part gets with `left` seconds in the budget; 0: it is skipped."""
    given = min(part.limit, left)
    return given if given >= min(part.limit, max(LEAST_S, part.limit / 2)) else 0.0


class Ended(NamedTuple):
    """End of a part's process.

    Attributes:
        code: its exit code; None: it was killed at its limit.
        seconds: from its start.
        output: its text.
        left: processes that it left behind.
    """

    code: int | None
    seconds: float
    output: str
    left: int


def line_of(part: Part, given: float, ended: Ended) -> dict[str, Any]:
    """The JSON line of a part that was started."""
    figures = [told for told in map(_figures, ended.output.splitlines()) if told is not None]
    result = {None: "killed", 0: "passed", SKIPPED: "skipped"}.get(ended.code, "failed")
    line = {**_head(part, result), "seconds": round(ended.seconds, 1), "limit": round(given, 1)}
    line["figures"] = figures
    if said := [text for text in ended.output.splitlines() if text.strip() and _figures(text) is None]:
        line["last"] = said[-1].strip()[-LAST:]
    if ended.left:
        line |= {"result": "failed" if result == "passed" else result, "left_behind": ended.left}
    if result in ("failed", "killed"):
        line |= {"code": ended.code, "tail": ended.output[-TAIL:]}
    return line


def _head(part: Part, result: str) -> dict[str, Any]:
    return {"part": part.number, "name": part.name, "result": result}


def _figures(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    with suppress(ValueError):
        told = json.loads(line)
        return told if isinstance(told, dict) else None
    return None


# --- execution --------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """The session was asked to end."""


@contextmanager
def adopting() -> Iterator[None]:
    """Adopt orphaned descendants as children, and turn a request to end into `Interrupted`, within the block."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
    former = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def ask_to_end() -> None:
    """Ask all descendants to remove their files and shared memory."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.terminate()


def end_descendants(patience: float) -> int:
    """End all descendants, which have `patience` to end by themselves; returns the number that did not."""
    me = psutil.Process()
    psutil.wait_procs(me.children(recursive=True), timeout=patience)
    found = 0
    until = time.monotonic() + END_S
    while (living := me.children(recursive=True)) and time.monotonic() < until:
        found = max(found, len(living))
        for child in living:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(living, timeout=1.0)
    return found


def carry_out(command: Sequence[str], limit: float, environment: Mapping[str, str], cwd: Path) -> Ended:
    """Run a part to its end or to its limit, and end all its processes. Call it within `adopting`."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        code: int | None = None
        patience = SETTLE_S
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=cwd)
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            ask_to_end()
            patience = GOODBYE_S
        except BaseException:
            end_descendants(0.0)
            raise
        took = time.monotonic() - began
        left = end_descendants(patience)
        output.seek(0)
        return Ended(code, took, output.read(), 0 if code is None else left)


def hold(
    parts: Iterable[Part],
    *,
    budget: float,
    device: str,
    tell: Callable[[dict[str, Any]], None],
    environment: Mapping[str, str],
) -> bool:
    """Run parts in order; returns True if none failed. `tell` gets each line as soon as it is known."""
    until = time.monotonic() + budget
    good = True
    with adopting():
        for part in parts:
            if device == "cpu" and part.not_on_cpu:
                tell({**_head(part, "skipped"), "why": part.not_on_cpu})
                continue
            given = allowance(part, until - time.monotonic())
            if not given:
                tell({**_head(part, "skipped"), "why": f"needs {part.limit:.0f} s of the budget"})
                continue
            with tempfile.TemporaryDirectory(prefix="regrow-gpu-") as folder:
                ours = {**environment, "REGROW_HOME": folder, "REGROW_GPU_LIMIT_S": str(given)}
                try:
                    ended = carry_out([sys.executable, *part.command], given, ours, HERE.parent)
                except Interrupted as told:
                    tell({**_head(part, "interrupted"), "why": str(told)})
                    return False
                line = line_of(part, given, ended)
            tell(line)
            good = good and line["result"] in ("passed", "skipped")
    return good


def surroundings(device: str) -> dict[str, str]:
    """The environment of all parts."""
    sources = [str(folder) for folder in sorted(HERE.parent.glob("packages/*/src"))]
    path = os.pathsep.join([*sources, str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": path.rstrip(os.pathsep), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    ours |= {"REGROW_TEST_DEVICE": device, "REGROW_BENCH_DEVICE": device}
    return {**os.environ, **ours, **(SHARED_GPU if device == "cuda" else {})}


def teller(out: IO[str] | None) -> Callable[[dict[str, Any]], None]:
    """A function that prints a line and adds it to a file."""

    def tell(line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if out is not None:
            out.write(text + "\n")
            out.flush()

    return tell


def main() -> int:
    """Run a session; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help="such as 1,3,5-8; all by default")
    parser.add_argument("--budget", type=float, default=720.0, metavar="SECONDS", help="of all parts together")
    parser.add_argument("--out", type=Path, help="add the lines to this file too")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="what the parts compute on")
    args = parser.parse_args()
    try:
        parts = chosen(args.parts)
    except ValueError as error:
        parser.error(str(error))
    if shutil.disk_usage(tempfile.gettempdir()).free < 1 << 30:
        parser.error(f"{tempfile.gettempdir()} has less than 1 GiB free: set TMPDIR to a folder with more")
    with args.out.open("a") if args.out else open(os.devnull, "w") as out:
        good = hold(
            parts, budget=args.budget, device=args.device, tell=teller(out), environment=surroundings(args.device)
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Detection of trainings whose newcomers would compute different results. Their author had not read the detector.

    python -m benchmarks.newcomer_faults                        # each once, undisturbed: 15 minutes on two busy cores
    python -m benchmarks.newcomer_faults --only teacher sobol   # some of them
    python -m benchmarks.newcomer_faults --proof fork --only metric_object        # without a standby
    python -m benchmarks.newcomer_faults --sanity               # each once more, killed and not proven: is it a fault?

Undisturbed each runs with 2 ranks and a standby. A fault is *refused* (before step 0), *refuted* (a comparison
of a newcomer with the rank that it would replace finds it) or *not found*; it is *named* if the message has one of the
script's words for it. Of an honest script each finding is a false alarm.

With `--sanity` each script that is not refused runs once more with `--proof off` and a SIGKILL of a rank: committed
losses must differ. What regrow carries over to the newcomer by itself is no fault.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from targets import tell, warn_if_busy

from newcomer_faults.figures import figures, table
from newcomer_faults.judging import Case, Outcome, cases, judge

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run the scripts, and report the outcomes."""
    args = _arguments()
    chosen = [case for case in cases(HERE) if not args.only or case.name in args.only]
    unknown = set(args.only) - {case.name for case in chosen}
    if unknown:
        print(f"there is no script {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    warn_if_busy()
    with _folder(args.keep) as folder:
        outcomes = list(_outcomes(chosen, Path(folder), args))
    Console(width=args.width).print(table(outcomes))
    details = {"outcomes": [outcome.told() for outcome in outcomes]}
    tell("newcomer_faults", figures(outcomes), args.json, **details)
    return 0 if all(outcome.ran for outcome in outcomes) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these scripts")
    parser.add_argument("--sanity", action="store_true", help="show that the faults are faults")
    parser.add_argument(
        "--proof", choices=("standby", "fork"), default="standby", help="by a standby, or by one that is made for it"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and outcomes")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the jobs' records there")
    parser.add_argument("--width", type=int, default=160, help="of the table")
    return parser.parse_args()


def _folder(kept: Path | None) -> AbstractContextManager[str | Path]:
    if kept is None:
        return TemporaryDirectory(prefix="newcomer-faults-", ignore_cleanup_errors=True)
    kept.mkdir(parents=True, exist_ok=True)
    return nullcontext(kept.resolve())


def _outcomes(chosen: Sequence[Case], folder: Path, args: argparse.Namespace) -> Iterator[Outcome]:
    how = {"sanity": args.sanity, "forks": args.proof == "fork"}
    with ThreadPoolExecutor(args.jobs) as pool:
        coming = [pool.submit(judge, case, folder / case.name, **how) for case in chosen]
        for number, (case, future) in enumerate(zip(chosen, coming, strict=True), 1):
            outcome = future.result()
            print(f"{number:2}/{len(chosen)} {case.kind:6} {case.name:24} {outcome.line()}", flush=True)
            yield outcome


if __name__ == "__main__":
    sys.exit(main())

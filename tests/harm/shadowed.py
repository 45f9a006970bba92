"""Each habit is trained undisturbed until a standby has shown in a rank's shadow what it would compute.

    python -m tests.harm.shadowed [NAME ...]     # all habits, and recipes by their names: one line each

A newcomer of a habit that is bitwise through kills must be proven, or not comparable for a reason that is said.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.harm.runs import HERE, IMPORTS, PATIENCE_S, ROOT, imports_of
from tests.harm.table import Habit, all_habits, named
from tests.process.launching import SOURCE, Site, close_warm, site
from tests.process.warm_client import FOLDER

from regrow.core.records import Noted, Record, ReplacementJudged
from regrow.observe.ledger import Ledger, read_records

NOT_PROVEN = "was not proven: "
"""Stands before the reason."""
ASKS_EARLY = "the script reads its rank before its loop"
"""Reason why its standbys wait before the script, so that none is built that could show anything."""
_POLL_S = 0.05


def judge(here: Site, habit: Habit, world: int = 3) -> tuple[str, Ledger, str]:
    """Judge a habit by a shadow: "proven", "refuted: ...", or "not comparable: ..."; and the run."""
    job = f"{habit.name}-shadowed"[-60:]
    folder, records = here.folder / job, here.home / "jobs" / job
    folder.mkdir()
    words = ["run", "--job", job, "--nproc-per-node", str(world), "--standby", "1", "--proof", "auto"]
    words += [str(HERE / "play.py"), habit.name, "--folder", str(folder), "--until-judged"]
    path, until = os.pathsep.join([SOURCE, str(ROOT)]), time.monotonic() + PATIENCE_S
    with here.importing(imports_of(habit)).start(*words, PYTHONPATH=path) as running:
        while running.process.poll() is None and time.monotonic() < until and not _told(records):
            running.drain()
            time.sleep(_POLL_S)
        (folder / "enough").touch()
        code = running.wait(PATIENCE_S)
        assert code == 0, running.output
    ledger = Ledger(read_records(records))
    return _told(records) or "nothing was found before its end", ledger, running.output


def _told(records: Path) -> str:
    found = list(read_records(records)) if (records / "events.jsonl").exists() else []
    return next(filter(None, map(_verdict, found)), "")


def _verdict(record: Record) -> str:
    if isinstance(record, ReplacementJudged):
        return f"refuted: {record.reason}" if record.reason else "proven"
    if isinstance(record, Noted) and NOT_PROVEN in record.text:
        return f"not comparable: {record.text.partition(NOT_PROVEN)[2]}"
    return f"not comparable: {ASKS_EARLY}" if isinstance(record, Noted) and ASKS_EARLY in record.text else ""


def main(names: Iterable[str]) -> int:
    """All of these; the number of habits that were refuted."""
    habits = [named(name) for name in names] or [each for each in all_habits().values() if not each.refused]
    refuted = 0
    with tempfile.TemporaryDirectory(prefix="shadowed-") as folder, site(Path(folder), *IMPORTS) as here:
        os.environ[FOLDER] = folder
        for habit in habits:
            try:
                found = judge(here, habit)[0]
            except AssertionError as error:
                found = f"failed: {error}"
            refuted += found.startswith("refuted")
            print(f"{habit.name}: {found}", flush=True)  # noqa: T201
        close_warm()
    return refuted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

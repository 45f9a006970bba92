"""`--log-rules`: what workers print is a verdict, and a fault only where the rule says so."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS, assert_equal, outcome_of, train

from regrow.core.records import NodeJudged

RULES = r"""
[[rule]]
name = "catastrophic"
pattern = '^(\w+\s?)*!$'

[[rule]]
name = "fifth"
pattern = '^step 5$'
action = "replace"

[[rule]]
name = "beat"
pattern = '^step \d'
at_least = 1
within = "1h"

[[rule]]
name = "silent"
pattern = '^never$'
at_least = 1
within = "1h"
first_within = "1s"

[[rule]]
name = "some"
pattern = '^step \d'
at_most = 2
within = "1h"
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


def test_a_line_is_told_and_with_replace_its_worker_replaced_without_a_bit_of_difference(here: Site) -> None:
    undisturbed = train(here, "calm", steps=30)
    (here.folder / "rules.toml").write_text(RULES)
    flags = ("--nproc-per-node", "3", "--log-rules", "rules.toml", "--job", "heard")
    extra = ("--steps", "30", "--out", str(here.folder / "heard.out"), "--say-steps", "--pace", "0.2")
    with here.start("run", *flags, str(SCRIPTS / "train_small.py"), *extra) as job:
        job.wait_for("log:silent slot1: rank 1 has printed nothing that fits since it began")
        job.wait_for("node0 is suspect: log:fifth slot0: rank 0 has printed: step 5")
        job.wait_for(", no step lost")
        (here.folder / "hurry").touch()
        assert job.wait() == 0, job.output
    ran = outcome_of(here, "heard", 3, 0, job.output)
    assert_equal(ran, undisturbed, faults=0)
    assert [(each.kind, each.ranks) for each in ran.ledger.incidents] == [("log", [0])]
    lines = (here.home / "jobs/heard/events.jsonl").read_text().splitlines()
    judged = [each["source"] for each in map(json.loads, lines) if each["type"] == NodeJudged.__name__]
    assert judged.count("log:fifth") == 1 and "log:some" in judged and "log:beat" not in judged


def test_a_bad_file_ends_the_command_before_anything_starts(here: Site) -> None:
    (here.folder / "rules.toml").write_text("[[rule]]\nname = 'a'\npattern = 'b('")
    done = here.regrow("run", "--log-rules", "rules.toml", here.script("raise SystemExit('it was started')"))
    assert done.returncode == 2, done.stderr
    assert "--log-rules rules.toml, rule 1 ('a'): pattern = 'b(' is no regular expression" in done.stderr
    assert "it was started" not in done.stderr


@pytest.mark.full
def test_a_pattern_that_takes_for_ever_holds_nobody_up(here: Site) -> None:
    (here.folder / "rules.toml").write_text(RULES)
    text = "import pathlib, time, regrow\nfor n in range(2000): print('a' * 60, flush=True)\n"
    text += "while not pathlib.Path('heard').exists(): time.sleep(0.01)\n"  # the search begins when it gets a processor
    flags = ("--nproc-per-node", "2", "--log-rules", "rules.toml")
    with here.start("run", *flags, here.script(text)) as job:
        job.wait_for("a" * 60, times=4000)
        job.wait_for("node0 applies the log rule catastrophic no more")
        (here.folder / "heard").touch()
        assert job.wait() == 0, job.output

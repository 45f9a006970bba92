"""Real agents that get a generation's table from one another, as those of large jobs do."""

import json
import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS, outcome_of, train

WORLD, STEPS = 4, 20


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("tables")) as made:
        yield made
        made.assert_nothing_left()


def test_each_node_gets_the_table_from_the_one_before_also_after_one_of_them_was_killed(here: Site) -> None:
    undisturbed = train(here, "undisturbed", world=WORLD, steps=STEPS)
    training = [str(SCRIPTS / "train_small.py"), "--steps", str(STEPS), "--pace", "0.2", "--say-steps"]
    words = ["run", "--job", "chain", "--local-nodes", "4", "--nproc-per-node", "1", *training]
    words += ["--out", str(here.folder / "chain.out")]
    here.module = "tests.process.chained_tables"
    with here.start(*words) as job:
        job.wait_for("step 5\n")
        here.module = "regrow"
        ranks = json.loads(here.regrow("status", "chain", "--json").stdout)["ranks"]
        (killed,) = (psutil.Process(each["pid"]).ppid() for each in ranks if each["node"] == "node1")
        os.kill(killed, signal.SIGKILL)
        (here.folder / "hurry").touch()
        code = job.wait()
        said = job.output
    chain = outcome_of(here, "chain", WORLD, code, said)
    assert (chain.code, chain.finals) == (0, undisturbed.finals), said
    assert [incident.kind for incident in chain.ledger.incidents] == ["node"]
    tables = [tuple(line.split()[1:]) for line in said.splitlines() if line.startswith("table ")]
    first = [("node0", "KeepTable"), *((f"node{node}", "FetchTable") for node in (1, 2, 3))]
    after = [*((f"node{node}", "ChangeTable") for node in (0, 2, 3)), ("node1", "FetchTable")]
    assert tables == [*first, *first, *after], "to build with, of the first generation, of the second"

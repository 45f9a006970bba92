"""A script with regrow under torchrun, which recovers nothing: it ends as it would without."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site

LATE = """
import os
import time
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
import regrow

def late(future):
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    os.write(1, b"late\\n")  # whole, whoever else writes

session = regrow.init()
model = DistributedDataParallel(torch.nn.Linear(2, 2))  # holds the group beyond its destruction
future = distributed.all_reduce(torch.ones(4), async_op=True).get_future()
soon = future.then(lambda done: None)
future.then(late)
soon.wait()
"""


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("torchrun")) as made:
        yield made
        made.assert_nothing_left()


def test_a_thread_of_gloo_that_is_late_does_not_abort_the_process(here: Site) -> None:
    """It runs Python while the script is over."""
    script = here.folder / "late.py"
    script.write_text(LATE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launcher, str(script)], env=here.environment(), capture_output=True, text=True, timeout=here.patience
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["late", "late"]

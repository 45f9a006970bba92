"""Scripts that know nothing of regrow, under `regrow run`: who listens, and who is asked."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.launching import Site, site

SCRIPTS = Path(__file__).parents[1] / "scripts"
WORLD = 4

LOOK = """
import json, os, runpy, sys
import torch.distributed as dist

rendezvous = sys.modules["torch.distributed.rendezvous"]

made = []

class Counted(dist.TCPStore):
    def __init__(self, *args, **options):
        made.append(True)
        super().__init__(*args, **options)

dist.TCPStore = rendezvous.TCPStore = Counted

def listening():
    mine = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    ports = []
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{table}").readlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                ports.append(int(words[1].rpartition(":")[2], 16))
    return ports

def leave(*args, **options):
    dist.barrier()  # all stand in their groups, and look
    said = {"made": len(made), "master": int(os.environ["MASTER_PORT"]), "listening": listening(),
            "lazy": os.environ.get("TORCH_GLOO_LAZY_INIT")}
    with open(f"seen.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}", "w") as file:
        json.dump(said, file)
    dist.barrier()
    left(*args, **options)
    # Not to the script's end: torch now and then hangs there, where DDP is the last to let go of a gloo group.
    sys.stdout.flush()
    os._exit(0)

left, dist.destroy_process_group = dist.destroy_process_group, leave
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made


def seen(here: Site, restart: int = 0) -> list[dict[str, Any]]:
    return [json.loads((here.folder / f"seen.{restart}.{rank}").read_text()) for rank in range(WORLD)]


def run(here: Site, script: str, **environment: str) -> list[dict[str, Any]]:
    look = here.script(LOOK, "look.py")
    done = here.regrow("run", "--nproc-per-node", str(WORLD), look, str(SCRIPTS / script), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(WORLD):
        assert f"trained {rank} of {WORLD}" in done.stdout
    here.assert_nothing_left()
    return seen(here)


@pytest.mark.parametrize("script", ["plain_ddp.py", "plain_fsdp2.py"])
def test_an_unmodified_script_runs_with_no_store_server_in_any_process(here: Site, script: str) -> None:
    for rank in run(here, script):
        assert rank["made"] == 0
        assert rank["master"] not in rank["listening"]


def test_switched_off_rank_0_serves_torchs_own_store(here: Site) -> None:
    ranks = run(here, "plain_ddp.py", REGROW_ROOTLESS="0")
    assert [rank["made"] for rank in ranks] == [1] * WORLD
    assert [rank["master"] in rank["listening"] for rank in ranks] == [True, False, False, False]
    assert {rank["lazy"] for rank in ranks} == {None}


AGAIN = """
import os, torch, torch.distributed as dist
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for turn in range(3):
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    value = torch.tensor([float(rank + turn)])
    dist.all_reduce(value)
    assert value.item() == 6 + 4 * turn, value
    store = dist.distributed_c10d._get_default_store()
    assert store.add("visitors", 1) <= 4, "keys of an earlier world were seen"
    dist.barrier()
    if restart == 0 and turn == 1 and rank == 2:
        os.kill(os.getpid(), 9)
    dist.destroy_process_group()
print("met", rank, "in restart", restart, flush=True)
"""


def test_worlds_made_anew_and_restarts_find_no_keys_of_earlier_ones(here: Site) -> None:
    done = here.regrow("run", "--nproc-per-node", str(WORLD), "--max-restarts", "2", here.script(AGAIN))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"met (\d) in restart 1", done.stdout)) == ["0", "1", "2", "3"]
    here.assert_nothing_left()


OWN = """
import multiprocessing, os, socket, subprocess, sys
import torch, torch.distributed as dist

def meet(place):
    dist.init_process_group("gloo", rank=0, world_size=1)
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    print(place, type(store).__name__, flush=True)
    dist.destroy_process_group()

if sys.argv[1:]:
    meet("alone")
elif __name__ == "__main__":
    meet("worker")
    child = multiprocessing.get_context("fork").Process(target=meet, args=("fork",))
    child.start(); child.join()
    subprocess.run([sys.executable, __file__, "alone"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    meet("elsewhere")
"""


def test_what_no_agent_started_or_wants_a_place_of_its_own_gets_torchs_store(here: Site) -> None:
    done = here.regrow("run", here.script(OWN))
    assert done.returncode == 0, done.stdout + done.stderr
    stores = dict(re.findall(r"(worker|fork|alone|elsewhere) (\w+)", done.stdout))
    assert stores == {"worker": "AgentStore", "fork": "TCPStore", "alone": "TCPStore", "elsewhere": "TCPStore"}

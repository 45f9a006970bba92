"""Files that describe jobs for Slurm, and the batch scripts that come of them."""

import shlex
import subprocess

import msgspec
import pytest

from regrow.core.errors import UsageError
from regrow_clusters.slurm.job_file import SlurmJobSpec, read_job_file
from regrow_clusters.slurm.node_arguments import GangNode, exit_code, gang_arguments, port_of, replica_arguments
from regrow_clusters.slurm.scripts import JobPart, part_in, script_again, script_of

MINIMAL = 'name = "gpt"\nscript = ["train.py", "--lr", "1e-3"]\n'
REGROW = ["python", "-m", "regrow"]
SEAT = GangNode(41, 1, "node1", "node[0-4]", "spine.leaf0.node1", "switch.switch.node")


def read(text: str) -> SlurmJobSpec:
    return read_job_file(text, place="job.toml")


def test_what_is_not_said_has_a_default() -> None:
    spec = read(MINIMAL)
    assert (spec.replica_count, spec.most, spec.gang_nodes, spec.grace) == (1, 1, 1, 30.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = gpt", "job.toml is no TOML"),
        (MINIMAL + "replicacount = 2", "replicacount is no key of a job for Slurm (did you mean replicaCount?)"),
        (MINIMAL + '[gang]\npartion = "a"', "job.toml [gang]: partion is no key of a job for Slurm (did you mean"),
        ('name = "gpt"', "`script`"),
        ('name = "gpt"\nscript = []', "script"),
        (MINIMAL + 'replicaCount = "2"', "Expected `int`, got `str` - at `$.replicaCount`"),
        (MINIMAL + "replicaCount = 4\nmaxReplicaCount = 2", "maxReplicaCount is 2, below replicaCount (4): give 4 or"),
        (MINIMAL + "replicas = 3", "replicas is 3: give a number from replicaCount (1) to 1"),
        ('name = "a/b"\nscript = ["t.py"]', "name 'a/b' cannot name a job: use at most 40 letters"),
        (f'name = "{"a" * 41}"\nscript = ["t.py"]', "cannot name a job: use at most 40 letters"),
        (MINIMAL + '[gang]\noptions = ["--nodes=3"]', "gang.options has '--nodes=3': --nodes is regrow's own"),
        (MINIMAL + '[elastic]\noptions = ["-N3"]', "elastic.options has '-N3': --nodes is regrow's own"),
        (MINIMAL + '[gang]\noptions = ["mem=3"]', "it is no option; write it as one word, --name=value"),
        (MINIMAL + '[gang]\noptions = ["--mem=3\\nrm"]', "it has a line break"),
        (MINIMAL + '[gang]\npartition = "a b"', "gang.partition 'a b' is no name of a partition"),
        (MINIMAL + '[gang]\nscript = "my.sbatch"', "gang.script has no meaning: submit that script yourself"),
    ],
)
def test_what_cannot_be_is_said_with_its_key_and_its_cure(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read(text)
    assert said in str(refusal.value)


def test_the_gangs_script_holds_the_whole_job_and_survives_the_loss_of_a_node() -> None:
    spec = read(MINIMAL + 'replicaCount = 2\nspares = 1\nsetup = "module load cuda"\n[gang]\noptions = ["--mem=9G"]')
    part = JobPart(spec, avoid=("node7", "node9"))
    text = script_of(part, REGROW)
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=3", "--no-kill", "--no-requeue", "--exclude=node7,node9", "--mem=9G"} < set(options)
    assert "--signal=TERM@60" in options
    assert "srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --export=ALL --nodes=3 --ntasks=3" in text
    assert text.index("module load cuda") < text.index("srun")
    assert part_in(text) == part


def test_scripts_are_sound_bash_whatever_the_job_is_called() -> None:
    spec = msgspec.structs.replace(read(MINIMAL), script=["it's $HOME.py", "`x`", '"'])
    for part in (JobPart(spec), JobPart(spec, 3)):
        text = script_of(part, REGROW)
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).returncode == 0
        assert part_in(text) == part


def test_the_first_nodes_word_is_the_scripts_exit_code_and_lost_nodes_are_not_waited_for() -> None:
    text = script_of(JobPart(read(MINIMAL)), ["true"])
    for body, code in (("echo 0 >$REGROW_SLURM_RESULT/code; return 9", 0), ("return 1", 75)):
        fake = f"srun() {{ {body}; }}\nscontrol() {{ :; }}\n"
        done = subprocess.run(["bash"], input=fake + text, text=True, capture_output=True, check=False, timeout=120)
        assert done.returncode == code, done.stderr


@pytest.mark.parametrize("part", [JobPart(read(MINIMAL)), JobPart(read(MINIMAL), 3)])
def test_slurm_starts_no_job_again_beside_the_one_that_regrow_submits(part: JobPart) -> None:
    fake = 'scontrol() { echo "$@" >&2; }\nsrun() { return 1; }\nSLURM_JOB_ID=17\n'
    done = subprocess.run(["bash"], input=fake + script_of(part, ["true"]), text=True, capture_output=True, timeout=120)
    assert done.stderr == "update jobid=17 requeue=0\n"


@pytest.mark.parametrize("part", [JobPart(read(MINIMAL)), JobPart(read(MINIMAL), 3)])
def test_a_node_without_regrow_is_named_and_the_same_is_not_tried_again(part: JobPart) -> None:
    text = script_of(part, ["./no `id` $HOME/regrow", "-m", 'a"b'])
    fake = "srun() { return 1; }\nscontrol() { :; }\nhostname() { echo node7; }\n"
    done = subprocess.run(["bash"], input=fake + text, text=True, capture_output=True, check=False, timeout=120)
    assert done.returncode == 93
    told = "regrow: './no `id` $HOME/regrow' -m 'a\"b' cannot be started on node7: install regrow there, or set command"
    assert told in done.stderr
    there = script_of(part, ["true"])
    done = subprocess.run(["bash"], input=fake + there, text=True, capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (75 if part.place is None else 1, "")


def test_a_replicas_script_is_a_job_of_its_own() -> None:
    spec = read(MINIMAL + 'maxReplicaCount = 3\nnodesPerReplica = 2\n[elastic]\npartition = "spot"')
    text = script_of(JobPart(spec, 2, avoid=("node1",)), REGROW)
    assert "#SBATCH --job-name=gpt+2\n" in text
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --partition=spot\n" in text
    assert "--no-kill\n" not in text and "REGROW_TOKEN" not in text


def test_a_script_of_the_users_own_is_used_again_for_another_part() -> None:
    spec = read(MINIMAL + "maxReplicaCount = 3")
    own = script_of(JobPart(spec, 1, avoid=("node5",)), REGROW).replace("srun", "module load cuda\nsrun --mem=4G", 1)
    again = script_again(own, JobPart(spec, 2, avoid=("node6",)))
    assert part_in(again) == JobPart(spec, 2, avoid=("node6",))
    assert again.startswith("#!/bin/bash\n#SBATCH --job-name=gpt+2\n#SBATCH --exclude=node6\n")
    assert "module load cuda" in again and "node5" not in again and "--job-name=gpt+1" not in again
    with pytest.raises(UsageError, match="has no line export REGROW_SLURM_PART"):
        script_again("#!/bin/bash\nsrun train\n", JobPart(spec, 2))


def test_the_gang_runs_a_job_that_may_grow() -> None:
    spec = read(MINIMAL + "replicaCount = 2\nmaxReplicaCount = 4\nnodesPerReplica = 2\nranksPerNode = 8\nspares = 1")
    words = gang_arguments(JobPart(spec), SEAT, "10.0.0.1:29400", "10.0.0.2")
    assert words == [
        *shlex.split("run --job=gpt-41 --nnodes=5:9 --node-rank=1 --nproc-per-node=8 --replicas=2:4"),
        *shlex.split("--replica-ranks=16 --rdzv-endpoint=10.0.0.1:29400 --drain-grace=30s --no-elect"),
        *shlex.split("--bind=10.0.0.2 --local-addr=10.0.0.2 --domain=leaf0 --spares=1 train.py --lr 1e-3"),
    ]


def test_all_nodes_of_a_gang_take_the_one_order_that_its_script_has_found() -> None:
    text = script_of(JobPart(read(MINIMAL + "replicaCount = 3")), REGROW)
    assert 'export REGROW_SLURM_HOSTS="$(python -m regrow slurm order 2>/dev/null)"\n' in text
    assert "slurm order" not in script_of(JobPart(read(MINIMAL + "replicaCount = 2")), REGROW), "there is no choice"
    assert "slurm order" not in script_of(JobPart(read(MINIMAL + "nodesPerReplica = 4"), 3), REGROW)
    order = "node0,node2,node4,node1,node3"
    moved = SEAT.in_order(order)
    assert (moved.index, moved.hosts, moved.first_host) == (3, order, "node0")
    for wrong in ("", "node0,node1", "node0,node1,node2,node3,node9", "[Errno 2]"):
        assert SEAT.in_order(wrong) == SEAT


def test_a_gang_that_starts_anew_resumes_where_it_can() -> None:
    spec = read(MINIMAL + 'checkpointDir = "/ckpt"')
    assert "--resume" not in gang_arguments(JobPart(spec), SEAT, "h:1", "h")
    assert "--resume=auto" in gang_arguments(JobPart(spec, attempt=2), SEAT, "h:1", "h")
    assert "--resume" not in gang_arguments(JobPart(read(MINIMAL), attempt=2), SEAT, "h:1", "h")


def test_a_replica_joins_under_a_name_that_never_comes_twice() -> None:
    spec = read(MINIMAL + "maxReplicaCount = 4\nnodesPerReplica = 2")
    words = replica_arguments(JobPart(spec, 3), SEAT, "10.0.0.1:29400", "10.0.0.2")
    assert words[:4] == ["agent", "--join=10.0.0.1:29400", "--name=r3-41-1", "--grace=30s"]
    fixed = read(MINIMAL + "replicaCount = 4\nnodesPerReplica = 2")
    assert "--name=node7" in replica_arguments(JobPart(fixed, 3), SEAT, "10.0.0.1:29400", "10.0.0.2")


def test_two_jobs_of_a_host_have_different_ports() -> None:
    part = JobPart(read(MINIMAL))
    assert port_of(part, 41) != port_of(part, 42)
    assert 20000 <= port_of(part, 10_000_019) < 32000
    assert port_of(JobPart(read(MINIMAL + "port = 29400")), 41) == 29400


@pytest.mark.parametrize(
    ("code", "told", "said"),
    [(0, False, 0), (0, True, 75), (75, False, 75), (75, True, 75), (-9, False, 75), (1, False, 93), (2, True, 93)],
)
def test_slurm_is_told_whether_the_same_again_makes_sense(code: int, told: bool, said: int) -> None:
    assert exit_code(code, asked_to_leave=told) == said

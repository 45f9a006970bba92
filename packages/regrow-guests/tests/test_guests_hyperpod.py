"""HyperPod's jobs as TrainingJobs: their field names, with values of our own."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.fake_schema import unknown_fields, violations

from regrow.cli import main
from regrow.core.errors import UsageError
from regrow_clusters.operator.crd import crd
from regrow_guests.hyperpod.converting import converted
from regrow_guests.hyperpod.fields import ConvertedJob, convert_job

JOB: dict[str, Any] = {
    "apiVersion": "sagemaker.amazonaws.com/v1",
    "kind": "HyperPodPyTorchJob",
    "metadata": {
        "name": "small",
        "namespace": "team",
        "labels": {"app.kubernetes.io/managed-by": "kustomize", "owner": "ada"},
    },
    "spec": {
        "nprocPerNode": "4",
        "elasticPolicy": {
            "minReplicas": 2,
            "maxReplicas": 6,
            "replicaIncrementStep": 2,
            "gracefulShutdownTimeoutInSeconds": 90,
            "scalingTimeoutInSeconds": 40,
            "faultyScaleDownTimeoutInSeconds": 20,
        },
        "runPolicy": {
            "cleanPodPolicy": "None",
            "jobMaxRetryCount": 9,
            "restartPolicy": {"numRestartBeforeFullJobRestart": 2, "evalPeriodSeconds": 60, "maxFullJobRestarts": 5},
            "logMonitoringConfiguration": [{"name": "start", "logPattern": ".*loss.*"}],
        },
        "replicaSpecs": [
            {
                "name": "pods",
                "replicas": 4,
                "maxReplicas": 6,
                "spares": 1,
                "template": {
                    "metadata": {"labels": {"project": "words"}},
                    "spec": {
                        "containers": [
                            {
                                "name": "train",
                                "image": "team/words:3",
                                "command": ["hyperpodrun", "--nnodes=2:6", "--nproc_per_node", "4"],
                                "args": ["--inprocess-restart", "--max-restarts=3", "train.py", "--lr", "0.1"],
                                "ports": [{"containerPort": 8080}],
                                "env": [{"name": "HPCT_USE_ROOTLESS", "value": "1"}],
                                "resources": {"limits": {"nvidia.com/gpu": 8}},
                            }
                        ],
                        "volumes": [{"name": "data", "emptyDir": {}}],
                    },
                },
            }
        ],
    },
}


def made(spec: dict[str, Any] | None = None, **more: Any) -> ConvertedJob:
    theirs = copy.deepcopy(JOB)
    theirs["spec"] |= spec or {}
    return convert_job(theirs, **more)


def container(theirs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = theirs["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    return found


def test_each_field_has_its_place_in_the_job_or_a_reason() -> None:
    found = made()
    assert not found.unknown
    assert found.manifest == {
        "apiVersion": "regrow.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "small", "namespace": "team", "labels": {"owner": "ada"}},
        "spec": {
            "replicaCount": 2,
            "maxReplicaCount": 6,
            "replicaIncrementStep": 2,
            "gracefulShutdownTimeoutInSeconds": 90,
            "scaleUpSnoozeTimeInSeconds": 40,
            "maxRestarts": 5,
            "script": ["train.py", "--lr", "0.1"],
            "runFlags": ["--max-restarts=3"],
            "ranksPerPod": 4,
            "template": {
                "metadata": {"labels": {"project": "words"}},
                "spec": {
                    "containers": [
                        {
                            "name": "train",
                            "image": "team/words:3",
                            "env": [{"name": "HPCT_USE_ROOTLESS", "value": "1"}],
                            "resources": {"limits": {"nvidia.com/gpu": 8}},
                        }
                    ],
                    "volumes": [{"name": "data", "emptyDir": {}}],
                },
            },
        },
    }
    said = "\n".join(found.notes)
    for name in ("cleanPodPolicy", "jobMaxRetryCount", "logMonitoringConfiguration", "evalPeriodSeconds", "spares"):
        assert f".{name}: no counterpart, for " in said
    assert "scaleUpSnoozeTimeInSeconds here" in said and "8080" in said and "HPCT_USE_ROOTLESS" in said


def test_what_is_made_is_valid_for_the_cluster() -> None:
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert not [*violations(schema, made().manifest), *unknown_fields(schema, made().manifest)]


def test_a_job_of_one_size_stays_of_one_size() -> None:
    spec = made({"elasticPolicy": {}}).manifest["spec"]
    assert (spec["replicaCount"], spec["maxReplicaCount"]) == (4, 6)  # its replicaSpec has a maximum
    theirs = copy.deepcopy(JOB)
    del theirs["spec"]["elasticPolicy"], theirs["spec"]["replicaSpecs"][0]["maxReplicas"]
    spec = convert_job(theirs).manifest["spec"]
    assert (spec["replicaCount"], spec["maxReplicaCount"]) == (4, 4)


def test_discrete_sizes_begin_with_the_gang() -> None:
    found = made({"elasticPolicy": {"minReplicas": 1, "maxReplicas": 6, "replicaDiscreteValues": [2, 4, 8]}})
    spec = found.manifest["spec"]
    assert (spec["replicaCount"], spec["maxReplicaCount"], spec["replicaDiscreteValues"]) == (2, 4, [2, 4])
    assert any("outside 1 to 6" in note for note in found.notes)


def test_pods_that_share_a_model_are_one_replica() -> None:
    spec = made(pods_per_replica=2).manifest["spec"]
    assert (spec["replicaCount"], spec["maxReplicaCount"], spec["podsPerReplica"]) == (1, 3, 2)
    assert "replicaIncrementStep" not in spec  # two pods are one replica
    with pytest.raises(UsageError, match="minReplicas is 2 pods, no whole number of replicas of 4"):
        made(pods_per_replica=4)


def test_the_queue_of_task_governance_is_kueues() -> None:
    theirs = copy.deepcopy(JOB)
    theirs["metadata"]["labels"] |= {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "high"}
    theirs["metadata"]["annotations"] = {"kueue.x-k8s.io/podset-required-topology": "rack"}
    found = convert_job(theirs)
    assert found.manifest["spec"]["backend"] == "kueue"
    assert found.manifest["spec"]["kueue"] == {"queueName": "q", "priorityClass": "high", "requiredTopology": "rack"}
    assert found.manifest["metadata"]["labels"] == {"owner": "ada"} and "annotations" not in found.manifest["metadata"]


@pytest.mark.parametrize(
    ("words", "script", "flags"),
    [
        (["torchrun", "--nnodes", "2", "-m", "pack.train", "-x"], ["pack.train", "-x"], ["--module"]),
        (["python", "-u", "-m", "torch.distributed.run", "--standalone", "t.py"], ["t.py"], None),
        (["/opt/bin/hyperpodrun", "--tee=3", "t.py", "--nnodes", "9"], ["t.py", "--nnodes", "9"], ["--tee=3"]),
    ],
)
def test_the_script_is_what_the_launcher_was_to_start(words: list[str], script: list[str], flags: list[str]) -> None:
    theirs = copy.deepcopy(JOB)
    container(theirs).pop("args")
    container(theirs)["command"] = words
    spec = convert_job(theirs).manifest["spec"]
    assert (spec["script"], spec.get("runFlags")) == (script, flags)


def test_a_shells_text_is_not_guessed_at() -> None:
    theirs = copy.deepcopy(JOB)
    container(theirs).pop("args")
    container(theirs)["command"] = ["bash", "-c", "cd /work && torchrun train.py"]
    with pytest.raises(UsageError, match="--script"):
        convert_job(theirs)
    assert convert_job(theirs, script=["train.py"]).manifest["spec"]["script"] == ["train.py"]


def test_ranks_come_from_the_pods_gpus_where_they_are_auto() -> None:
    theirs = copy.deepcopy(JOB)
    theirs["spec"]["nprocPerNode"] = "auto"
    assert convert_job(theirs).manifest["spec"]["ranksPerPod"] == 8
    container(theirs)["resources"] = {}
    with pytest.raises(UsageError, match="nprocPerNode is 'auto' and is no number"):
        convert_job(theirs)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "PyTorchJob"}, "it is a PyTorchJob"),
        ({"metadata": {}}, "metadata.name is missing"),
        ({"metadata": {"name": "n" * 41}}, "41 characters"),
        ({"spec": None}, "spec is missing"),
        ({"spec": {"replicaSpecs": []}}, "spec.replicaSpecs is empty"),
        ({"spec": {"replicaSpecs": [{"name": "a"}, {"name": "b"}]}}, r"2 entries \(a, b\)"),
        ({"spec": {"replicaSpecs": [{"replicas": "two", "template": {"spec": {"containers": [{}]}}}]}}, "is 'two'"),
        ({"spec": {"replicaSpecs": [{"template": {"spec": {}}}]}}, "containers is empty"),
        ({"spec": {**JOB["spec"], "elasticPolicy": {"minReplicas": 5, "maxReplicas": 4}}}, "below minReplicas"),
        ({"spec": {**JOB["spec"], "elasticPolicy": {"scalingTimeoutInSeconds": "1m"}}}, "is '1m'"),
        ({"spec": {**JOB["spec"], "elasticPolicy": {"replicaDiscreteValues": [9]}}}, "none from minReplicas"),
        ({"spec": {**JOB["spec"], "runPolicy": ["All"]}}, "spec.runPolicy is no mapping"),
    ],
)
def test_what_cannot_be_is_named_with_its_field(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        convert_job({**JOB, **change})


def test_the_command_prints_the_job_and_says_what_has_no_counterpart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    other = {"kind": "ConfigMap", "metadata": {"name": "c"}}
    path.write_text(yaml.safe_dump_all([JOB, other]))
    assert main(["guest", "convert", str(path)]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out) == made().manifest
    assert all(f"regrow: {note}" in said.err for note in made().notes)
    assert "ConfigMap in the same file" in said.err


def test_nothing_is_printed_where_a_field_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    theirs = copy.deepcopy(JOB)
    theirs["spec"]["runPolicy"]["newThing"] = 1
    path.write_text(yaml.safe_dump(theirs))
    assert main(["guest", "convert", str(path)]) == 1
    said = capsys.readouterr()
    assert not said.out and "spec.runPolicy.newThing is not known here" in said.err


@pytest.mark.parametrize(
    ("text", "says"), [("a: [", "is no YAML"), ("", "nothing of the kind"), ("kind: Pod", "and has Pod")]
)
def test_files_that_are_no_job_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert main(["guest", "convert", str(path)]) == 2
    assert says in capsys.readouterr().err


CORE_SCHEMA = re.compile(
    r"~|null|Null|NULL|true|True|TRUE|false|False|FALSE|[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
    r"|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)|"
)
"""Plain scalars that YAML 1.2.2, section 10.3.2, reads as something else than a text."""
TEXTS = [
    *(
        "--lr",
        "1e-4",
        "1e5",
        "-3",
        "0x1F",
        "0o17",
        "010",
        ".5",
        "1_000",
        "1:30",
        "2024-01-01",
        "~",
        "null",
        "yes",
        "Off",
    ),
    *(
        "no",
        "y",
        "True",
        ".inf",
        "-.inf",
        "",
        " a",
        "a: b",
        "- a",
        "#a",
        "a #b",
        "*a",
        "&a",
        "!a",
        "%a",
        "@a",
        "a\nb",
        "ü",
    ),
]


def leaves(found: Any) -> list[Any]:
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else None
    return [found] if inner is None else [leaf for each in inner for leaf in leaves(each)]


def test_every_text_of_a_converted_job_is_a_text_to_readers_of_yaml_1_2(tmp_path: Path) -> None:
    theirs = copy.deepcopy(JOB)
    container = theirs["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    container["args"] = ["train.py", *TEXTS]
    container["env"] = [{"name": f"V{at}", "value": text} for at, text in enumerate(TEXTS)]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(theirs))
    text = converted(path).text
    assert yaml.safe_load(text) == convert_job(theirs).manifest
    plain = [node.value for node in yaml.parse(text) if isinstance(node, yaml.ScalarEvent) and node.style is None]
    others = [leaf for leaf in leaves(convert_job(theirs).manifest) if not isinstance(leaf, str)]
    assert [value for value in plain if CORE_SCHEMA.fullmatch(value)] == [
        yaml.safe_dump(leaf).split()[0] for leaf in others
    ]
    assert not {"yes", "Off", "no", "y", "1_000", "1:30", "2024-01-01"} & set(plain), "YAML 1.1 takes them for others"

"""Manifests for JobSet and Kubeflow Trainer, and what a pod of theirs runs."""

import copy
import datetime
import http.client
import http.server
import json
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest
import trustme
from tests.cluster.fake_jobset import from_train_job

from regrow.core.errors import CoordinatorGone, UsageError
from regrow.launch.remote import CoordinatorClient
from regrow.observe.watch.present import JobFigures
from regrow_guests import tied
from regrow_guests.command import guest
from regrow_guests.pods.arguments import PodPlace, run_arguments
from regrow_guests.pods.manifests import GuestJob, jobset, training_runtime
from regrow_guests.pods.progress import TrainJobProgress
from regrow_guests.pods.reporting import StatusReporter, StatusServer, run_and_report

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install -r requirements-dev.txt")
JOB = GuestJob("gpt", "team/train:1", nodes=3, spares=1, gpus=8, checkpoint_dir="/ckpt/", words=("train.py", "--lr=1"))

# Allowed fields, and among them (*) those that must be there, of kubernetes-sigs/jobset 0.12 `jobset_types.go`, and of
# kubeflow/trainer 2.3 `trainingruntime_types.go`; rules of their webhooks are asserted one by one below.
FIELDS: dict[str, set[str]] = {
    "JobSet.spec": {
        *("*replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator"),
        *("managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies"),
    },
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "successPolicy": {"*operator", "targetReplicatedJobs"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "rule": {
        *("*name", "*action", "onJobFailureReasons", "onJobFailureMessagePatterns", "targetReplicatedJobs"),
    },
    "replicatedJob": {"*name", "groupName", "*template", "replicas", "dependsOn"},
    "ClusterTrainingRuntime.spec": {"mlPolicy", "podGroupPolicy", "template"},
    "mlPolicy": {"numNodes", "torch", "mpi", "flux", "jax", "xgboost"},
}


def held(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """Hold an object against the table."""
    known = {name.lstrip("*") for name in FIELDS[kind]}
    needed = {name[1:] for name in FIELDS[kind] if name.startswith("*")}
    assert set(found) <= known and needed <= set(found), (kind, sorted(found))
    return found


def check_set(spec: dict[str, Any]) -> dict[str, Any]:
    """Hold a JobSet's spec against the table and the rules of its webhook; the spec of its one Job."""
    held("JobSet.spec", spec)
    held("network", spec["network"])
    (replicated,) = spec["replicatedJobs"]
    held("replicatedJob", replicated)
    success = held("successPolicy", spec["successPolicy"])
    assert success["operator"] in ("All", "Any") and success["targetReplicatedJobs"] == [replicated["name"]]
    for rule in held("failurePolicy", spec["failurePolicy"])["rules"]:
        held("rule", rule)
        assert rule["name"].isalpha() and rule["action"] == "FailJobSet"
        assert set(rule["onJobFailureReasons"]) <= {"PodFailurePolicy", "BackoffLimitExceeded"}
    return dict(replicated["template"])


@pytest.mark.parametrize("version", ["1.33", "1.37"])
@pytest.mark.parametrize("make", [jobset, training_runtime])
def test_manifests_are_what_the_published_types_allow(make: Callable[[GuestJob], dict[str, Any]], version: str) -> None:
    found = make(JOB)
    spec = found["spec"]
    if make is training_runtime:
        held("ClusterTrainingRuntime.spec", spec)
        assert held("mlPolicy", spec["mlPolicy"]) == {"numNodes": 3, "torch": {}}
        spec = spec["template"]["spec"]
    template = check_set(copy.deepcopy(spec))
    name = f"{found['metadata']['name']}-node-0"
    of_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": template["spec"]}
    kubernetes_validate.validate(of_job, version, strict=True)
    # Rules of batch/v1 that no schema has.
    assert template["spec"]["podReplacementPolicy"] == "Failed" and "podFailurePolicy" in template["spec"]
    assert template["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert template["spec"]["completionMode"] == "Indexed" and template["spec"]["successPolicy"]


def test_trainer_finds_its_step_and_its_container() -> None:
    found = training_runtime(JOB)
    assert found["metadata"]["labels"] == {"trainer.kubeflow.org/framework": "torch"}
    (replicated,) = found["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = replicated["template"]["spec"]
    assert not {"completions", "parallelism"} & set(job), "numNodes of the TrainJob decides"
    assert [each["name"] for each in job["template"]["spec"]["containers"]] == [replicated["name"]] == ["node"]


def test_only_ends_that_starting_again_does_not_mend_end_the_job() -> None:
    (replicated,) = jobset(JOB)["spec"]["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    said = [(rule["action"], (rule.get("onExitCodes") or {}).get("values")) for rule in rules]
    assert said == [("Ignore", None), ("Ignore", [75]), ("FailJob", [1, 76])]
    assert 2 not in rules[2]["onExitCodes"]["values"], "a pod that comes back as the job ends is refused with it"
    environment = replicated["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "REGROW_GIVEN_BACK_CODE", "value": "75"} in environment, "0 would be the end of the pod's part"


def test_a_pod_begins_the_job_and_comes_back_into_it_by_the_same_words() -> None:
    place = PodPlace("gpt", 3, 1, 8, "gpt-node-0-0.gpt:29400", "10.0.0.7", spares=1, checkpoint_dir="/ckpt/gpt")
    assert run_arguments(place, ["train.py", "--lr=1"]) == [
        *("run", "--job=gpt", "--nproc-per-node=8", "--replicas=16:16", "--replica-ranks=1", "--nnodes=3:3"),
        *("--node-rank=1", "--rdzv-endpoint=gpt-node-0-0.gpt:29400", "--bind=10.0.0.7", "--local-addr=10.0.0.7"),
        *("--drain-grace=30s", "--spares=1", "--no-elect", "--checkpoint-dir=/ckpt/gpt", "--resume=auto"),
        *("train.py", "--lr=1"),
    ]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (PodPlace("gpt", 2, 2, 1, "h:1", "h"), "--node-rank 2"),
        (PodPlace("gpt", 2, 0, 1, "h:1", "h", spares=2), "--spares 2"),
        (PodPlace("gpt", 2, 0, 2, "h:1", "h", replica_ranks=3), "--replica-ranks 3"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(place: PodPlace, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run_arguments(place, ["train.py"])


def test_the_command_prints_a_runtime_or_a_jobset() -> None:
    def told(*words: str) -> dict[str, Any]:
        done = click.testing.CliRunner().invoke(guest, ["runtime", "--image=i", *words], standalone_mode=False)
        assert done.exception is None, done.exception
        return dict(json.loads(done.output))

    assert told("--nodes=4") == training_runtime(GuestJob("regrow", "i", nodes=4))
    made = jobset(GuestJob("gpt", "i", ranks="8", words=("--check-for-nan", "train.py")))
    assert told("--jobset", "--name=gpt", "--ranks=8", "--", "--check-for-nan", "train.py") == made
    with pytest.raises(UsageError, match="needs a script"):
        click.testing.CliRunner().invoke(
            guest, ["runtime", "--image=i", "--jobset"], standalone_mode=False, catch_exceptions=False
        )


def test_progress_is_in_the_limits_of_a_trainjobs_status() -> None:
    at = datetime.datetime(2026, 8, 1, tzinfo=datetime.UTC)
    pace = TrainJobProgress(200)
    assert pace.body(JobFigures(50, 0), 10.0, at)["trainerStatus"]["progressPercentage"] == 25
    status = pace.body(JobFigures(100, 2, 0.98), 20.0, at)["trainerStatus"]
    metrics = {each["name"]: each["value"] for each in status["metrics"]}
    assert metrics == {"step": "100", "incidents": "2", "goodput": "0.9800"}
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (50, 20)
    assert status["lastUpdatedTime"] == "2026-08-01T00:00:00+00:00"
    assert pace.body(JobFigures(900, 2), 30.0, at)["trainerStatus"]["progressPercentage"] == 100
    assert "progressPercentage" not in TrainJobProgress(0).body(JobFigures(-1, 0), 1.0, at)["trainerStatus"]


class _Status(http.server.BaseHTTPRequestHandler):
    heard: list[tuple[str, str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.heard.append((self.path, self.headers["Authorization"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def status_server(tmp_path: Path) -> Iterator[tuple[StatusServer, list[Any]]]:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    class Handler(_Status):
        heard: list[tuple[str, str, Any]] = []

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text("first\n")
    url = f"https://127.0.0.1:{server.server_port}/apis/trainjobs/gpt/status"
    yield StatusServer(url, tmp_path / "ca.crt", tmp_path / "token"), Handler.heard
    server.shutdown()
    serving.join()
    server.server_close()


def test_a_trainjobs_status_is_told_with_the_token_as_it_is_now(
    status_server: tuple[StatusServer, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, heard = status_server
    figures = iter([JobFigures(5, 0), None, JobFigures(10, 1)])

    def ask(_: CoordinatorClient) -> JobFigures:
        found = next(figures)
        if found is None:
            raise CoordinatorGone("nobody answers")
        return found

    monkeypatch.setattr(CoordinatorClient, "figures", ask)
    teller = StatusReporter(server, "127.0.0.1:1", "secret", 10)
    assert teller.report() == ""
    server.token.write_text("second")
    assert teller.report() == "", "the last that is known is told"
    assert teller.report() == ""
    assert [(path, token) for path, token, _ in heard] == [
        ("/apis/trainjobs/gpt/status", f"Bearer {each}") for each in ("first", "second", "second")
    ]
    assert [body["trainerStatus"]["progressPercentage"] for *_, body in heard] == [50, 50, 100]


def test_a_server_that_does_not_take_it_costs_a_line_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text("first")
    monkeypatch.setattr(CoordinatorClient, "figures", lambda _: JobFigures(5, 0))
    server = StatusServer("https://127.0.0.1:1/status", tmp_path / "ca.crt", tmp_path / "token")
    assert "was not reported" in StatusReporter(server, "127.0.0.1:1", "secret", 0).report()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Instead of regrow, a process that ends with 7 as soon as this file is there."""
    over = tmp_path / "over"
    waits = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nsys.exit(7)"
    monkeypatch.setattr(tied, "command", lambda _: [sys.executable, "-c", waits, str(over)])
    return over


def test_telling_that_fails_in_any_way_leaves_the_node_its_own_end(
    node: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(StatusReporter):
        times = 0

        def __init__(self) -> None:
            """Nothing."""

        def report(self) -> str:
            self.times += 1
            if self.times == 3:
                node.touch()
            raise http.client.BadStatusLine("220 smtp")

    assert run_and_report(["run"], Broken(), every=0.01) == 7
    assert capfd.readouterr().out.count("was not reported: BadStatusLine: 220 smtp") == 1


def test_telling_that_never_comes_back_does_not_hold_up_the_end(node: Path) -> None:
    let_go = threading.Event()

    class Stuck(StatusReporter):
        def __init__(self) -> None:
            """Nothing."""

        def report(self) -> str:
            node.touch()
            assert let_go.wait(60), "the node's end waits for its answer"
            return ""

    began = time.monotonic()
    try:
        assert run_and_report(["run"], Stuck(), every=0.01) == 7
        assert time.monotonic() - began < 50
    finally:
        let_go.set()


def test_what_trainer_makes_of_a_runtime_has_every_variable_that_the_command_names() -> None:
    trainer = {"numNodes": 4, "numProcPerNode": 8, "args": ["train.py", "--lr", "1e-3"]}
    train_job = {"metadata": {"name": "gpt"}, "spec": {"trainer": trainer}, "port": 29400}
    made = from_train_job(training_runtime(JOB), train_job, {})
    (replicated,) = made["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    named = set(re.findall(r"\$\((\w+)\)", " ".join(container["command"])))
    assert named <= {each["name"] for each in container["env"]} and "PET_NNODES" in named
    assert (job["completions"], container["args"]) == (4, ["train.py", "--lr", "1e-3"])

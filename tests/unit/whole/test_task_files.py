"""Task files for SkyPilot and dstack: fields that these know, values that they take, scripts that a shell reads.

Both were also read by the systems' own code: SkyPilot 0.14.1's schemas of a task, dstack 0.22.5's configurations.
"""

import subprocess
from typing import Any

import pytest
from tests.process.task_files import dstack, dstack_env, dstack_script, sky, sky_script

from regrow.core.exit_codes import RUN_AGAIN

# docs.skypilot.co, SkyPilot YAML; dstack.ai/docs/reference/dstack.yml/task.
SKY_TASK = {"name", "num_nodes", "resources", "workdir", "file_mounts", "envs", "secrets", "setup", "run"}
SKY_RESOURCES = {"accelerators", "use_spot", "job_recovery"}
SKY_RECOVERY = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
DSTACK_TASK = {
    *("type", "name", "nodes", "python", "spot_policy", "resources", "retry", "max_duration", "env", "volumes"),
    "commands",
}
EVENTS = {"no-capacity", "interruption", "error"}


@pytest.mark.parametrize("name", ["gang", "join"])
def test_a_task_of_skypilot_has_fields_that_it_knows_and_begins_again_for_the_machines_alone(name: str) -> None:
    task = sky(name)
    assert set(task) <= SKY_TASK and set(task["resources"]) <= SKY_RESOURCES
    recovery = task["resources"]["job_recovery"]
    assert set(recovery) <= SKY_RECOVERY and recovery["recover_on_exit_codes"] == [RUN_AGAIN]
    assert task["resources"]["use_spot"] is (name == "join")
    assert task["secrets"] == {"REGROW_TOKEN": None}, "its user gives it"
    assert all(value is None or isinstance(value, str) for value in task["envs"].values())


@pytest.mark.parametrize("name", ["gang", "join"])
def test_a_task_of_dstack_has_fields_that_it_knows(name: str) -> None:
    task = dstack(name)
    assert set(task) <= DSTACK_TASK and task["type"] == "task"
    assert task["spot_policy"] == {"gang": "on-demand", "join": "spot"}[name]
    assert set(task["retry"]) == {"on_events", "duration"} and set(task["retry"]["on_events"]) <= EVENTS
    assert "REGROW_TOKEN" in task["env"], "without a value: its user gives it"


@pytest.mark.parametrize("script", [sky_script(sky("gang")), sky_script(sky("join"))])
def test_a_shell_reads_the_scripts_of_skypilot(script: str) -> None:
    subprocess.run(["bash", "-n", "-c", script], check=True)


@pytest.mark.parametrize("script", [dstack_script(dstack("gang")), dstack_script(dstack("join"))])
def test_the_shells_that_dstack_takes_read_its_scripts(script: str) -> None:
    for shell in ("sh", "bash"):
        subprocess.run([shell, "-n", "-c", script], check=True)


def test_both_have_the_same_variables_and_do_the_same_with_a_machine_that_joins() -> None:
    def plain(script: str) -> str:
        return script.replace("SKYPILOT_NODE_IPS", "IPS").replace("DSTACK_NODES_IPS", "IPS").strip()

    assert plain(sky_script(sky("join"))) == plain(dstack_script(dstack("join")))
    for name in ("gang", "join"):
        given: dict[str, Any] = {key: str(value) for key, value in sky(name)["envs"].items() if value is not None}
        assert dstack_env(dstack(name)) == given


@pytest.mark.parametrize("token", ["", "None", "short"])
def test_no_script_begins_with_a_token_that_can_be_guessed(token: str) -> None:
    for script in (*map(sky_script, (sky("gang"), sky("join"))), *map(dstack_script, (dstack("gang"), dstack("join")))):
        env = {"REGROW_TOKEN": token, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout) == (2, "give REGROW_TOKEN, of 32 characters or more\n")

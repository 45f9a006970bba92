"""TrainingJobs for tests."""

from typing import Any

from regrow_clusters.operator.resource import GROUP, KIND, VERSION


def training_job(name: str = "job", namespace: str = "team", **spec: Any) -> dict[str, Any]:
    """As a user would write it."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicaCount": 2,
            "script": ["train.py"],
            "template": {"spec": {"containers": [{"name": "train", "image": "team/train:1"}]}},
            **spec,
        },
    }

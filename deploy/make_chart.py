"""Writes `deploy/chart`, a Helm chart, from the manifests that `regrow operator manifests` prints.

`python deploy/make_chart.py`; a test holds the chart against the manifests, so run it again when these change.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from regrow import __version__
from regrow_clusters.operator.manifests import KEY_SECRET, NAME, manifests

CHART: Final = Path(__file__).resolve().parent / "chart"
_NAMESPACE: Final = "{{ .Release.Namespace }}"
_IMAGE: Final = "{{ .Values.image }}"
_KEPT: Final = {"helm.sh/resource-policy": "keep"}
"""Of the CRD: with it Kubernetes would delete every TrainingJob."""


def files() -> dict[str, str]:
    """Text of each file of the chart, by its path in it."""
    return {
        "Chart.yaml": (
            f"apiVersion: v2\nname: {NAME}\ndescription: TrainingJobs of regrow, and the operator that runs them.\n"
            f'type: application\nversion: {__version__}\nappVersion: "{__version__}"\nkubeVersion: ">=1.28.0-0"\n'
        ),
        "values.yaml": (
            "# Of deploy/Dockerfile.\nimage: regrow:latest\n"
            "# With the right to taint nodes that jobs have quarantined.\nmarkNodes: false\n"
        ),
        "templates/operator.yaml": _templates(),
        "templates/NOTES.txt": (
            "The operator starts when it has the key from which the secrets of jobs are made:\n\n"
            f"  head -c 32 /dev/urandom | base64 | kubectl -n {_NAMESPACE} \\\n"
            f"    create secret generic {KEY_SECRET} --from-file=key=/dev/stdin\n"
        ),
    }


def _templates() -> str:
    """All objects but the namespace, which Helm makes; the CRD among them, as Helm never upgrades those in `crds/`."""
    text = []
    pairs = zip(_objects(mark_nodes=False), _objects(mark_nodes=True), strict=True)
    for plain, marking in pairs:
        if plain == marking:
            text.append(f"---\n{_document(plain)}")
        else:
            either = (f"{{{{- if .Values.markNodes }}}}\n{_document(marking)}", f"{{{{- else }}}}\n{_document(plain)}")
            text.append(f"---\n{''.join(either)}{{{{- end }}}}\n")
    return "".join(text)


def _objects(*, mark_nodes: bool) -> list[dict[str, Any]]:
    found = manifests(namespace=_NAMESPACE, image=_IMAGE, mark_nodes=mark_nodes)
    for each in found:
        if each["kind"] == "CustomResourceDefinition":
            each["metadata"]["annotations"] = {**(each["metadata"].get("annotations") or {}), **_KEPT}
    return [each for each in found if each["kind"] != "Namespace"]


def _document(found: dict[str, Any]) -> str:
    return f"{json.dumps(found, indent=2)}\n"


def main() -> int:
    """Write all files."""
    for path, text in files().items():
        (CHART / path).parent.mkdir(parents=True, exist_ok=True)
        (CHART / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

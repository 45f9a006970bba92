"""The Helm chart is what the manifests are, and is what was written last."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from regrow_clusters.operator.manifests import manifests

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def making() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_chart", ROOT / "deploy" / "make_chart.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def rendered(text: str, values: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    """As Helm renders the few words that the chart uses: values, the release's namespace, if/else of a value."""
    either = r"\{\{- if \.Values\.(\w+) \}\}(.*?)\{\{- else \}\}(.*?)\{\{- end \}\}"
    text = re.sub(either, lambda found: found.group(2 if values[found.group(1)] else 3), text, flags=re.S)
    text = re.sub(r"\{\{ \.Values\.(\w+) \}\}", lambda found: str(values[found.group(1)]), text)
    text = text.replace("{{ .Release.Namespace }}", namespace)
    assert "{{" not in text
    return [each for each in yaml.safe_load_all(text) if each]


@pytest.mark.parametrize("marks", [False, True])
def test_the_chart_installs_what_the_manifests_do(marks: bool) -> None:
    chart = ROOT / "deploy" / "chart"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert values == {"image": "regrow:latest", "markNodes": False}
    told = values | {"image": "registry.example/regrow:1", "markNodes": marks}
    found = rendered((chart / "templates" / "operator.yaml").read_text(), told, "training")
    crd = next(each for each in found if each["kind"] == "CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}, "jobs outlive the release"
    wanted = manifests(namespace="training", image="registry.example/regrow:1", mark_nodes=marks)
    assert found == json.loads(json.dumps([each for each in wanted if each["kind"] != "Namespace"]))


def test_the_chart_was_written_again_when_the_manifests_changed(making: ModuleType) -> None:
    files = {path: (making.CHART / path).read_text() for path in making.files()}
    assert files == making.files(), "python deploy/make_chart.py"
    there = {str(path.relative_to(making.CHART)) for path in making.CHART.rglob("*") if path.is_file()}
    assert there == set(files)


def test_the_chart_has_the_fields_that_helm_asks_for(making: ModuleType) -> None:
    head = yaml.safe_load(making.files()["Chart.yaml"])
    assert head["apiVersion"] == "v2" and head["name"] == "regrow-operator" and head["type"] == "application"
    assert re.fullmatch(r"\d+\.\d+\.\d+", head["version"]) and head["appVersion"] == head["version"]

"""Reference of metrics, environment variables and Kubernetes' resource, made from the code."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from website.commands import Verb, anchor, below, names_of, root
from website.tables import cell, code, table


class Metric(NamedTuple):
    """A series as the code declares it."""

    name: str
    kind: str
    text: str
    served: str


def metrics(sources: Sequence[Path]) -> list[Metric]:
    """All series that the packages make, each with the room that makes it."""
    found: list[Metric] = []
    for source in sources:
        for path in sorted(source.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "series_of(" in text:
                found += _declared(ast.parse(text), ".".join(path.relative_to(source.parent).with_suffix("").parts[:2]))
    return found


def _declared(tree: ast.Module, room: str) -> Iterator[Metric]:
    texts = {
        node.targets[0].id: _written(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="series_of"), args=[ast.Constant(value=str(name)), text, *rest]):
                told = texts.get(text.id, "") if isinstance(text, ast.Name) else _written(text)
                kinds = [each.value for each in rest[1:] if isinstance(each, ast.Constant)]
                kinds += [each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)]
                yield Metric(name, str(kinds[0]) if kinds else "gauge", told, room)


def _written(node: ast.expr) -> str:
    """A text as it stands in the code, with `…` for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


def metrics_page(sources: Sequence[Path]) -> str:
    """The page of all series."""
    rows = [
        (code(each.name), each.kind, cell(each.text), code(each.served))
        for each in sorted(set(metrics(sources)), key=lambda each: (each.name.startswith("regrow_batch"), each))
    ]
    return (
        "# Metrics\n\nSeries in Prometheus' text format. The coordinator serves a job's with `regrow run --watch`, "
        "each agent its node's with `--node-metrics`, and the head of a batch its own. [Monitoring](../monitoring.md) "
        "says which to look at, and what each label means.\n\n" + table(("series", "kind", "meaning", "made by"), rows)
    )


def variables(sources: Sequence[Path]) -> Mapping[str, str]:
    """Environment variables that the code reads or sets, each with the sentence beside it, empty where none is."""
    found: dict[str, str] = {}
    for source in sources:
        for path in sorted(source.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for name in set(re.findall(r"\bREGROW_[A-Z][A-Z_]*[A-Z]\b", text)):
                found[name] = found.get(name) or (_beside(name, ast.parse(text)) if path.name == "config.py" else "")
    return dict(sorted(found.items()))


def _beside(name: str, tree: ast.Module) -> str:
    """The docstring that names a variable, else that of the function or class which uses it."""
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    texts = [(ast.get_docstring(node) or "", ast.unparse(node)) for node in documented]
    for text, _ in texts:
        if name in text:
            return text.partition("\n\n")[0]
    return next((text.partition("\n\n")[0] for text, whole in texts if name in whole), "")


def environment_page(sources: Sequence[Path]) -> str:
    """The page of environment variables."""
    by_flag: dict[str, list[tuple[str, Verb, click.Option]]] = {}
    for verb in below(root()):
        for option in verb.options:
            for name in re.findall(r"REGROW_[A-Z_]*[A-Z]", f"{option.envvar or ''} {option.help or ''}"):
                by_flag.setdefault(name, []).append((names_of(option)[0], verb, option))
    rows = []
    for name, text in variables(sources).items():
        # A flag of `regrow run` is linked there, whatever else takes it.
        taken = sorted(by_flag.get(name, []), key=lambda each: each[1].words != ("run",), reverse=True)
        flags = {flag: verb for flag, verb, _ in taken}
        told = text or next((option.help or "" for _, _, option in by_flag.get(name, [])), "")
        shown = ", ".join(f"[`{flag}`](cli/{anchor(verb)})" for flag, verb in flags.items())
        rows.append((code(name), cell(told) or "Set by regrow for its own processes.", shown))
    return (
        "# Environment variables\n\nAn argument comes before the environment, the environment before a default.\n\n"
        + table(("variable", "meaning", "flag"), rows)
    )


def _rows(node: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str, str, str]]:
    required = set(node.get("required", ()))
    for name, each in node.get("properties", {}).items():
        path = f"{before}.{name}"
        kind = str(each.get("type", "any"))
        inner = each.get("items", {})
        if kind == "array":
            kind = f"array of {inner.get('type', 'any')}"
        if "enum" in each:
            kind = f"{kind}: {', '.join(map(str, each['enum']))}"
        default = each.get("default", "")
        told = str(each.get("description", "")) + (" Required." if name in required else "")
        yield code(path), cell(kind), code(default if default != {} and default != [] else ""), cell(told)
        yield from _rows(each, path)
        yield from _rows(inner, f"{path}[]")


def resource_page(crd: Mapping[str, Any]) -> str:
    """The page of a custom resource, from its definition."""
    version = crd["spec"]["versions"][0]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    names = crd["spec"]["names"]
    rules = [
        cell(rule["message"])
        for node in (version["schema"]["openAPIV3Schema"], properties["spec"])
        for rule in node.get("x-kubernetes-validations", ())
    ]
    head = ("field", "type", "default", "meaning")
    columns = [
        (each["name"], code(each["jsonPath"]), cell(each["description"]))
        for each in version["additionalPrinterColumns"]
    ]
    return "\n".join(
        [
            f"# {names['kind']}\n",
            f"Group `{crd['spec']['group']}`, version `{version['name']}`; `kubectl get {names['plural']}` or "
            f"`{names['shortNames'][0]}`. `regrow operator manifests` prints the definition. "
            "[Kubernetes](../../kubernetes.md) has a guide.\n",
            f"## Specification\n\n{table(head, _rows(properties['spec'], '.spec'))}",
            "The API server refuses what breaks one of these rules:\n\n"
            + "\n".join(f"* {rule}" for rule in rules)
            + "\n",
            f"## Status\n\n{table(head, _rows(properties['status'], '.status'))}",
            f"## Columns\n\n{table(('column', 'from', 'meaning'), columns)}",
        ]
    )

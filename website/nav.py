"""Order of the pages: four parts. A page that has no place here stands at the end of the guides."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

START = ("index.md", "start.md", "commands.md", "files/examples.md")
GUIDES: Mapping[str, Sequence[str]] = {
    "Your script": (
        *("parallelism.md", "adopt.md", "epochs.md", "trainings.md"),
        *("habits.md", "recipes.md", "hyperpod.md"),
    ),
    "Jobs that grow and shrink": ("elastic.md",),
    "Data": ("data.md",),
    "Faults": ("detection.md", "health.md", "proof.md", "limits.md"),
    "Watching a job": ("monitoring.md",),
    "Clusters": ("slurm.md", "kubernetes.md", "kubernetes-runbook.md", "guests.md", "security.md"),
    "Accelerators": ("cuda.md", "accelerators.md", "torch-versions.md"),
    "Planning": ("planning.md", "simulator.md"),
    "After training": ("inference.md",),
}
REFERENCE = ("reference/records.md", "reference/messages.md", "reference/metrics.md", "reference/environment.md")
INSIDE = ("architecture.md", "protocol.md", "state.md", "critiques.md", "benchmarks.md", "tests.md")
PROJECT = ("contributing.md", "changelog.md")


def ordered(pages: Iterable[str]) -> list[Any]:
    """The navigation over these pages, as mkdocs reads it; each page but decisions and files is in it once."""
    there = set(pages)
    guides: list[Any] = ["guides/index.md"]
    for title, names in GUIDES.items():
        if found := [name for name in names if name in there]:
            guides.append({title: found})
    inside: list[Any] = [name for name in INSIDE if name in there]
    inside += [{"Decisions": ["decisions/index.md"]}, *(name for name in PROJECT if name in there)]
    reference: list[Any] = ["reference/index.md"]
    for title, folder in (("Commands", "reference/cli/"), ("Python", "reference/api/"), ("Packages", "packages/")):
        found = sorted(name for name in there if name.startswith(folder))
        reference.append({title: sorted(found, key=lambda name: not name.endswith(("/index.md", "api/regrow.md")))})
    single = [*REFERENCE, *sorted(name for name in there if name.startswith("reference/resources/"))]
    reference += [name for name in single if name in there]
    placed = {*START, "how/index.md", *_flat(guides), *_flat(reference), *_flat(inside)}
    further = sorted(
        name for name in there - placed if not name.startswith(("decisions/", "files/")) and name.endswith(".md")
    )
    if further:
        guides.append({"Further": further})
    return [
        {"Get started": [name for name in START if name in there]},
        {"Guides": guides},
        {"Reference": reference},
        {"How it works": ["how/index.md", *inside]},
    ]


def _flat(entries: Iterable[Any]) -> Iterable[str]:
    for each in entries:
        if isinstance(each, str):
            yield each
        else:
            for inner in each.values():
                yield from _flat(inner)

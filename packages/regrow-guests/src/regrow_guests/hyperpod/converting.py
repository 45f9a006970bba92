"""`regrow guest convert`: reads the file of a HyperPod job, and writes a TrainingJob."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line
from regrow_guests.hyperpod.fields import convert_job


@dataclass(frozen=True)
class ConvertedText:
    """A TrainingJob as YAML, with notes for the user and the unknown fields."""

    text: str
    notes: list[str]
    unknown: list[str]


def converted(path: Path, *, script: str = "", pods_per_replica: int = 1) -> ConvertedText:
    """Convert the one HyperPod job in a file. Raises `UsageError`, which names the field and its cure."""
    try:
        import yaml
    except ImportError as error:
        raise UsageError(
            "HyperPod's jobs are YAML", hint=install_line("kubernetes", package="regrow-clusters")
        ) from error
    try:
        documents = [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each is not None]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    jobs = [each for each in documents if _is_job(each)]
    others = [str(each.get("kind", "")) for each in documents if isinstance(each, dict) and each not in jobs]
    if len(jobs) != 1:
        has = f"{len(jobs)} of them" if jobs else ", ".join(others) or "nothing of the kind"
        raise UsageError(f"{path} should have one HyperPodPyTorchJob, and has {has}", hint="give one job in a file")
    try:
        arguments = shlex.split(script)
    except ValueError as error:
        raise UsageError(f"--script {script!r} cannot be split into words: {error}") from error
    try:
        made = convert_job(jobs[0], script=arguments or None, pods_per_replica=pods_per_replica)
    except UsageError as error:
        raise UsageError(f"{path}: {error.cause}", hint=error.hint) from error
    notes = [*made.notes, *(f"{kind} in the same file: left as it is" for kind in others)]
    text = _written(made.manifest)
    return ConvertedText(text, notes, made.unknown)


_PLAIN = re.compile(r"(?:--?)?[A-Za-z_/][\w./@:=+,-]*")
_NO_TEXTS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


def _written(manifest: dict[str, Any]) -> str:
    """YAML text that parsers of YAML 1.1 and 1.2 read alike: every string that could be another type is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # ships no types
        """A dumper with its own representation of strings."""

    def text(dumper: Any, value: str) -> Any:
        plain = _PLAIN.fullmatch(value) and value.lower().lstrip("-") not in _NO_TEXTS and not value.endswith(":")
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else "'")

    Dumper.add_representer(str, text)
    return str(yaml.dump(manifest, Dumper=Dumper, sort_keys=False, width=120))


def _is_job(found: Any) -> bool:
    return isinstance(found, dict) and str(found.get("kind", "")).lower() == "hyperpodpytorchjob"

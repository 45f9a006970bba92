"""Releases: wheels and source distributions of all packages, looked into, installed and tried. `make dist`.

`python -m releases.check FOLDER PYTHON` takes what lies in FOLDER. PYTHON is an interpreter whose packages of other
people are lent to the environments in which the wheels are tried: the machine that releases may have no network.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
import tomllib
import venv
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DATA: Final = frozenset({".py", ".typed", ".toml", ".json", ".html", ".css", ".js"})
"""Suffixes of files that a package may have."""
STRAY: Final = re.compile(
    r"(^|/)(tests?|__pycache__|\.git|\.venv|build|dist)/|(^|/)(test_\w*|conftest)\.py$|\.(pyc|orig|rej|log)$|~$"
)
"""Names that have no business in a release."""

_JOB = 'name = "gpt"\nscript = ["train.py"]\nreplicaCount = 1\n'
_ROW = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}\n'
_FILES: Final = {"job.toml": _JOB, "in.jsonl": _ROW, "train.py": ""}
"""Files that the first commands of READMEs read."""


def packages() -> list[Path]:
    """The folder of each package."""
    return sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def module_of(package: Path) -> str:
    """The name under which a package is imported."""
    return package.name.replace("-", "_")


def names_in(file: Path) -> list[str]:
    """Files of a wheel or a source distribution."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return [name for name in wheel.namelist() if not name.endswith("/")]
    with tarfile.open(file) as source:
        return [member.name for member in source.getmembers() if not member.isdir()]


def wrong_in_wheel(module: str, names: Sequence[str], *, commands: bool) -> list[str]:
    """Faults of a wheel's contents, as sentences. `commands`: it announces some, or a program."""
    (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name} or {""}
    needed = {
        f"{module}/__init__.py",
        f"{module}/py.typed",
        f"{info}/METADATA",
        f"{info}/RECORD",
        f"{info}/licenses/LICENSE",
    }
    if commands:
        needed.add(f"{info}/entry_points.txt")
    wrong = [f"{name} is missing" for name in sorted(needed - set(names))]
    for name in names:
        first = name.partition("/")[0]
        if first not in (module, info):
            wrong.append(f"{name} is outside {module}")
        elif first == module and (STRAY.search(name) or Path(name).suffix not in DATA):
            wrong.append(f"{name} is no file of a package")
    return wrong


def wrong_in_source(module: str, names: Sequence[str]) -> list[str]:
    """Faults of a source distribution's contents, as sentences."""
    tops = {name.partition("/")[0] for name in names}
    if len(tops) != 1:
        return [f"it has {len(tops)} folders at its top: {', '.join(sorted(tops))}"]
    inner = [name.partition("/")[2] for name in names]
    needed = {
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        f"src/{module}/__init__.py",
        f"src/{module}/py.typed",
    }
    wrong = [f"{name} is missing" for name in sorted(needed - set(inner))]
    for name in inner:
        if name.startswith(f"src/{module}/"):
            if STRAY.search(name) or Path(name).suffix not in DATA:
                wrong.append(f"{name} is no file of a package")
        elif name not in needed and not re.fullmatch(r"build_\w+\.py|\.gitignore", name):
            wrong.append(f"{name} is outside src/{module}")
    return wrong


def first_command(readme: str) -> str:
    """The command in a README that follows its first `pip install`, without its comment."""
    lines = [line for line in readme.partition("```\n")[2].partition("```")[0].splitlines() if line.strip()]
    after = [line for line in lines if not line.startswith("pip install")]
    return re.sub(r"\s{2,}#.*|\s\|.*", "", after[0]).strip()


class _Answers(BaseHTTPRequestHandler):
    """A server of a model `m`, which says `yes` to all."""

    def do_GET(self) -> None:
        self._say({"object": "list", "data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        self._say({"id": "1", "object": "chat.completion", "model": "m", "choices": [choice]})

    def _say(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@contextmanager
def answering() -> Iterator[str]:
    """The address of such a server, on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def lend(python: Path, environment: Path) -> None:
    """Make packages that others wrote importable in an environment; none of this repository's."""
    ours = re.compile(r"_*(__editable__|" + "|".join(module_of(package) for package in packages()) + r")\b|.*\.pth$")
    asked = "import json, sys; print(json.dumps([path for path in sys.path if path.endswith('-packages')]))"
    folder = environment / "lent"
    folder.mkdir()
    for place in json.loads(subprocess.check_output([str(python), "-c", asked], text=True, timeout=60)):
        for path in Path(place).iterdir():
            if not ours.match(path.name) and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(f"{folder}\n")


def install(python: Path, environment: Path, wheels: Sequence[Path]) -> None:
    """Install wheels, and nothing that they need."""
    given = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check", *map(str, wheels)]
    command = [str(python), "-m", "pip", "--python", str(environment / "bin" / "python"), "install", *given]
    subprocess.run(command, check=True, timeout=300)


def needed_by(package: Path, built: Mapping[str, Path]) -> list[Path]:
    """The wheels of a package and of those of this repository that it needs."""
    wanted, found = [package.name], []
    while wanted:
        name = wanted.pop()
        if built[name] not in found:
            found.append(built[name])
            project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
            wanted += [each for line in project["dependencies"] if (each := line.partition("=")[0]) in built]
    return found


def needs_others(package: Path) -> bool:
    """True if a package depends on any other."""
    return bool(tomllib.loads((package / "pyproject.toml").read_text())["project"]["dependencies"])


def try_command(package: Path, environment: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the first command of a package's README in this folder."""
    for name, text in _FILES.items():
        (folder / name).write_text(text)
    with answering() as address:
        command = re.sub(
            r"http://h\d:\d+(,http://h\d:\d+)*", address, first_command((package / "README.md").read_text())
        )
        around = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "LANG": "C.UTF-8", "HOME": str(folder)}
        return subprocess.run(
            ["bash", "-c", command], cwd=folder, env=around, capture_output=True, text=True, timeout=600
        )


def check(folder: Path, python: Path, untried: Collection[str] = ()) -> list[str]:
    """Faults of all that lies in a folder of releases, as sentences. `untried`: packages whose command is not run."""
    wrong: list[str] = []
    built: dict[str, Path] = {}
    for package in packages():
        module = module_of(package)
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        wheels, archives = list(folder.glob(f"{module}-[0-9]*.whl")), list(folder.glob(f"{module}-[0-9]*.tar.gz"))
        if (len(wheels), len(archives)) != (1, 1):
            wrong.append(f"{package.name}: {len(wheels)} wheels and {len(archives)} source distributions, not 1 and 1")
            continue
        built[package.name] = wheels[0]
        names = names_in(wheels[0])
        commands = "scripts" in project or "entry-points" in project
        wrong += [f"{wheels[0].name}: {text}" for text in wrong_in_wheel(module, names, commands=commands)]
        wrong += [f"{archives[0].name}: {text}" for text in wrong_in_source(module, names_in(archives[0]))]
        print(f"{wheels[0].name}: {len(names)} files, {wheels[0].stat().st_size / 1024:.0f} KiB")
    if wrong:
        return wrong
    for package in packages():
        if package.name in untried:
            continue
        with tempfile.TemporaryDirectory() as place:
            environment = Path(place, "environment")
            venv.create(environment, symlinks=True)
            install(python, environment, needed_by(package, built))
            if needs_others(package):
                lend(python, environment)
            done = try_command(package, environment, Path(place))
        command = first_command((package / "README.md").read_text())
        print(f"{package.name}: `{command}` ended with {done.returncode}")
        if done.returncode:
            wrong.append(
                f"{package.name}: `{command}` ended with {done.returncode}: {done.stdout[-500:]} {done.stderr[-2000:]}"
            )
    return wrong


def main(words: Sequence[str]) -> int:
    """Check the releases in a folder."""
    folder, python = words
    wrong = check(Path(folder), Path(python))
    print("\n".join(wrong) or "all is as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Rules of the code that no linter knows: sizes, names, and where torch is used."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.sources import PACKAGES, ROOT, SOURCE, SOURCES

import regrow
from regrow.core.process.own_code import OWN_PACKAGES

MOST_FILE_LINES = 400
MOST_CLASS_LINES = 350
MOST_FILES = 24
MOST_PACKAGE_LINES = {"regrow": 83_350}
"""Of the engine; any other package has at most this many:"""
MOST_OTHER_LINES = 8_000

BESIDE_THE_ROOM = {
    ("data", "torch.utils.data._utils.pin_memory.pin_memory"),
    ("hydration", "torch.distributed.checkpoint.filesystem._StorageInfo"),
}
"""Below `comm`, so they cannot import its room: what DataLoader pins batches with, and a part of DCP's own format."""

TWO_MEANINGS = {"Ready", "Walk"}
"""Names of classes in the data room that stand for two things yet. None is to be added."""

EXPORTED = {
    "DataLoader",
    "Policy",
    "RegrowError",
    "ScaleEvent",
    "Session",
    "Step",
    "__version__",
    "cached",
    "init",
    "restartable",
}
"""Names that users import. A name comes here together with its documentation, and goes with a major version."""

CLAUSES = r"(What|Which|How|Who|Whom|Whose|Where|Whether|So)\b"
"""First words of a clause without its sentence: name the thing, say `True if`, or begin with a verb."""

QUANTITIES = r"\b[Ss]o (many|long|often|much|few)\b(?! (as|that|enough))"
"""Quantities without a name: name the parameter, or say `this number of`."""

TREES = ("packages", "src", "tests", "benchmarks", "examples", "website", "releases")


def sources(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def too_long_files(package: Path) -> Iterator[str]:
    for path in sources(package):
        lines = len(path.read_text().splitlines())
        if lines > MOST_FILE_LINES:
            yield f"{path.relative_to(package)} has {lines} lines"


def too_long_classes(package: Path) -> Iterator[str]:
    for path in sources(package):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_CLASS_LINES:
                    yield f"{node.name} in {path.relative_to(package)} has {lines} lines"


def too_full_folders(package: Path) -> Iterator[str]:
    for folder in sorted({path.parent for path in sources(package)}):
        files = len(list(folder.glob("*.py")))
        if files > MOST_FILES:
            yield f"{folder.relative_to(package)} has {files} files"


def meanings(*packages: Path) -> dict[str, list[str]]:
    """The places of each public class name."""
    found: dict[str, list[str]] = {}
    for package in packages:
        for path in sources(package):
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(str(path.relative_to(package)))
    return found


def ambiguous_names(*packages: Path) -> Iterator[str]:
    for name, places in meanings(*packages).items():
        if len(places) > 1 and name not in TWO_MEANINGS:
            yield f"{name}: {', '.join(places)}"


def torch_names_outside(package: Path, room: str) -> Iterator[tuple[Path, str]]:
    """Imports of what torch does not promise to keep, in other files than those of the room."""
    for path in sources(package):
        if (package / room) in path.parents:
            continue
        for node in ast.walk(parsed(path)):
            named: list[str] = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in named:
                words = name.split(".")
                if words[0] == "torch" and any(word.startswith("_") for word in words):
                    yield path.relative_to(package), name


def described(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes and functions, and those below attributes."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            for each in statements if isinstance(statements, list) else ():
                match each:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield each.lineno, text


def stiff_docstrings(root: Path) -> Iterator[str]:
    suspect = re.compile(rf"""["']\W*{CLAUSES}|{QUANTITIES}""")  # a text is parsed only where there may be one
    for path in (path for tree in TREES for path in sources(root / tree)):
        if suspect.search(path.read_text()):
            for line, text in described(parsed(path)):
                if found := re.match(rf"\W*{CLAUSES}", text) or re.search(QUANTITIES, text):
                    yield f"{path.relative_to(root)}:{line}: {found.group().strip()}"


def raw_tasks(package: Path) -> Iterator[str]:
    """Calls that make an asyncio task elsewhere than in the one place that sees to its exception."""
    for path in sources(package):
        if path.relative_to(package) == Path("core/process/tasks.py"):
            continue
        for node in ast.walk(parsed(path)):
            named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if named in ("create_task", "ensure_future", "TaskGroup"):
                yield f"{path.relative_to(package)} uses {named}"


each_package = pytest.mark.parametrize("package", SOURCES, ids=lambda package: package.name)


def lines_of(package: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in sources(package))


@each_package
def test_no_package_is_too_long(package: Path) -> None:
    assert lines_of(package) <= MOST_PACKAGE_LINES.get(package.name, MOST_OTHER_LINES)


def test_all_packages_are_looked_at() -> None:
    assert {path.name for path in SOURCES} == OWN_PACKAGES | {"lz_penalty"}
    assert [path.name.replace("-", "_") for path in PACKAGES] == [path.name for path in SOURCES]


@each_package
def test_no_file_is_too_long(package: Path) -> None:
    assert list(too_long_files(package)) == []


@each_package
def test_no_class_is_too_long(package: Path) -> None:
    assert list(too_long_classes(package)) == []


@each_package
def test_no_folder_is_too_full(package: Path) -> None:
    assert list(too_full_folders(package)) == []


def test_a_class_name_has_one_meaning() -> None:
    assert list(ambiguous_names(*SOURCES)) == []


def test_what_may_have_two_meanings_still_has() -> None:
    found = meanings(*SOURCES)
    assert {name for name in TWO_MEANINGS if len(found.get(name, [])) < 2} == set()


@each_package
def test_what_torch_does_not_promise_to_keep_is_imported_in_one_room(package: Path) -> None:
    outside = list(torch_names_outside(package, "comm/torch_private"))
    assert [found for found in outside if (found[0].parts[0], found[1]) not in BESIDE_THE_ROOM] == []


@each_package
def test_a_task_is_made_in_one_place(package: Path) -> None:
    assert list(raw_tasks(package)) == [], "see core/process/tasks.py"


def test_no_import_is_hidden_from_the_contracts() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert linter["exclude_type_checking_imports"] is False, "they would cross the rooms upwards unseen"
    ignored = {each["id"]: each["ignore_imports"] for each in linter["contracts"] if "ignore_imports" in each}
    assert set(ignored) == {"torch", "membership"}, "imports of others' libraries; none of our own is ignored"
    assert not any(" -> regrow" in line for lines in ignored.values() for line in lines)


def modules() -> dict[str, Path]:
    """Files of all packages by their names as modules; those of packages, which describe rooms, are left out."""
    files = [(package, path) for package in SOURCES for path in sources(package) if path.name != "__init__.py"]
    return {".".join(path.relative_to(package.parent).with_suffix("").parts): path for package, path in files}


def test_what_says_that_it_is_pure_is_in_the_contract_and_the_other_way_round() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (listed,) = [each["source_modules"] for each in contracts if each["id"] == "machines"]
    patterns = [re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")) for pattern in listed]
    held = {name for name in modules() if any(pattern.fullmatch(name) for pattern in patterns)}
    named = {name for name, path in modules().items() if re.search(r"\bPure\b", ast.get_docstring(parsed(path)) or "")}
    assert len(named) > 100
    assert sorted(named - held) == [], "add it to the contract `machines`, or do not say Pure"
    assert sorted(held - named) == [], "say Pure in its docstring"


def test_the_exported_names_are_frozen() -> None:
    assert set(regrow.__all__) == EXPORTED
    assert all(hasattr(regrow, name) for name in EXPORTED)


def test_each_of_these_would_be_seen(tmp_path: Path) -> None:
    room = tmp_path / "src/room"
    room.mkdir(parents=True)
    (room / "long.py").write_text("class Long:\n    x = 0\n" + "\n" * 350 + "    y = 0\n" + "\n" * 60)
    (room / "twin.py").write_text("class Long:\n    pass\n\n\nfrom torch.distributed._shard import api\n")
    (room / "file1.py").write_text("import asyncio\nasyncio.create_task(work())\nloop.ensure_future\n")
    for number in range(MOST_FILES):
        if number != 1:
            (room / f"file{number}.py").write_text("import torch._dynamo\n" if number == 0 else "")
    package = tmp_path / "src"
    assert list(too_long_files(package)) == ["room/long.py has 413 lines"]
    assert list(too_long_classes(package)) == ["Long in room/long.py has 353 lines"]
    assert sorted(raw_tasks(package)) == ["room/file1.py uses create_task", "room/file1.py uses ensure_future"]
    assert list(too_full_folders(package)) == [f"room has {MOST_FILES + 2} files"]
    assert list(ambiguous_names(package)) == ["Long: room/long.py, room/twin.py"]
    assert list(torch_names_outside(package, "elsewhere")) == [
        (Path("room/file0.py"), "torch._dynamo"),
        (Path("room/twin.py"), "torch.distributed._shard.api"),
    ]
    assert list(torch_names_outside(package, "room")) == []


@pytest.mark.parametrize("name", sorted(TWO_MEANINGS))
def test_exceptions_are_of_the_data_room(name: str) -> None:
    assert all(place.startswith(("data/", "step/")) for place in meanings(SOURCE)[name])


def test_a_torch_is_claimed_only_up_to_those_with_which_regrow_was_run() -> None:
    project = tomllib.loads((ROOT / "packages" / "regrow" / "pyproject.toml").read_text())["project"]
    (claimed,) = [each for each in project["dependencies"] if each.startswith("torch")]
    bounds = re.fullmatch(r"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)", claimed)
    assert bounds is not None, "without an upper bound a new torch is installed that nobody has tried"
    least, beyond = tuple(map(int, bounds.groups()[:2])), tuple(map(int, bounds.groups()[2:]))
    told = re.search(r"^(\d+)\.(\d+)\.\d+ stays beyond", (ROOT / "docs/torch-versions.md").read_text(), re.MULTILINE)
    assert told is not None and beyond <= tuple(map(int, told.groups()))
    installed = tuple(map(int, torch.__version__.split(".")[:2]))
    assert least <= installed < beyond


def test_docstrings_name_what_they_describe() -> None:
    assert list(stiff_docstrings(ROOT)) == [], "subject, verb, reason: see CONTRIBUTING.md for the tone"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What a script does.", "What"),
        ("*Whether* it is so.", "*Whether"),
        ("\n    Who wrote it first.", "Who"),
        ("So many ranks may die.", "So"),
        ("Waits for so long.", "so long"),
        ("Shows whether it is so.", ""),
        ("Waits so long that others may come.", ""),
        ("Whoever comes first wins.", ""),
    ],
)
@pytest.mark.parametrize("head", ["", "class Here:\n    ", "def here():\n    ", "class Here:\n    x = 1\n    "])
def test_a_stiff_docstring_would_be_seen(tmp_path: Path, head: str, text: str, found: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/file.py").write_text(f'{head}"""{text}"""\n')
    line = head.count("\n") + 1
    assert list(stiff_docstrings(tmp_path)) == ([f"src/file.py:{line}: {found}"] if found else [])


REWRITING = Path("core/process/rewriting.py")
"""The one file of the engine that changes frames of a script, or the class of an object. See decision 0110."""


def rewrites(package: Path) -> Iterator[tuple[Path, str]]:
    """Places that set an object's class, a frame's line, variables or tracer, or a thread's tracer."""
    changed, called = {"__class__", "f_lineno", "f_trace"}, {"settrace", "PyFrame_LocalsToFast"}
    for path in sources(package):
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) if name in changed:
                    yield path.relative_to(package), name
                case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name) if name in called:
                    yield path.relative_to(package), name
                case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=name), *_]) if name in changed:
                    yield path.relative_to(package), str(name)
                case ast.Attribute(value=ast.Attribute(attr="f_locals"), attr="update" as name):
                    yield path.relative_to(package), f"f_locals.{name}"
                case ast.Subscript(value=ast.Attribute(attr="f_locals"), ctx=ast.Store() | ast.Del()):
                    yield path.relative_to(package), "f_locals[]"


@each_package
def test_one_file_changes_frames_of_a_script_and_classes_of_objects(package: Path) -> None:
    assert [found for found in rewrites(package) if (package.name, found[0]) != ("regrow", REWRITING)] == []


def test_that_file_changes_each_of_them() -> None:
    found = {name for path, name in rewrites(SOURCE) if path == REWRITING}
    assert found == {"__class__", "f_lineno", "f_trace", "settrace", "PyFrame_LocalsToFast"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.__class__ = B", "__class__"),
        ("setattr(a, '__class__', B)", "__class__"),
        ("frame.f_lineno += 1", "f_lineno"),
        ("frame.f_trace = None", "f_trace"),
        ("from sys import settrace", "settrace"),
        ("threading.settrace(f)", "settrace"),
        ("frame.f_locals['x'] = 1", "f_locals[]"),
        ("frame.f_locals.update(x=1)", "f_locals.update"),
    ],
)
def test_a_change_of_a_frame_elsewhere_would_be_seen(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "file.py").write_text(f"{text}\n")
    assert list(rewrites(tmp_path)) == [(Path("file.py"), found)]


PRIVATE_IN_STRINGS = {
    ("regrow.data.cache.batch_maker", "_data_queue"),
    ("regrow.data.cache.batch_maker", "_reader"),
    ("regrow.data.cache.batch_maker", "_try_put_index"),
    ("regrow.data.cache.batch_maker", "_workers"),
    ("regrow.data.mapstyle", "_shutdown_workers"),
    ("regrow.train.graphs.kinds", "_inst"),
    ("regrow.train.graphs.kinds", "_rand"),
    ("regrow.train.script.namespaces", "_target"),
}
"""Of DataLoader's iterators, by rooms below `comm`; numpy's and Python's own generators; a thread's function."""
ROOMS_OF_PRIVATE_NAMES = ("regrow.comm.torch_private.", "regrow_recipes.adapters.private_")
PUBLIC = {"_fields"}
"""Python documents it, for named tuples."""


def private_in_strings(path: Path) -> Iterator[str]:
    """Names with an underscore that a file asks of other objects by `getattr` and the like, unseen by linters."""
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[thing, name, *_]):
                of_its_own = isinstance(thing, ast.Name) and thing.id in ("self", "cls")
                text = name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
                if text.startswith("_") and not text.startswith("__") and not of_its_own and text not in PUBLIC:
                    yield text


def test_private_names_in_strings_stay_in_their_rooms() -> None:
    rooms = ((name, path) for name, path in modules().items() if not name.startswith(ROOMS_OF_PRIVATE_NAMES))
    assert {(name, text) for name, path in rooms for text in private_in_strings(path)} == PRIVATE_IN_STRINGS


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("getattr(loader, '_reader')", ["_reader"]),
        ("hasattr(module, '_orig_mod')", ["_orig_mod"]),
        ("getattr(self, '_mine', None)", []),
        ("getattr(kind, '__name__')", []),
        ("hasattr(row, '_fields')", []),
    ],
)
def test_a_private_name_in_a_string_would_be_seen(tmp_path: Path, text: str, found: list[str]) -> None:
    (tmp_path / "file.py").write_text(text)
    assert list(private_in_strings(tmp_path / "file.py")) == found

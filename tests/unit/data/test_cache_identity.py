"""Identity of batches: the same in every process of the script, another one as soon as anything else is read."""

import compileall
import functools
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from regrow.core.messages.data import OrderSpec, SourceSpec
from regrow.data.cache import evenly, walking
from regrow.data.cache.identity import Identity, describe, described, difference

SPEC = OrderSpec("ordered", 7, [SourceSpec("data", 10)], batch_size=4)

SCRIPT = """
import functools, torch
from torch.utils.data import Dataset, default_collate
LIMIT = 3
NAMES = {"alpha", "beta", "gamma", "delta"}
def helper(x, *, by=2):
    return [y for y in (x, LIMIT) if y in {"p", "q", "r"}] + [by]
def unused(x):
    return x
class Scale:
    kinds = frozenset(["one", "two", "three"])
    def __init__(self, by): self.by = by
    def __call__(self, x): return helper(x) * self.by
class Compose:
    def __init__(self, transforms): self.transforms = transforms
    def __call__(self, x):
        for transform in self.transforms: x = transform(x)
        return x
def noisy(function):
    @functools.wraps(function)
    def inner(*args): return function(*args)
    return inner
@noisy
def decorated(x): return x + 1
@functools.lru_cache
def remembered(x): return x + 1
class Data(Dataset):
    def __init__(self, size=10, by=2):
        self.size = size
        self.words = {"x", "y", "zebra", "tree"}
        self.vocabulary = dict.fromkeys(sorted(self.words), 1)
        more = [lambda x: x + size, decorated, remembered]
        self.transform = Compose([Scale(by), functools.partial(helper, by=5), *more])
        self.me = self
    def __len__(self): return self.size
    def __getitem__(self, index): return self.transform(torch.relu(index))
def collate(items):
    return default_collate(items)
"""
PRINT = """
import json
from regrow.core.messages.data import OrderSpec
from regrow.data.cache.identity import describe
print(json.dumps(describe(Data(), collate, OrderSpec("ordered", 7), 0).parts))
"""


def module_of(text: str, name: str = "a_script") -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(text, f"/somewhere/{name}.py", "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module


def of_script(text: str, **arguments: Any) -> dict[str, str]:
    module = module_of(text)
    return describe(module.Data(**arguments), module.collate, SPEC, 0).parts


def of(dataset: Any, collate_fn: Any = default_collate, spec: OrderSpec = SPEC, seed: int = 0, **more: Any) -> Identity:
    return describe(dataset, collate_fn, spec, seed, **more)


def test_processes_with_different_hashes_and_addresses_agree(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + PRINT)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "module.py").write_text(SCRIPT)
    (tmp_path / "elsewhere" / "run.py").write_text("from module import *" + PRINT)
    # A module comes from its compiled file, a script never does.
    compileall.compile_file(tmp_path / "elsewhere" / "module.py", quiet=2)
    running = [
        subprocess.Popen(
            [sys.executable, tmp_path / path],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, path in (("1", "script.py"), ("2", "elsewhere/run.py"))
    ]
    first, imported = (json.loads(process.communicate(timeout=300)[0]) for process in running)
    assert difference(first, imported) == ["the data set's type: Data → module.Data"]


def test_a_script_that_is_run_twice_agrees_with_itself() -> None:
    assert of_script(SCRIPT) == of_script(SCRIPT)
    moved = "\n\n# a comment\n" + SCRIPT.replace("def unused(x):\n    return x\n", "")
    assert of_script(moved) == of_script(SCRIPT)


def test_nothing_in_a_plain_script_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    real = evenly.of

    def watched(*parts: Any) -> bytes:
        assert parts[0] != "unreadable", parts
        return real(*parts)

    monkeypatch.setattr(walking, "of", watched)
    of_script(SCRIPT)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("self.size = size", "self.size = size + 0", "the data set's code"),
        ("torch.relu(index)", "torch.abs(index)", "the data set's code"),
        ("* self.by", "+ self.by", "the data set's transform"),
        ("LIMIT = 3", "LIMIT = 4", "the data set's transform"),
        ('"p", "q"', '"p", "k"', "the data set's transform"),
        ("by=2):\n    return", "by=3):\n    return", "the data set's transform"),
        ('"one", "two"', '"one", "four"', "the data set's transform"),
        ("by=5", "by=6", "the data set's transform"),
        ("lambda x: x + size", "lambda x: x - size", "the data set's transform"),
        ("def decorated(x): return x + 1", "def decorated(x): return x + 2", "the data set's transform"),
        ("def remembered(x): return x + 1", "def remembered(x): return x + 2", "the data set's transform"),
        ("[Scale(by), ", "[Scale(by), Scale(by), ", "the data set's transform"),
        ('"zebra"', '"lion"', "the data set's words"),
        ("sorted(self.words), 1", "sorted(self.words), 2", "the data set's vocabulary"),
        ("return default_collate(items)", "return default_collate(items[:2])", "the collate function"),
    ],
)
def test_a_change_of_the_code_is_noticed_and_named(before: str, after: str, changed: str) -> None:
    assert SCRIPT.count(before) == 1
    words = difference(of_script(SCRIPT), of_script(SCRIPT.replace(before, after)))
    assert f"{changed} has changed" in words


def test_what_differs_is_said_in_words() -> None:
    words = difference(of_script(SCRIPT), of_script(SCRIPT, size=9))
    assert "the data set's length: 10 → 9" in words and "the data set's size: 10 → 9" in words
    base = of([1, 2, 3])
    assert difference(base.parts, of([1, 2, 3], seed=1).parts) == ["the seed: 0 → 1"]
    assert difference(base.parts, of([1, 2, 3], version="two").parts) == ["the version given by the script: none → two"]
    other = OrderSpec("ordered", 7, [SourceSpec("data", 10)], batch_size=5, shuffle=True)
    assert difference(base.parts, of([1, 2, 3], spec=other).parts) == [
        "the order's batch size: 4 → 5",
        "the order's shuffle: False → True",
    ]
    assert difference(base.parts, of([1, 2, 4]).parts) == ["the data set's content has changed"]
    assert difference(base.parts, base.parts) == []


@dataclass
class Described:
    dataset: Any
    collate_fn: Any = default_collate
    spec: OrderSpec = SPEC
    seed: int = 0
    version: str = ""
    parts: tuple[Any, ...] = ()


def test_every_ingredient_counts() -> None:
    base = Described([1, 2, 3])
    others = [
        Described([1, 2]),
        Described([1, 2, 3], collate_fn=None),
        Described([1, 2, 3], spec=OrderSpec("ordered", 8)),
        Described([1, 2, 3], seed=1),
        Described([1, 2, 3], version="2"),
        Described([1, 2, 3], parts=(1,)),
        Described((1, 2, 3)),
    ]
    values = [described(loader).value for loader in [base, *others]]
    assert len(set(values)) == len(values) and {len(value) for value in values} == {16}
    assert described(Described([1, 2, 3])).value == values[0]


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 3


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: int) -> None:
        self.a = a


class CallHeader(Holder):
    def fingerprint(self) -> str:
        return str(self.__dict__.get("files"))


def _base(x: int, y: int = 1) -> int:
    return x + y


def _closure(value: Any) -> Callable[[], Any]:
    return lambda: value


TWO = TensorDataset(torch.arange(2))
PAIRS: list[tuple[Any, Any]] = [
    (1, 2),
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ("a", b"a"),
    ("\ud800", "\ud801"),
    ([1, 2], (1, 2)),
    ([1, 2], [2, 1]),
    ({"a": 1}, {"a": 2}),
    ({1, 2}, {1, 3}),
    (None, ...),
    (10**30, 10**30 + 1),
    (torch.zeros(3), torch.zeros(4)),
    (torch.zeros(3), torch.zeros(3).double()),
    (torch.zeros(3), torch.tensor([0, 0, 1.0])),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (np.zeros(3), np.ones(3)),
    (np.array(["a"]), np.array(["b"])),
    (np.array([{}, 1], object), np.array([{}, 2], object)),
    (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    (functools.partial(_base, y=1), functools.partial(_base, y=2)),
    (_closure(1), _closure(2)),
    (Slotted(1), Slotted(2)),
    (Holder(a=1).__len__, Holder(a=2).__len__),
    (TensorDataset(torch.arange(3)), TensorDataset(torch.arange(1, 4))),
    (Subset(TWO, [0]), Subset(TWO, [1])),
    (CallHeader(files="1"), CallHeader(files="2")),
    (CallHeader(files="1", transform=_base), CallHeader(files="1", transform=_closure(1))),
    (torch.float32, torch.float64),
    (range(3), range(4)),
    (len, max),
    (torch.relu, torch.sigmoid),
    (np.random.RandomState, np.random.Generator),
]


@pytest.mark.parametrize(("one", "two"), PAIRS, ids=lambda value: type(value).__name__)
def test_attributes_that_differ_make_another_identity(one: Any, two: Any) -> None:
    assert of(Holder(a=one)).value != of(Holder(a=two)).value
    assert of(Holder(a=one)).value == of(Holder(a=one)).value
    assert of([one]).value != of([two]).value


@pytest.mark.parametrize("kind", ["DataFrame", "Series"])
def test_the_rows_of_a_pandas_table_count(kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    tables = [getattr(pandas, kind)({"a": [1, 2], "b": [1, last]}) for last in (3, 3, 4)]
    values = [of(Holder(a=table)).value for table in tables]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("make", ["table", "array", "chunked_array"])
def test_the_rows_of_an_arrow_table_count(make: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    content: dict[str, Callable[[int], Any]] = {
        "table": lambda last: {"a": [1, last]},
        "array": lambda last: [1, last],
        "chunked_array": lambda last: [[1], [last]],
    }
    values = [of(Holder(a=getattr(pyarrow, make)(content[make](last)))).value for last in (3, 3, 4)]
    assert values[0] == values[1] != values[2]


def test_a_change_anywhere_in_a_list_of_moderate_length_is_noticed() -> None:
    assert of(list(range(1000))).value != of([*range(999), 0]).value
    assert of(list(range(100_000))).value != of([*range(99_999), 0]).value


def test_of_what_fingerprints_itself_only_public_attributes_count() -> None:
    assert of(CallHeader(files="1", _cache={})).value == of(CallHeader(files="1", _cache={1: 2})).value
    assert of(Holder(_fingerprint="a", _cache=1)).value == of(Holder(_fingerprint="a", _cache=2)).value
    assert of(Holder(_fingerprint="a")).value != of(Holder(_fingerprint="b")).value


def test_a_file_that_changed_is_noticed_and_a_folder_is_not_looked_into(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(b"one")
    os.utime(file, ns=(1, 1))
    holders = [Holder(path=str(file)), Holder(path=file), Holder(paths=[str(file)]), Holder(path=str(tmp_path))]
    before = [of(holder).value for holder in holders]
    assert [of(holder).value for holder in holders] == before
    os.utime(file, ns=(2, 2))
    after = [of(holder).value for holder in holders]
    assert [was == now for was, now in zip(before, after, strict=True)] == [False, False, False, True]
    (tmp_path / "log").touch()
    assert of(holders[3]).value == before[3]


class Hostile:
    """Whatever is asked of it, it raises."""

    def __len__(self) -> int:
        raise ValueError("no length")

    def __repr__(self) -> str:
        raise ValueError("no words")

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)

    def __getstate__(self) -> Any:
        raise ValueError("no state")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no equal")

    def __hash__(self) -> int:
        raise ValueError("no hash")

    @property
    def size(self) -> int:
        raise ValueError("no size")

    def fingerprint(self) -> str:
        raise ValueError("no fingerprint")


class Gone:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def _tangled() -> Any:
    left, right = Holder(), Holder()
    left.other, right.other = right, left  # type: ignore[attr-defined]
    left.items = [left, {"right": right}, right.__len__]  # type: ignore[attr-defined]
    return left


def _deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(5_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "make",
    [Hostile, Gone, _tangled, _deep, lambda: Holder(a=Hostile(), b=Gone(), c=_tangled(), d=_deep())],
    ids=["hostile", "gone", "tangled", "deep", "all"],
)
def test_hostile_tangled_and_deep_objects_are_survived(make: Callable[[], Any]) -> None:
    assert of(make()).value == of(make()).value
    assert of([make()], collate_fn=make()).value == of([make()], collate_fn=make()).value


def test_what_changes_with_use_does_not_count() -> None:
    generator, state = torch.Generator(), np.random.RandomState(0)
    before = of(Holder(a=generator, b=state)).value
    torch.rand(3, generator=generator)
    state.rand(3)
    assert of(Holder(a=generator, b=state)).value == before

    @functools.lru_cache
    def remembered(x: int) -> int:
        return x

    before = of(Holder(a=remembered)).value
    remembered(3)
    assert of(Holder(a=remembered)).value == before


def test_two_gigabytes_cost_milliseconds(tmp_path: Path) -> None:
    # A hole in a file reads as zeros and takes no room.
    path = tmp_path / "big.bin"
    with path.open("wb") as file:
        file.truncate(2 << 30)
    mapped = torch.from_file(str(path), size=(2 << 30) // 8, dtype=torch.int64)
    array = np.memmap(path, dtype=np.float32, mode="r", shape=(1 << 14, 1 << 15))
    holder = Holder(tensor=mapped, array=array, scattered=array.T, listed=list(range(1_000_000)))
    of(holder)
    fastest = min(_seconds(lambda: of(holder)) for _ in range(3))
    assert fastest < 0.5


def _seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def test_of_a_large_array_both_ends_and_pieces_between_count() -> None:
    large = np.zeros(4 << 20, np.uint8)
    before = of(Holder(a=large)).value
    for place in (0, len(large) - 1):
        large[place] = 1
        assert of(Holder(a=large)).value != before
        large[place] = 0
    large[1 << 20 : 2 << 20] = 1
    assert of(Holder(a=large)).value != before

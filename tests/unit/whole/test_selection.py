"""Choice of tests in a run without time for all."""

import subprocess
import sys
from pathlib import Path

from tests.durations import place, seconds
from tests.tiers import FULL, full_files

ROOT = Path(__file__).parents[3]


def test_what_has_not_begun_in_time_is_left_out_and_counted() -> None:
    words = ["-q", "-p", "no:cacheprovider", "--until", "0", "tests/unit/step/test_dealing.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 tests were run, " in done.stdout and " passed" not in done.stdout


def test_the_order_of_files_follows_from_the_seed_and_keeps_a_file_together() -> None:
    tests = [f"tests/test_{name}.py::test_{number}" for name in "abcdef" for number in range(3)]
    orders = [sorted(tests, key=lambda test, seed=seed: place(test, {}, seed)) for seed in ("1", "1", "2", "3", "4")]  # type: ignore[misc]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) > 2
    for order in orders:
        files = [test.split("::")[0] for test in order]
        assert len(list(dict.fromkeys(files))) == sum(a != b for a, b in zip(files, [None, *files], strict=False))


PAGE = "".join(
    f"| tests/{name}.py | 3 | {took} | test_x (9.0) |\n"
    for name, took in zip("abc", ("59.9", "61.0", "201.0"), strict=True)
)


def test_long_files_begin_in_the_first_half_whatever_the_seed() -> None:
    def drawn(file: str) -> set[float]:
        return {place(f"tests/{file}.py::test_x", seconds(PAGE), str(seed))[0] for seed in range(40)}

    assert max(drawn("a")) >= 128 and 64 <= max(drawn("b")) < 128 and max(drawn("c")) < 64
    assert all(len(drawn(file)) > 10 for file in "abc")


def test_without_a_seed_the_longest_come_first_and_new_ones_before_most() -> None:
    tests = [f"tests/{name}.py::test_{number}" for name in ("new", "a", "b", "c") for number in (2, 1)]
    ordered = sorted(tests, key=lambda test: place(test, seconds(PAGE)))
    assert ordered == [f"tests/{name}.py::test_{number}" for name in ("c", "b", "new", "a") for number in (2, 1)]


def test_files_with_tests_of_the_full_matrix_are_known_by_the_table_and_by_their_marks(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_marked.py").write_text("pytestmark = pytest.mark.full\n")
    (tmp_path / "tests" / "test_plain.py").write_text("def test_it() -> None: ...\n")
    (tmp_path / "packages" / "one" / "tests").mkdir(parents=True)
    (tmp_path / "packages" / "one" / "tests" / "test_too.py").write_text("pytestmark = pytest.mark.full\n")
    assert set(full_files(tmp_path)) == {*FULL, "tests/test_marked.py", "packages/one/tests/test_too.py"}

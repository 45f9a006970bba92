import contextlib
from pathlib import Path

import pytest

from regrow.agent.workers.tracebacks import report
from regrow.core.config import duration


def failure_of(source: str, path: Path) -> BaseException:
    path.write_text(source)
    with pytest.raises(BaseException) as caught:
        exec(compile(source, str(path), "exec"), {"duration": duration, "json": __import__("json")})
    return caught.value


def test_an_exception_names_its_type_its_message_and_its_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    told = report(failure_of("def f():\n    raise ValueError('no luck')\nf()\n", script))
    assert (told.type, told.message, told.where) == ("ValueError", "no luck", f"{script}:2")
    assert "raise ValueError('no luck')" in told.traceback


def test_our_own_frames_are_left_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    told = report(failure_of("duration('soon')\n", script))
    assert told.type == "regrow.core.errors.UsageError"
    assert told.where == f"{script}:1"
    assert "core/config.py" not in told.traceback


def test_our_frames_stay_where_the_error_comes_out_of_one_that_did_not_mean_to_raise_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    told = report(failure_of("duration(5)\n", script))
    assert told.where == f"{script}:1"
    assert "core/config.py" in told.traceback
    caused = report(failure_of("try:\n    duration(5)\nexcept Exception as e:\n    raise KeyError from e\n", script))
    assert "core/config.py" in caused.traceback


def test_a_library_is_shown_but_the_users_line_is_the_place(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    told = report(failure_of("\njson.loads('{')\n", script))
    assert told.where == f"{script}:2"
    assert "json/decoder.py" in told.traceback


def test_the_cause_of_an_exception_is_told_too(tmp_path: Path) -> None:
    source = "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e\n"
    told = report(failure_of(source, tmp_path / "script.py"))
    assert "ZeroDivisionError" in told.traceback and "KeyError" in told.traceback


def test_a_syntax_error_is_placed_in_the_file_that_has_it(tmp_path: Path) -> None:
    told = report(failure_of(f"compile('a b', '{tmp_path}/other.py', 'exec')", tmp_path / "script.py"))
    assert (told.type, told.where) == ("SyntaxError", f"{tmp_path}/other.py:1")


def test_an_endless_message_is_cut(tmp_path: Path) -> None:
    told = report(failure_of("raise ValueError('x' * 10_000_000)", tmp_path / "script.py"))
    assert len(told.message) < 10_000 and "left out" in told.message and len(told.traceback) < 100_000


def test_an_exception_that_cannot_print_itself_is_told_all_the_same(tmp_path: Path) -> None:
    source = "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise Odd\n"
    with contextlib.suppress(RuntimeError):
        assert report(failure_of(source, tmp_path / "script.py")).type.endswith("Odd")

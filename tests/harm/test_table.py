"""The table of habits is what the documentation says."""

from pathlib import Path

from tests.harm.table import OPEN, all_habits, document

DOCUMENT = Path(__file__).parents[2] / "docs" / "habits.md"


def test_the_document_is_made_from_the_habits() -> None:
    assert DOCUMENT.read_text() == document(all_habits()), "python -m tests.harm.table > docs/habits.md"


def test_every_habit_says_what_it_is_and_every_open_one_is_there() -> None:
    habits = all_habits()
    assert len(habits) >= 40
    assert OPEN.keys() <= habits.keys()
    assert len({habit.what for habit in habits.values()}) == len(habits)

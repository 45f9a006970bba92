"""The page of durations."""

import datetime

from tests.durations import files, page

REPORT = """<testsuites><testsuite time="6.0" timestamp="2026-01-02T03:04:05">
<testcase classname="tests.unit.test_a" name="test_one" time="1.0"/>
<testcase classname="tests.unit.test_b" name="test_two" time="2.5"/>
<testcase classname="tests.unit.test_b" name="test_three" time="5.5"/>
</testsuite></testsuites>"""


def test_files_come_slowest_first_with_their_slowest_test() -> None:
    first, second = files(REPORT)
    assert (first.name, first.tests, first.seconds) == ("tests/unit/test_b.py", 2, 8.0)
    assert (first.slowest, first.slowest_s) == ("test_three", 5.5)
    assert second.name == "tests/unit/test_a.py"


def test_the_page_has_a_row_for_each_file_and_the_sum() -> None:
    text = page(files(REPORT), 6.0, datetime.date(2026, 1, 2), 2)
    assert "| tests/unit/test_b.py | 2 | 8.0 | test_three (5.5) |" in text
    assert "2026-01-02, 2 cores: 3 tests, 0.1 minutes, 0.1 of tests." in text

from pathlib import Path

from tests.process.disk_watch import watched


def test_opens_and_reads_of_other_processes_are_counted_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    file = tmp_path / "inner" / "file"
    file.write_text("text")
    with watched(tmp_path) as quiet:
        assert file.exists()
    assert not quiet.opens
    assert not quiet.reads
    with watched(tmp_path) as busy:
        file.read_text()
        file.read_text()
    assert busy.opens[str(file)] == 2
    assert busy.reads[str(file)] == 2

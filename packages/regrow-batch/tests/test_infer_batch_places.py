"""Places that cannot be reached: the user's to mend ends with 2, what may pass with 75, and nothing is a defect.

The stores are filesystems of fsspec that fail as s3fs, adlfs and the hub's do: with errors of their own trees.
"""

import contextlib
import gc
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from tests.process.batch import desk

from regrow.cli import main
from regrow.core.errors import UsageError
from regrow.core.exit_codes import RUN_AGAIN, USAGE
from regrow_batch.places import BatchStopped, exists, open_to_read, open_to_write


class NoCredentialsError(Exception):
    """As botocore's, whose base is none of Python's."""


class EndpointConnectionError(Exception):
    """Likewise."""


class RepositoryNotFoundError(Exception):
    """As huggingface_hub's."""


def failing(**ways: Exception) -> type[MemoryFileSystem]:
    """A store whose methods fail so."""

    def fail(error: Exception) -> Callable[..., Any]:
        def method(*_: Any, **__: Any) -> Any:
            raise error

        return method

    return type("FailingStore", (MemoryFileSystem,), {name: fail(error) for name, error in ways.items()})


@contextlib.contextmanager
def store(kind: type[MemoryFileSystem]) -> Any:
    fsspec.register_implementation("faulty", kind, clobber=True)
    kind.protocol = ("faulty",)
    kind.clear_instance_cache()
    try:
        yield "faulty://bucket/file.jsonl"
    finally:
        kind.clear_instance_cache()


MINE = [NoCredentialsError("Unable to locate credentials"), PermissionError("Forbidden"), FileNotFoundError("nothing")]
PASSING = [EndpointConnectionError("no route to https://s3"), TimeoutError("slow"), OSError("it broke"), KeyError("x")]


@pytest.mark.parametrize("error", MINE, ids=[type(each).__name__ for each in MINE])
def test_what_the_user_has_to_mend_is_a_usage_error(error: Exception) -> None:
    with store(failing(exists=error, _open=error)) as place:
        for work in (lambda: exists(place), lambda: open_to_read(place)):
            with pytest.raises(UsageError, match=r"faulty://bucket/file.jsonl cannot be (used|read): \S"):
                work()


@pytest.mark.parametrize("error", PASSING, ids=[type(each).__name__ for each in PASSING])
def test_what_may_pass_stops_the_batch_which_may_be_run_again(error: Exception) -> None:
    with store(failing(exists=error, _open=error)) as place:
        for work in (lambda: exists(place), lambda: open_to_read(place)):
            with pytest.raises(BatchStopped, match="run the same command again"):
                work()


def test_a_cause_tells_too() -> None:
    wrapped = OSError("the hub")
    wrapped.__cause__ = RepositoryNotFoundError("401")
    with store(failing(exists=wrapped)) as place, pytest.raises(UsageError, match="credentials"):
        exists(place)


def test_a_store_that_goes_while_it_is_read_stops_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with fsspec.open("memory://going/in.jsonl", "wb") as out:
        out.write(b"x\n" * 2_000_000)
    stream = open_to_read("memory://going/in.jsonl")
    assert stream.readline() == b"x\n"
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.read", failing(read=NoCredentialsError("gone")).read)
    with pytest.raises(BatchStopped, match="memory://going/in.jsonl cannot be read: gone"):
        stream.read()


class Uploaded(AbstractBufferedFile):  # type: ignore[misc]
    """A file as object stores have it: it appears with its last part."""

    parts: ClassVar[list[tuple[bytes, bool]]] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append((self.buffer.getvalue(), final))
        return True


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_appears_as_a_whole_or_not_at_all(whole: bool) -> None:
    kind = failing()
    kind._open = lambda self, path, mode, **_: Uploaded(self, path, mode)
    Uploaded.parts.clear()
    with store(kind) as place:
        if whole:
            with open_to_write(place) as out:
                out.write(b"what there is")
        else:
            with pytest.raises(ZeroDivisionError), open_to_write(place) as out:
                out.write(b"what there is")
                raise ZeroDivisionError
    gc.collect()
    assert Uploaded.parts == ([(b"what there is", True)] if whole else [])


def run(folder: Path, place: str, worker: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stderr(said):
        code = main(["batch", "run", "in.jsonl", "-o", place, "--workers", worker, "--journal", "j", "--quiet"])
    return code, said.getvalue()


def test_a_store_without_credentials_ends_with_2_and_one_that_has_gone_at_the_end_with_75_and_the_journal(
    tmp_path: Path,
) -> None:
    with desk(tmp_path) as made:
        made.rows("one", "two")
        worker = made.worker().url
        with store(failing(exists=NoCredentialsError("Unable to locate credentials"))) as place:
            code, said = run(tmp_path, place, worker)
        assert code == USAGE and "Unable to locate credentials" in said and "defect" not in said
        with store(failing(_open=EndpointConnectionError("no route"))) as place:
            code, said = run(tmp_path, place, worker)
        assert code == RUN_AGAIN and "no route" in said and "defect" not in said
        assert (tmp_path / "j").read_bytes().count(b"\n") == 3, "both rows are kept"
        with store(failing()) as place:
            made.workers[0].kill()
            code, said = run(tmp_path, place, worker)
            assert code == 0, said
            with open_to_read(place) as stream:
                assert [json.loads(line)["error"] for line in stream] == [None, None]

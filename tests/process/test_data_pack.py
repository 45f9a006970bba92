"""`regrow data pack` as a user runs it: killed at any moment it goes on, and ends as an undisturbed run does."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.sources import PYTHONPATH

from regrow.core.errors import UsageError
from regrow.data.tokens import PackedTokens

PATIENCE = 240.0
SOURCE = PYTHONPATH
DOCUMENTS = 240

TOKENIZER = """
import os, signal, time

def slow(text):
    # From a certain document on it takes so long that the test sees it there.
    if text and int(text.split()[1]) >= int(os.environ.get("SLOW_FROM", "1000")):
        open(os.environ["SEEN"], "w").close()
        time.sleep(0.5)
    return list(text.encode())

def fatal(text):
    if "150" in text:
        os.kill(os.getpid(), signal.SIGKILL)
    return list(text.encode())

slow.vocabulary = fatal.vocabulary = 256
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all commands: the input, a tokenizer, and the results of an undisturbed run."""
    folder = tmp_path_factory.mktemp("packing")
    (folder / "words.py").write_text(TOKENIZER)
    lines = [json.dumps({"text": f"document {number} " * (1 + number % 3)}) for number in range(DOCUMENTS)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    done = _run(folder, _command(folder / "undisturbed"))
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def _command(out: Path, tokenizer: str = "words:slow", workers: int = 2, inputs: str = "a.jsonl") -> list[str]:
    words = ["--out", str(out), "--tokenizer", tokenizer, "--workers", str(workers), "--shard-bytes", "1000"]
    return [sys.executable, "-m", "regrow", "data", "pack", inputs, *words]


def _environment(folder: Path, slow_from: int = 1000, seen: Path = Path()) -> dict[str, str]:
    mine = {"PYTHONPATH": SOURCE, "REGROW_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    return os.environ | mine | {"SLOW_FROM": str(slow_from), "SEEN": str(seen)}


def _run(
    folder: Path, command: list[str], prepare: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=prepare,
    )


def _start(folder: Path, out: Path, slow_from: int) -> subprocess.Popen[str]:
    _seen(out).unlink(missing_ok=True)
    return subprocess.Popen(
        _command(out),
        cwd=folder,
        env=_environment(folder, slow_from, _seen(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _wait(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def undisturbed(folder: Path) -> dict[str, bytes]:
    return _files(folder / "undisturbed")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def _ended(processes: list[psutil.Process]) -> None:
    assert not psutil.wait_procs(processes, timeout=PATIENCE)[1]


def _reading(out: Path) -> bool:
    return (out / "packing").exists()


def _seen(out: Path) -> Path:
    return out.with_suffix(".seen")


def _tokenizing(out: Path) -> bool:
    return _seen(out).exists()


def _half_tokenized(out: Path) -> bool:
    return any(out.glob("packing/*/*_of_00002.arrow"))


def _writing(out: Path) -> bool:
    return any(out.glob("tokens-*"))


MOMENTS: dict[str, tuple[int, Callable[[Path], bool]]] = {
    "the inputs are read": (1000, _reading),
    "it tokenizes": (3, _tokenizing),
    "one worker is through": (200, _half_tokenized),
    "a shard is begun": (1000, _writing),
}
"""Events that are waited for, and the document from which on it goes slowly so that they are seen."""


@pytest.mark.parametrize(
    ("what", "moment"), [*(("packer", moment) for moment in MOMENTS), ("packer and workers", "it tokenizes")]
)
def test_killed_at_any_moment_it_goes_on(
    folder: Path, out: Path, undisturbed: dict[str, bytes], moment: str, what: str
) -> None:
    assert len([name for name in undisturbed if name.endswith(".bin")]) >= 3
    slow_from, reached = MOMENTS[moment]
    process = _start(folder, out, slow_from)
    _wait(lambda: reached(out), process)
    family = psutil.Process(process.pid).children(recursive=True)
    for one in [process, *(family if what == "packer and workers" else [])]:
        one.kill()
    process.communicate(timeout=PATIENCE)
    _ended(family)  # also those that were not killed: they end with the packer
    if not (out / "corpus.json").exists():
        with pytest.raises(UsageError, match="is not finished"):
            PackedTokens(out, 8)
    again = _run(folder, _command(out))
    assert (again.returncode, again.stderr) == (0, "")
    assert _files(out) == undisturbed


def test_what_a_worker_has_tokenized_is_not_tokenized_again(
    folder: Path, out: Path, undisturbed: dict[str, bytes]
) -> None:
    process = _start(folder, out, 200)
    _wait(lambda: _half_tokenized(out), process)
    process.kill()
    process.communicate(timeout=PATIENCE)
    (half,) = out.glob("packing/*/*_of_00002.arrow")
    written = half.stat().st_mtime_ns
    process = _start(folder, out, 200)
    _wait(lambda: _tokenizing(out), process)
    assert half.stat().st_mtime_ns == written
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert _run(folder, _command(out)).returncode == 0
    assert _files(out) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nobody_and_goes_on(
    folder: Path, out: Path, undisturbed: dict[str, bytes], number: signal.Signals
) -> None:
    process = _start(folder, out, 3)
    _wait(lambda: _tokenizing(out), process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    _ended(family)
    if number is signal.SIGINT:
        assert process.returncode == 75
        assert err.strip().endswith("regrow: interrupted")
    assert not (out / "corpus.json").exists()
    assert _run(folder, _command(out)).returncode == 0
    assert _files(out) == undisturbed


def test_run_again_on_what_is_complete_it_says_so(folder: Path, undisturbed: dict[str, bytes]) -> None:
    again = _run(folder, _command(folder / "undisturbed"))
    assert again.returncode == 0
    assert "undisturbed is complete: " in again.stdout
    assert _files(folder / "undisturbed") == undisturbed
    PackedTokens(folder / "undisturbed", 8).verify()


def test_a_second_packer_is_kept_out(folder: Path, out: Path) -> None:
    process = _start(folder, out, 0)
    _wait(lambda: _tokenizing(out), process)
    second = _run(folder, _command(out))
    assert second.returncode == 2, (process.poll(), second.stdout)
    assert "another process is packing into" in second.stderr
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=PATIENCE)


def test_a_malformed_line_is_named_and_exits_2(folder: Path, out: Path) -> None:
    lines = (folder / "a.jsonl").read_text().splitlines()
    lines[200] = lines[200][:-3]
    (folder / "bad.jsonl").write_text("\n".join(lines))
    done = _run(folder, _command(out, inputs="bad.jsonl"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"regrow: {folder / 'bad.jsonl'}, line 201: ")
    assert "Traceback" not in done.stderr
    assert not (out / "corpus.json").exists()


def test_a_worker_that_dies_is_told(folder: Path, out: Path) -> None:
    done = _run(folder, _command(out, tokenizer="words:fatal"))
    assert done.returncode == 2
    assert "a worker died while it packed" in done.stderr
    assert "out of memory?" in done.stderr
    assert not (out / "corpus.json").exists()


def test_where_files_cannot_grow_it_says_so(folder: Path, out: Path, undisturbed: dict[str, bytes]) -> None:
    limit = 1 << 12
    short = _run(folder, _command(out), lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert short.returncode == 2
    assert "File too large (make room, or give cache_dir=)" in short.stderr
    assert not list((out).glob("*.tmp"))
    assert _run(folder, _command(out)).returncode == 0
    assert _files(out) == undisturbed


def test_it_needs_no_torch(folder: Path, out: Path) -> None:
    watch = (
        "import sys; from regrow.cli import main; "
        f"code = main({_command(out, workers=1)[3:]!r}); "
        "sys.exit(code or ('torch' in sys.modules and 'torch was imported'))"
    )
    done = _run(folder, [sys.executable, "-c", f"if __name__ == '__main__': {watch}"])
    assert (done.returncode, done.stderr) == (0, "")


def test_on_a_terminal_there_is_a_bar(folder: Path, out: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        _command(out), cwd=folder, env=_environment(folder) | {"TERM": "xterm", "COLUMNS": "120"}, stdout=theirs
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert process.wait(PATIENCE) == 0
    assert "is complete" in seen.decode()

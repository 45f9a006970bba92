"""Builds the stand-in's library where this torch and these sources have none yet, and says where it is.

It is kept in the user's cache folder, by torch's version and the sources: a change of either builds another.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
BUILD_S = 900.0
"""Time for the compiler for one file, on a machine that has much else to do."""
_KEPT = 16
"""Number of libraries to keep, a megabyte each: several checkouts and torches at once must not remove one another's."""


class Unbuildable(Exception):
    """There is no compiler, or no torch that one could build against."""


def compiler() -> str | None:
    """The compiler for C++ that builds it; None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Folder of the libraries, outside of the repository."""
    chosen = environment.get("REGROW_TEST_CACHE")
    if chosen:
        return Path(chosen)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regrow-tests"


def library() -> Path:
    """The library for this torch and these sources, built if need be. Raises `Unbuildable`.

    Processes that want it at the same time build it once: the first under a lock, for which the others wait.
    """
    folder = cache_folder(os.environ) / "standin"
    made = folder / f"{_key()}.so"
    if made.exists():
        return made
    if compiler() is None:
        raise Unbuildable("there is no g++ to build the stand-in device with")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _build(made)
            _forget_old(folder)
    return made


def _key() -> str:
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode())
    for source in sorted([*SOURCES.iterdir(), Path(__file__)]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _build(made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        objects = {source: Path(scratch, f"{source.stem}.o") for source in _largest_first()}
        with ThreadPoolExecutor(min(len(objects), os.cpu_count() or 1)) as pool:
            list(pool.map(_compile, objects.keys(), objects.values()))
        linked = Path(scratch, made.name)
        _run("-shared", "-o", str(linked), *map(str, objects.values()), *_libraries())
        linked.rename(made)


def _largest_first() -> list[Path]:
    """The files that take longest begin first: those that include the dispatcher."""
    order = ["groups", "operators", "kernels", "device", "memory", "runtime"]
    return sorted(SOURCES.glob("*.cpp"), key=lambda source: order.index(source.stem))


def _compile(source: Path, made: Path) -> None:
    _run(*_flags(), "-c", str(source), "-o", str(made))


def _run(*words: str) -> None:
    done = subprocess.run([str(compiler()), *words], capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        raise Unbuildable(f"the stand-in device could not be built:\n{done.stderr[-4000:]}")


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


def _flags() -> list[str]:
    import torch

    include = _torch_folder() / "include"
    return [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-Wall",
        "-DUSE_DISTRIBUTED",
        "-DAT_PER_OPERATOR_HEADERS",  # else each file reads the declarations of all operators
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{include}",
        f"-isystem{include}/torch/csrc/api/include",
        f"-isystem{sysconfig.get_paths()['include']}",
    ]


def _libraries() -> list[str]:
    folder = _torch_folder() / "lib"
    return [f"-L{folder}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-Wl,-rpath,{folder}"]


def _forget_old(folder: Path) -> None:
    made = sorted(folder.glob("*.so"), key=lambda file: file.stat().st_mtime)
    for old in made[:-_KEPT]:
        old.unlink(missing_ok=True)

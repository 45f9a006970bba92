"""Images built on this machine without a daemon, and commands in them as a strict cluster runs them.

Needs root, buildah and mmdebstrap. No registry is asked: the base is Debian, made of the distribution's packages, in
place of `python:3.12-slim`; Python's packages come from where pip has them, in this repository's versions. All of it is
kept in `build/images`: with `REGROW_TEST_INSTALL=1` the first run fetches and builds it, in minutes.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "images"
BUILD_S = 1800.0
"""A bound against a hang: the first build fetches torch."""
_BASE = "localhost/regrow-base"
_NEEDED = ("buildah", "mmdebstrap", "unshare", "ip")
_PACKAGES = ("hatchling", "torch", "nvidia-ml-py", "numpy", "msgspec", "aiohttp", "click", "rich", "psutil", "xxhash")
_OF_OPERATOR = ("lightkube", "lightkube-models", "pyyaml")
_SUITE, _PYTHON = "bookworm", "3.11"
_INSIDE = """
set -e
root=$1; user=$2; group=$3; shift 3
mount --bind "$root" "$root"; mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for each in null zero full random urandom; do touch "$root/dev/$each"; mount --bind "/dev/$each" "$root/dev/$each"; done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777,nosuid,nodev,size=64m tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/tmp"
ip link set lo up
exec chroot "$root" setpriv --reuid="$user" --regid="$group" --clear-groups --no-new-privs --bounding-set=-all "$@"
"""


class ImageStore:
    """Images of this machine, in a folder of their own."""

    def __init__(self) -> None:
        self._buildah = ["buildah", f"--root={KEPT}/store", f"--runroot={KEPT}/run"]

    def build(self, dockerfile: str, name: str) -> str:
        """Build a file of this repository; the image's name."""
        mounts = [f"--volume={KEPT}/wheels:/packages:ro", f"--volume={KEPT}/pip.conf:/etc/pip.conf:ro"]
        arguments = [f"--build-arg=BASE={_BASE}", *mounts, f"--file={ROOT / dockerfile}", f"--tag=localhost/{name}"]
        self._ask("build", "--isolation=chroot", "--layers", "--pull-never", *arguments, str(ROOT))
        return f"localhost/{name}"

    @contextmanager
    def container(self, image: str) -> Iterator["Container"]:
        """An image's files and settings, until the end of the context."""
        name = self._ask("from", "--pull-never", image)
        try:
            settings = json.loads(self._ask("inspect", name))["OCIv1"]["config"]
            yield Container(Path(self._ask("mount", name)), settings)
        finally:
            self._ask("rm", name)

    def prepare(self) -> None:
        """Have what builds need: the base, and Python's packages. Skips where it cannot be had."""
        for folder in ("wheels", "base"):
            (KEPT / folder).mkdir(parents=True, exist_ok=True)
        there = bool(list((KEPT / "wheels").glob("torch-*.whl"))), self._buildah_has(_BASE)
        if not all(there) and os.environ.get("REGROW_TEST_INSTALL", "") != "1":
            pytest.skip(f"{KEPT} has no base and no packages: REGROW_TEST_INSTALL=1 fetches them, once, in minutes")
        (KEPT / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /packages\n", encoding="ascii")
        if not there[0]:
            pip = [f"{sys.base_prefix}/bin/python3", "-m", "pip", "download", "--quiet", f"--python-version={_PYTHON}"]
            pip += ["--only-binary=:all:", f"--constraint={ROOT / 'requirements-dev.txt'}", f"--dest={KEPT / 'wheels'}"]
            _fetch([*pip, *_PACKAGES, *_OF_OPERATOR])
        if there[1]:
            return
        tree = KEPT / "base" / "debian.tar"
        _fetch(["mmdebstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", _SUITE, str(tree)])
        (KEPT / "base" / "Dockerfile").write_text(
            "FROM scratch\nADD debian.tar /\nRUN ln -s /usr/bin/python3 /usr/local/bin/python\n", encoding="ascii"
        )
        self._ask("build", "--isolation=chroot", f"--tag={_BASE}", str(KEPT / "base"))
        tree.unlink()

    def _buildah_has(self, image: str) -> bool:
        return subprocess.run([*self._buildah, "inspect", "--type=image", image], capture_output=True).returncode == 0

    def _ask(self, *words: str) -> str:
        done = subprocess.run([*self._buildah, *words], capture_output=True, text=True, timeout=BUILD_S)
        assert done.returncode == 0, f"buildah {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()


class Container:
    """An image that is mounted, and its settings."""

    def __init__(self, root: Path, settings: dict[str, object]) -> None:
        self._root, self._settings = root, settings

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """A command as the image's user; without one, the image's own.

        Nothing can be written but /tmp and 64 MB of /dev/shm, there is no network, and no right is left or can be won.
        """
        user, _, group = str(self._settings["User"]).partition(":")
        variables = self._settings["Env"]
        assert isinstance(variables, list)
        own = self._settings.get("Cmd")
        command = words or (own if isinstance(own, list) else ())
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts"]
        return subprocess.run(
            [*apart, "sh", "-c", _INSIDE, "inside", str(self._root), user, group, "env", "-i", *variables, *command],
            capture_output=True,
            text=True,
            timeout=BUILD_S,
        )


def _fetch(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode != 0:
        pytest.skip(f"{words[0]} cannot fetch what the image is made of: {done.stderr.strip().splitlines()[-1:]}")


@contextmanager
def image_store() -> Iterator[ImageStore]:
    """For one process at a time. Skips the test where images cannot be built here."""
    if os.geteuid() != 0:
        pytest.skip("images are built, and their namespaces made, by root")
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not found: images cannot be built here")
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(KEPT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store = ImageStore()
        store.prepare()
        yield store

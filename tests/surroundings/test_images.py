"""The images of `deploy`, built without a daemon: each runs as nobody, with nothing to write to and no network."""

from collections.abc import Iterator

import pytest
from tests.surroundings.images import ImageStore, image_store

pytestmark = pytest.mark.full
LOOK = """
import errno, os, shutil, socket
assert os.getuid() == 65532 and os.getgid() == 65532
for path in ("/new", "/opt/regrow/new", "/var/tmp/new"):
    try:
        open(path, "w")
    except OSError as error:
        assert error.errno in (errno.EROFS, errno.EACCES), error
    else:
        raise SystemExit(f"{path} was written")
assert shutil.disk_usage("/dev/shm").total == 64 << 20
try:
    socket.create_connection(("192.0.2.1", 80), timeout=60)
except OSError as error:
    assert error.errno == errno.ENETUNREACH, error
"""


@pytest.fixture(scope="module")
def store() -> Iterator[ImageStore]:
    with image_store() as made:
        yield made


def test_the_operators_image_starts_it_as_nobody_and_has_no_torch(store: ImageStore) -> None:
    with store.container(store.build("deploy/Dockerfile", "regrow-operator")) as operator:
        assert (looked := operator.run("python", "-c", LOOK)).returncode == 0, looked.stderr
        started = operator.run()
        assert started.returncode == 2 and "/etc/regrow/key" in started.stderr, started.stderr
        assert operator.run("python", "-c", "import torch").returncode == 1


def test_the_demo_runs_in_the_image_for_jobs(store: ImageStore) -> None:
    with store.container(store.build("deploy/training.Dockerfile", "regrow-training")) as training:
        assert (looked := training.run("python", "-c", LOOK)).returncode == 0, looked.stderr
        done = training.run("regrow", "demo", "--steps", "20")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "3 of 3 struck; all mended" in done.stdout and "bitwise equal                 yes" in done.stdout

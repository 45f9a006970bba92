"""The model that these tests share; made once, kept in `build/vllm`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[2] / "build" / "vllm" / "model"


@pytest.fixture(scope="session")
def model() -> Path:
    if not (KEPT / "reference.json").exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "tests.vllm.corpus_model", str(KEPT)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            timeout=900,
            check=True,
        )
    return KEPT

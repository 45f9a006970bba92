"""The penalty inside a live vLLM engine, of both model runners: outputs are Hugging Face's, token for token.

Run by `make test-vllm`, which has an environment of its own; skipped where vLLM is not installed.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

KINDS = [
    *(("V1", kind) for kind in ("plain", "swap", "preempt", "async-preempt", "chunked")),
    *(("V2", kind) for kind in ("preempt", "chunked", "async", "spec-chunked")),
]
LIMIT_S = 900


def run(folder: Path, *words: str) -> dict[str, Any]:
    """Last report of the engine's process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.engine", str(folder), *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("runner", "kind"), KINDS, ids=[" ".join(each) for each in KINDS])
def test_outputs_are_hugging_faces_whatever_the_engine_does_with_its_rows(model: Path, runner: str, kind: str) -> None:
    told = run(model, runner, kind)
    assert told["differ"] == 0, told
    assert told["rows"] > 500, told
    assert told["wrong"] == told["touched"] == 0, told
    assert told["left"] == 0, "a request that has ended keeps no slot"
    assert told["v2"] == (runner == "V2")
    assert told["async"] == kind.startswith("async")
    assert told["preemptions"] > 0 or "preempt" not in kind, "others may be preempted where many come at once"
    assert (told["drafts_taken"] > 0) == kind.startswith("spec")
    assert ("SWAP" in told["moves"]) == (kind == "swap")
    words = (
        "lz_window is 513, not a whole number from 1 to 512",
        "lz_strength is True",
        "lz_alpha",
        "lz_strength is 1e+39",
    )
    assert len(told["refused"]) == len(words)
    for said, expected in zip(told["refused"], words, strict=True):
        assert expected in said

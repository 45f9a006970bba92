"""Recipes cost what TRL's trainers cost: the same loss and gradient of the same batch, with the same adapter."""

import json
import subprocess
import sys
from pathlib import Path

from tests.process.training import SCRIPTS


def test_supervised_and_preference_losses_and_their_gradients_are_those_of_trl(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPTS / "trl_losses.py"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert sorted(told) == ["dpo", "dpo of all weights", "lora"]
    for method, found in told.items():
        assert found["loss"] > 0.5
        assert found["gradient"] > 1e-3
        assert found["by"] < 1e-6, method
        assert found["gradient by"] < 1e-6, method

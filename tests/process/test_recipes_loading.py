"""A hub's checkpoint goes into the shards of a world bit by bit, and comes out of them in the hub's form."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.process.launching import Site, site
from tests.process.recipe_cells import MODULES
from tests.process.training import SCRIPTS
from tests.scripts.tiny_families import FAMILIES, save_tiny
from transformers import AutoModelForCausalLM

from regrow_recipes.recipes.reading import read_recipe
from regrow_recipes.recipes.schema import Run

WORLD = 4
CASES = [("full", 2), ("full", 4), ("lora", 2), ("lora", 4)]
"""Two replicas of two shards (HSDP), and one of four (FSDP2)."""


def _run(here: Site, family: str, method: str, shard: int) -> Run:
    folder, out = here.folder / family, here.folder / f"{family}-{method}-{shard}"
    said = [f'model.path="{folder}"', 'data.train=["x"]', f'output.dir="{out}"', "lora.rank=4"]
    config = json.loads((folder / "config.json").read_text())
    return Run(read_recipe(method, said), config, "", "", 1, 1, 1, shard, False, 1, 1.0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all that one job of four ranks has loaded and written."""
    with site(tmp_path_factory.mktemp("loading"), *MODULES) as here:
        for family in FAMILIES:
            save_tiny(family, here.folder / family, a_file="40KB")
        runs = [_run(here, family, method, shard) for family in FAMILIES for method, shard in CASES]
        told = here.folder / "runs.json"
        told.write_bytes(msgspec.json.encode(runs))
        script = str(SCRIPTS / "load_recipes.py")
        done = here.regrow("run", "--job", "loads", "--nproc-per-node", str(WORLD), script, "--runs", str(told))
        assert done.returncode == 0, done.stdout + done.stderr
        here.assert_nothing_left()
        return here.folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.full
@pytest.mark.parametrize("shard", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_several_files_goes_through_shards_as_it_was(written: Path, family: str, shard: int) -> None:
    assert len(list((written / family).glob("*.safetensors"))) > 1
    theirs, ours = stored(written / family), stored(written / f"{family}-full-{shard}" / "model")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    if family in ("qwen3_moe", "deepseek_v3"):
        assert any(".experts.3." in name for name in ours), "the hub has a tensor for each expert"
    again = AutoModelForCausalLM.from_pretrained(written / f"{family}-full-{shard}" / "model").state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(written / family).state_dict()
    assert again.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in again.items())


@pytest.mark.full
@pytest.mark.parametrize("shard", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_out_of_shards_loads_in_peft_as_it_was_and_merged_says_the_same(
    written: Path, family: str, shard: int
) -> None:
    out = written / f"{family}-lora-{shard}"
    kind = {"attn_implementation": "eager"}
    base = AutoModelForCausalLM.from_pretrained(written / family, **kind).eval()
    merged = AutoModelForCausalLM.from_pretrained(out / "model", **kind).eval()
    tokens = torch.randint(2, 260, (1, 24))
    with torch.no_grad():
        without = base(input_ids=tokens).logits
        adapted = PeftModel.from_pretrained(base, out / "adapter").eval()
        said = adapted(input_ids=tokens).logits
        assert (said - without).abs().max() > 1e-3
        assert (merged(input_ids=tokens).logits - said).abs().max() <= 1e-5
    trained = torch.load(f"{out}.pt")
    loaded = {name: tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.items())

"""Models of recipes: no document sees another, newcomers read nothing, and what is written loads everywhere."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from tests.scripts.tiny_families import FAMILIES, save_tiny, tiny_config
from transformers import AutoModelForCausalLM

from regrow_recipes.recipes.building import build, model_config
from regrow_recipes.recipes.exporting import Weights, export
from regrow_recipes.recipes.losses import BatchLosses
from regrow_recipes.recipes.reading import read_recipe
from regrow_recipes.recipes.schema import Run, TrainingRecipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: save_tiny(family, root / family) for family in FAMILIES}


@pytest.fixture(autouse=True)
def no_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one process here."""

    class Same:
        def __new__(cls, model: Any) -> Any:
            return model

    monkeypatch.setattr("regrow_recipes.recipes.building.DistributedDataParallel", Same)


def run_of(folder: Path, out: Path, method: str, *words: str) -> Run:
    recipe: TrainingRecipe = read_recipe(
        method, [f'model.path="{folder}"', 'data.train=["x"]', f'output.dir="{out}"', "lora.rank=4", *words]
    )
    config = json.loads((folder / "config.json").read_text())
    return Run(recipe, config, "", "", 1, 1, 1, 1, False, 1, 1.0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_document_of_a_packed_row_sees_another(
    folders: dict[str, Path], tmp_path: Path, family: str, attention: str
) -> None:
    if (family, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("transformers has no such kernel for GPT-OSS")
    run = run_of(folders[family], tmp_path, "full", f"model.attention={attention}")
    model = build(run, CPU, world=1, load=True).eval()
    losses = BatchLosses(run.recipe, model_config(run), CPU)
    first, second = 20, 24
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
    tokens = torch.randint(2, 260, (1, first + second))
    other = tokens.clone()
    other[:, :first] = torch.randint(2, 260, (1, first))

    with torch.no_grad():
        one = losses.logits(model, {"input_ids": tokens, "position_ids": positions})
        two = losses.logits(model, {"input_ids": other, "position_ids": positions})
        alone = losses.logits(model, {"input_ids": tokens[:, first:], "position_ids": positions[:, first:]})
    assert (one[:, :first] - two[:, :first]).abs().max() > 1e-3
    assert (one[:, first:] - two[:, first:]).abs().max() <= 1e-6
    assert (one[:, first:] - alone).abs().max() <= 1e-6


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_newcomers_model_is_shaped_as_the_others_and_needs_no_weights(
    folders: dict[str, Path], tmp_path: Path, family: str, method: str
) -> None:
    theirs = build(run_of(folders[family], tmp_path, method), CPU, world=1, load=True)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((folders[family] / "config.json").read_bytes())
    run = run_of(bare, tmp_path, method)
    mine = build(run, CPU, world=1, load=False)
    with pytest.raises(OSError):
        build(run, CPU, world=1, load=True)

    def shapes(model: torch.nn.Module) -> dict[str, Any]:
        return {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}

    assert shapes(mine) == shapes(theirs)
    mine.load_state_dict(theirs.state_dict())
    tokens = torch.randint(2, 260, (1, 12))
    given = {"input_ids": tokens, "position_ids": torch.arange(12)[None]}
    losses = BatchLosses(run.recipe, model_config(run), CPU)
    with torch.no_grad():
        assert torch.equal(losses.logits(mine.eval(), given), losses.logits(theirs.eval(), given)), "buffers differ"


def changed(model: torch.nn.Module) -> Weights:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_is_written_under_the_hubs_names_and_loads_as_it_was(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    run = run_of(folders[family], tmp_path, "full")
    model = build(run, CPU, world=1, load=True).eval()
    assert export(run, model, changed(model), tmp_path) == [tmp_path / "model"]
    assert stored(tmp_path / "model").keys() == stored(folders[family]).keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert (tmp_path / "model" / "tokenizer.json").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_loads_in_peft_and_merged_says_the_same(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    from peft import PeftModel

    run = run_of(folders[family], tmp_path, "lora", "output.merge=true")
    model = build(run, CPU, world=1, load=True).eval()
    weights = changed(model)
    assert export(run, model, weights, tmp_path) == [tmp_path / "adapter", tmp_path / "model"]
    tokens = torch.randint(2, 260, (1, 12))
    base: Any = AutoModelForCausalLM.from_pretrained(folders[family], attn_implementation="eager")
    with torch.no_grad():
        said = model(input_ids=tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
        assert (adapted(input_ids=tokens).logits - said).abs().max() <= 1e-5
        assert (merged(input_ids=tokens).logits - said).abs().max() <= 1e-5
    names = {name.replace("default.", "") for name in weights if "lora_" in name}
    adapter = stored(tmp_path / "adapter")
    assert adapter.keys() == names
    assert all(
        torch.equal(tensor, weights[name.replace(".weight", ".default.weight")]) for name, tensor in adapter.items()
    )


def test_an_adapter_names_its_base_whoever_writes_it(folders: dict[str, Path], tmp_path: Path) -> None:
    for load in (True, False):
        run = run_of(folders["llama"], tmp_path, "lora")
        model = build(run, CPU, world=1, load=load)
        export(run, model, changed(model), tmp_path)
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(folders["llama"])


def test_what_was_written_is_replaced_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    run = run_of(folders["llama"], tmp_path, "full")
    model = build(run, CPU, world=1, load=True)
    for _ in range(2):
        export(run, model, changed(model), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    final = stored(tmp_path / "model")["model.norm.weight"]
    assert torch.equal(final, model.state_dict()["model.norm.weight"])


def test_a_model_without_weights_comes_from_its_configuration(tmp_path: Path) -> None:
    recipe = read_recipe(
        "pretrain",
        ['model.config={model_type="llama"}', "model.tokenizer=/t", 'data.train=["x"]', f'output.dir="{tmp_path}"'],
    )
    config = {key: value for key, value in tiny_config("llama").to_dict().items() if value is not None}
    recipe = msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, config=config))
    model = build(Run(recipe, config, "", "", 1, 1, 1, 1, False, 1, 1.0), CPU, world=1, load=True)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0

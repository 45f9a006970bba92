"""`python -m regrow_recipes.recipes RUN`: one worker of a recipe's training."""

import sys
from pathlib import Path

import msgspec

from regrow_recipes.recipes.schema import Run


def main(path: str) -> None:
    """Run the training of the file `path`."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    run = msgspec.json.decode(Path(path).read_bytes(), type=Run)
    if run.recipe.method == "grpo":
        from regrow_recipes.recipes.reinforcing import train
    else:
        from regrow_recipes.recipes.training import train
    train(run)


if __name__ == "__main__":
    main(sys.argv[1])

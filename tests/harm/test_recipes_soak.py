"""Scripts composed at random of the world's habits: trained as torch trains them, calm and struck, or refused.

`REGROW_SOAK_RECIPES` says how many, `REGROW_SOAK_SEED` which. A failure names its recipe, which `play.py` runs alone.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.harm.recipes import Recipe, composed, habit_of
from tests.harm.runs import IMPORTS, References
from tests.harm.table import RECIPE, Habit
from tests.harm.test_harm import assert_lawful, play
from tests.process.launching import Site, site

EXAMPLES = int(os.environ.get("REGROW_SOAK_RECIPES", "30"))
SEED = int(os.environ.get("REGROW_SOAK_SEED", "1"))
RECIPES = st.integers(0, 2**32).map(composed)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("recipes"), *IMPORTS) as made:
        yield made
        made.assert_nothing_left()


def judged(here: Site, references: References, habit: Habit) -> None:
    """The one law, where nobody knows beforehand which of the two it is."""
    calm = play(here, habit, "calm")
    if calm.code == 0:
        assert_lawful(here, references, habit, calm)
        return
    assert calm.ledger is not None and not calm.ledger.commits, f"refused after steps were made: {calm.output}"
    assert "is not protected" in calm.output, calm.output


@pytest.mark.soak
@pytest.mark.timeout(300 * EXAMPLES)
def test_what_is_composed_of_habits_is_trained_the_same_or_refused(here: Site, references: References) -> None:
    seen: dict[str, str] = {}
    """Recipe to what was wrong with it."""

    @seed(SEED)
    # No shrinking, and no end at the first failure: each example is several jobs.
    @settings(max_examples=EXAMPLES, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(RECIPES)
    def look(recipe: Recipe) -> None:
        name = f"{RECIPE}{recipe.digits}"
        if name in seen:
            return
        seen[name] = ""
        try:
            judged(here, references, habit_of(name))
        except AssertionError as error:
            seen[name] = f"{recipe}: {error}"

    look()
    wrong = {name: said for name, said in seen.items() if said}
    text = "\n\n".join(f"{name}: {said}" for name, said in wrong.items())
    assert not wrong, f"{len(wrong)} of {len(seen)} recipes:\n{text}"

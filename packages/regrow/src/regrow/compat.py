"""Former module of the names of other products, which are in `regrow_recipes` now."""

from regrow.core.process.extras import install_line

raise ImportError(
    f"regrow.compat is regrow_recipes.compat now: it comes with {install_line(package='regrow-recipes')}", name=__name__
)

"""Former module of the adapters for other libraries' trainers, which are in `regrow_recipes` now."""

from regrow.core.process.extras import install_line

raise ImportError(
    f"regrow.adapters is regrow_recipes.adapters now: it comes with {install_line(package='regrow-recipes')}",
    name=__name__,
)

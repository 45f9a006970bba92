"""Scripts that jobs of `regrow doctor --train` run, as a user would write them."""

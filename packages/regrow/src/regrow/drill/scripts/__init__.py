"""Training scripts for the jobs of `regrow doctor --train`, as a user would write them."""

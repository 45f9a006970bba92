"""Simulations of regrow's jobs: the coordinator (`sim`), fleets over weeks (`fleet`), and closed-form forecasts."""

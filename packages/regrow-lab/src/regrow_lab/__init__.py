"""Jobs of regrow without machines: the coordinator simulated (`sim`), fleets over weeks (`fleet`), closed forms."""

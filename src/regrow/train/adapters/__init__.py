"""Other frameworks' ways into regrow. No framework is imported here before the user has."""

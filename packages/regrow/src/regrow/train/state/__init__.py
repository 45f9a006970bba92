"""The script's protected state: naming, remembering, rolling back, comparing and copying it."""

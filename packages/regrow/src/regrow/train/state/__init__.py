"""The script's protected state: named, remembered, rolled back, compared, copied."""

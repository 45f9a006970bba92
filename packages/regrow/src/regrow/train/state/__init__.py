"""What a script protects: named, remembered, rolled back, compared, copied."""

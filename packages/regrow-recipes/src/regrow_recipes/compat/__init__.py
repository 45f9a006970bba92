"""Python names of another product, so that a script for it runs before it is fully ported.

At its first use, each name logs one line that names its replacement. A name without a counterpart here raises
`UsageError` with a hint; no feature is simulated. The names are from public documentation; no code is copied.
"""

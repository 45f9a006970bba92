"""Adapters for trainers of other libraries, whose updates become steps. Each imports its framework only when used.

Adapters use only the engine's API for scripts: `regrow.init`, `protect`, `steps`, `restartable`. Private names of a
framework that are read or set are in `private_names`.
"""

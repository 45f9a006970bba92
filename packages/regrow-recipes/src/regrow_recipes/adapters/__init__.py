"""Trainers of other people, whose updates become steps of regrow. Each file imports its framework only when used.

Nothing here knows more of the engine than a script does: `regrow.init`, `protect`, `steps`, `restartable`. What a
framework keeps for itself, and we read or set all the same, stands in `private_names`.
"""

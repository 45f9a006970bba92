"""With which codes a launcher ends, and what they tell a scheduler."""

OK = 0
SCRIPT_ERROR = 1
"""The script's own error: the same again would end the same way."""
REFUSED = 1
"""A running job refuses what a command asked of it."""
USAGE = 2
"""A flag or an argument cannot be right."""
INTERNAL_ERROR = 70
"""A defect of regrow."""
RUN_AGAIN = 75
"""The machines, not the script: the job may be started again as it is."""

"""Jobs on Slurm: a gang as one job with spares in it, each further replica as a job of its own. From Slurm 22.05 on.

What decides is pure: job files, batch scripts, Slurm's answers read, what the planner is shown. `client.py` alone runs
Slurm's commands. There is no service: the gang's first node looks after the job (`keeper.py`).
"""

"""Jobs on Slurm: the gang with its spares is one Slurm job, each further replica another one. From Slurm 22.05 on.

All decisions are pure: job files, batch scripts, parsers of Slurm's answers, input of the planner. Only `client.py`
runs Slurm's commands. There is no service: the gang's first node manages the job (`keeper.py`).
"""

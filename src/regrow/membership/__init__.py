"""Who is in the job: generations, ranks, standbys, and the ladder of recovery.

`machine.py` decides and cannot wait; `server.py` carries its orders to the agents and brings their facts back.
"""

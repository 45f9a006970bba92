"""Who is in the job: generations, ranks, standbys, and the ladder of recovery.

`machine.py` decides and cannot wait; `server` carries its orders to the agents and brings their facts back.

* `recovery`: what is done about a fault, from the loss of a worker to the next generation.
* `elastic`: how the world comes to another size while the training runs.
* `server`: agents over WebSockets, people over HTTP, time by a timer. All else in this room is pure.
"""

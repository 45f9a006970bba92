"""Members of the job: generations, ranks, standbys, and the ladder of recovery.

`machine.py` decides and cannot wait; `server` carries its orders to the agents and brings their facts back.

* `recovery`: repair of a fault, from the loss of a worker to the next generation.
* `elastic`: changes of the world's size while the training runs.
* `server`: agents over WebSockets, people over HTTP, and a timer. All other modules of this package are pure.
"""

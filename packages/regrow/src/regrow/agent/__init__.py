"""One process a node: it starts, watches, fences and outlives the workers.

The agent never imports torch. It keeps a *zygote*, a process that has torch imported and no threads, which forks a
worker in milliseconds. The agent is the parent of every worker (a child subreaper), so that it sees an exit at once
and reaps it, whatever becomes of the zygote. A worker speaks only with its agent, over a socket made for it; the agent
passes facts up to the coordinator and orders down, and keeps what must survive a worker: the store of rendezvous keys,
the records of committed steps, the output files.

It decides nothing about membership; `node.py` is the agent, and ties these together:

* `node_workers.py`: the workers of this node, their zygote, and what becomes of each.
* `workers`: one worker, from the order to spawn a worker until it is reaped.
* `store`: the job's key-value store, spread over the agents of all nodes.
* `state_copies`: copies of workers' state in shared memory, and their way to the buddy node.
* `checkpoints`: the process that writes durable checkpoints.
"""

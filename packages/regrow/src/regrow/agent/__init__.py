"""One process per node, which starts, watches and fences the workers and outlives them.

The agent never imports torch. It keeps a *zygote*, a process that has torch imported and no threads, which forks a
worker in milliseconds. The agent is the parent of every worker (a child subreaper), so that it sees an exit at once
and reaps it, even if the zygote is gone. A worker communicates only with its agent, over its own socket; the agent
passes facts up to the coordinator and orders down. It keeps everything that must survive a worker: the store of
rendezvous keys, the records of committed steps, the output files.

The agent makes no decisions about membership. `node.py` is the agent itself, and connects these parts:

* `node_workers.py`: the workers of this node, their zygote, and the end of each.
* `workers`: one worker, from the order to spawn it until it is reaped.
* `store`: the job's key-value store, spread over the agents of all nodes.
* `state_copies`: copies of workers' state in shared memory, and their way to the buddy node.
* `checkpoints`: the process that writes durable checkpoints.
"""

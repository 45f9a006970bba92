"""One process a node: it starts, watches, fences and outlives the workers.

The agent never imports torch. It keeps a *zygote*, a process that has torch imported and no threads, which forks a
worker in milliseconds. The agent is the parent of every worker (a child subreaper), so that it sees an exit at once
and reaps it, whatever becomes of the zygote. A worker speaks only with its agent, over a socket made for it; the agent
passes facts up to the coordinator and orders down, and keeps what must survive a worker: the store of rendezvous keys,
the records of committed steps, the output files.

It decides nothing about membership. It does decide, of the workers that it can see, which one hangs (`watch`).
"""

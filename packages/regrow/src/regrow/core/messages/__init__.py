"""Messages between coordinator, agents and workers.

Facts are in the past tense, orders imperative. A fact about a worker names it; an order to a worker is routed by its
agent. Every message about a generation has that generation's number, and is dropped if it is not the current one.
"""

"""Messages between coordinator, agents and workers.

Facts are past tense, orders imperative. A fact about a worker names it; an order to a worker is routed by its agent.
Every message of a generation carries its number, and is dropped if that number is not the current one.
"""

"""Messages between coordinator, agents and workers.

Facts are in the past tense, orders in the imperative. A fact about a worker names it; an order to a worker goes through
its agent. Every message about a generation has that generation's number, and is dropped unless it is the current one.
"""

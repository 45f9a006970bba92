"""Hugging Face's `Trainer` and its subclasses: an update is a step, and what follows it runs again after a fault.

`loop` has the mixin; `book` is what a trainer must remember; `deliveries` lets callbacks hear of a step once.
"""

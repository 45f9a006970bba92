"""Hugging Face's `Trainer` and its subclasses: an update is a step, and the work after it runs again after a fault.

`loop` has the mixin; `book` keeps a trainer's state; `deliveries` calls callbacks once a step.
"""

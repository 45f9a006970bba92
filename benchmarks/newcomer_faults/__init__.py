"""Small trainings in which one fault makes a newcomer compute different results, and honest ones beside them.

A script in `faults` has the faulty object in `FAULT`, and in `NAMED` some words: a message that names the object
contains one of them. `vendored` has stand-ins for libraries.
"""

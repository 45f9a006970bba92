"""Small trainings of which a newcomer computes something else, each by one fault, and honest ones beside them.

Scripts in `faults` say in `FAULT` the object that is behind it, and in `NAMED` words of which a message that names it
has one. `vendored` has what stands in for libraries.
"""

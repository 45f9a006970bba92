"""The vocabulary of the whole package: ids, messages, errors, configuration, time.

Imports nothing of the package and no torch, so that every other room may stand on it.
"""

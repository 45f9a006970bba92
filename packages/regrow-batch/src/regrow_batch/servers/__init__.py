"""Servers that are child processes: started, registered with the head, and ended with all their descendants.

`server_process` is one of them, behind its `guard`; `spawned` keeps those that the head starts itself, `registered` is
one that registers itself with a head, on any machine.
"""

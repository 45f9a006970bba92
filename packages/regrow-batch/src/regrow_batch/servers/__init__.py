"""Servers that are processes of ours: started, told to the head, ended with all that they have started.

`server_process` is one of them, behind its `guard`; `spawned` keeps those that the head starts itself, `registered` is
one that announces itself to a head, wherever it runs.
"""

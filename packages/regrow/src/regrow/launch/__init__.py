"""From a job's description to processes: flags and fault plans are read here, a job is started, ended and found again.

Decides nothing about membership; imports no torch.
"""

"""Starting jobs: reads flags and fault plans, starts and ends a job's processes, and finds running jobs again.

Makes no membership decisions; imports no torch.
"""

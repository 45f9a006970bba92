"""Elections of coordinators on a virtual clock, and on a network and a disk that fail.

Elections, votes and leases are decided by `membership/succession/`, as in production; this package carries messages, as
`launch/succession/following.py` and `membership/server/launchers.py` do, and checks the laws. Pure and seeded.
"""

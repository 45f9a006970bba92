"""The order of ranks along a cluster's network: hosts that are near each other get neighboring ranks. Pure."""

from collections.abc import Mapping, Sequence


def rank_order(hosts: Sequence[str], paths: Mapping[str, Sequence[str]]) -> list[str]:
    """Order hosts so that those under one switch are next to each other, at every level; the first stays the first.

    Branches, and the hosts within each, keep the order in which they first appear: an order that is already good stays
    as it is, and so does one of hosts with unknown paths.

    Args:
        hosts: each once, in the cluster's own order.
        paths: the switches above each host, from the root down; none: unknown, and the host is a branch of its own.
    """
    first: dict[tuple[str, ...], int] = {}
    for index, host in enumerate(hosts):
        for prefix in _prefixes(paths.get(host, ())):
            first.setdefault(prefix, index)
    keys = {
        host: (*(first[prefix] for prefix in _prefixes(paths.get(host, ()))), index) for index, host in enumerate(hosts)
    }
    return sorted(hosts, key=lambda host: keys[host])


def _prefixes(path: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(path[: end + 1]) for end in range(len(path))]

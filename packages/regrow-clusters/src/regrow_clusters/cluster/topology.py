"""The order of ranks along a cluster's network: who is near is next to each other. Pure."""

from collections.abc import Mapping, Sequence


def rank_order(hosts: Sequence[str], paths: Mapping[str, Sequence[str]]) -> list[str]:
    """The hosts, those under one switch next to each other, at every level; the first one stays the first.

    Branches come in the order of their first hosts, and so do the hosts of a branch: where nothing is known, or the
    order is a good one already, it stays as it is.

    Args:
        hosts: each once, in the cluster's own order.
        paths: what is above each host, from the root down; none: it is not known, and the host stands alone.
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

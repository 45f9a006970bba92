"""A rank's share of the global batch."""

from torch.distributed.device_mesh import DeviceMesh

from regrow.core.errors import UsageError

Share = tuple[int, int]
"""(share, number of shares)."""


def share_of(data: DeviceMesh | Share | None) -> Share | None:
    """The share of the global batch that this rank reads; None if each rank has a share of its own.

    Args:
        data: the mesh of the data-parallel dimensions, whose order of ranks is the order of shares; or the share.

    Raises:
        UsageError: there is no such share.
    """
    if data is None:
        return None
    if isinstance(data, DeviceMesh):
        coordinate = data.get_coordinate()
        if coordinate is None:
            raise UsageError(f"this rank is not in the mesh {data} that decides which data it reads")
        share = 0
        for at, size in zip(coordinate, data.mesh.shape, strict=True):
            share = share * size + at
        return share, data.size()
    share, count = data
    if not 0 <= share < count:
        raise UsageError(f"data={data} is no share", hint="give (share, number of shares), the first from 0")
    return share, count

"""Caches of compiled kernels on a node's own disk, if their default folder is on a file system that nodes share.

Triton keeps its cache in the home folder, Inductor in the folder for temporary files. Processes of several nodes that
write into one of these over a network file system read each other's half-written files (triton#11512).
"""

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

_NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs"),
        *("pvfs2", "orangefs", "afs", "9p", "ocfs2", "gfs2", "virtiofs", "quobyte", "vastnfs", "davfs"),
    }
)
_FUSE_LOCAL = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.gocryptfs", "fuse.ntfs-3g"})
"""FUSE file systems on local disks; all others count as shared."""
_LOCAL_ROOTS = ("/tmp", "/var/tmp")
_NAME = "regrow-compiled-"
SAID = (
    "compiled kernels are cached on each node's own disk, as the place where they would be by default is on a network "
    "file system ({where}); set {names} to have them elsewhere"
)


def read_mounts() -> str:
    """Text of `/proc/mounts`; empty if it cannot be read, so that every path is taken to be on a local disk."""
    try:
        return Path("/proc/mounts").read_text(errors="surrogateescape")
    except OSError:
        return ""


def filesystem_of(path: str, mounts: str) -> str:
    """Type of the file system of an absolute path; empty if it is unknown.

    Args:
        path: absolute path without links.
        mounts: the text of `/proc/mounts`.
    """
    found, longest = "", -1
    for line in mounts.splitlines():
        _, point, kind, *_ = [*line.split(" "), "", "", ""]
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:  # A later mount at the same place hides an earlier one.
            found, longest = kind, len(point)
    return found


def is_shared(kind: str) -> bool:
    """True if a file system of this type may be shared with other machines."""
    return kind in _NETWORK or (kind.startswith("fuse.") and kind not in _FUSE_LOCAL)


def local_caches(
    inherited: Mapping[str, str], mounts: str, *, roots: Sequence[str] = _LOCAL_ROOTS
) -> tuple[dict[str, str], str]:
    """Variables that keep the caches on this node's disk, and a note about that for people; both empty if not needed.

    Args:
        inherited: the user's environment, whose settings take precedence.
        mounts: the text of `/proc/mounts`.
        roots: candidate parents of the cache folder; the first on a disk of this node is used.
    """
    temporary = inherited.get("TMPDIR") or "/tmp"
    places = {
        "TRITON_CACHE_DIR": inherited.get("TRITON_HOME") or inherited.get("HOME", ""),
        "TORCHINDUCTOR_CACHE_DIR": temporary,
    }
    shared = {
        name: place
        for name, place in places.items()
        if place and name not in inherited and is_shared(filesystem_of(os.path.realpath(place), mounts))
    }
    if not shared:
        return {}, ""
    local = (root for root in (temporary, *roots) if not is_shared(filesystem_of(os.path.realpath(root), mounts)))
    folder = next((mine for root in local if (mine := _own_folder(root)) is not None), None)
    if folder is None:
        return {}, ""
    said = SAID.format(where=", ".join(dict.fromkeys(shared.values())), names=" and ".join(shared))
    return {name: str(folder / name.split("_")[0].lower()) for name in shared}, said


def _own_folder(root: str) -> Path | None:
    """This user's folder below `root`, which no other user can write; None if it cannot be made."""
    folder = Path(root) / f"{_NAME}{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if mine and os.access(folder, os.W_OK) else None

"""Names and heads of durable checkpoints: all that is known of a checkpoint without its tensors. Needs no torch."""

import re

import msgspec
import xxhash

from regrow.core.errors import CheckpointError, OtherFormat
from regrow.core.ids import StepNo
from regrow.core.messages.lineage import Lineage

FORMAT = 2
MANIFEST = "regrow.json"
MARK = "regrow.unfinished"
UNFINISHED = ".unfinished-"
_NAME = re.compile(r"step-(\d+)(?:-[0-9a-f]{12})?")
_UNFINISHED = re.compile(r"\.unfinished-(?:([0-9a-f]{12})-)?(?:step-)?\d+.*")
NO_SEAL = "0" * 16
_SEAL = re.compile(rb'"digest":"[0-9a-f]{16}"\}\s*\Z')
"""Matches `digest`, which is the last field of a manifest."""


class ManifestHead(msgspec.Struct, frozen=True):
    """The fields that every manifest has. `files`: sizes in bytes; `digest`: digest of the manifest itself."""

    format: int
    files: dict[str, int]
    step: StepNo = StepNo(0)
    lineage: Lineage = Lineage()
    digest: str = ""


def step_of(folder: str) -> StepNo | None:
    """The step in a folder's name; None if it is not the name of a checkpoint."""
    match = _NAME.fullmatch(folder)
    return StepNo(int(match.group(1))) if match else None


def folder_of(step: StepNo, lineage: str = "") -> str:
    """The name of a complete checkpoint's folder. `lineage`: added if another training has the plain name."""
    return f"step-{step}-{lineage}" if lineage else f"step-{step}"


def unfinished(lineage: str, what: str) -> str:
    """The name of a folder that is not a checkpoint yet, or no longer."""
    return f"{UNFINISHED}{lineage}-{what}" if lineage else f"{UNFINISHED}{what}"


def lineage_of_remains(folder: str) -> str | None:
    """Owner of an unfinished folder, by the folder's name; None if it is no such folder."""
    match = _UNFINISHED.fullmatch(folder)
    return (match.group(1) or "") if match else None


def seal(manifest: bytes) -> bytes:
    """Put the digest of an encoded manifest into it, in place of `NO_SEAL`."""
    return _SEAL.sub(_seal(xxhash.xxh3_64_hexdigest(manifest)), manifest)


def head_of(manifest: bytes) -> ManifestHead:
    """The head of an encoded manifest.

    Raises:
        OtherFormat: this version does not read its format.
        CheckpointError: it is damaged.
    """
    try:
        head = msgspec.json.decode(manifest, type=ManifestHead)
    except Exception as error:  # a library may raise any error: the manifest cannot be read
        raise CheckpointError(f"its manifest cannot be read: {error}") from error
    if head.format != FORMAT:
        newer = head.format > FORMAT
        raise OtherFormat(
            f"it is of format {head.format}, and this version of regrow reads format {FORMAT} alone",
            hint="go on with the version that wrote it"
            if newer
            else "load it in a script by torch.distributed.checkpoint, if you trust everyone with write access: it "
            "is a pickle",
        )
    if head.digest:
        plain = _SEAL.sub(_seal(NO_SEAL), manifest)
        if xxhash.xxh3_64_hexdigest(plain) != head.digest:
            raise CheckpointError("its manifest is damaged: its checksum differs")
    return head


def _seal(digest: str) -> bytes:
    return b'"digest":"%b"}' % digest.encode()

"""Lists the checkpoints of a place: complete ones, torn ones with the reason, remains. Needs no torch.

`python -m regrow.hydration.durable.catalog` lists the place that is named on its standard input, for a caller with a
time limit: a store that does not answer must not block a launcher.
"""

import sys

import msgspec

from regrow.core.errors import CheckpointError, OtherFormat, RegrowError, UsageError
from regrow.core.ids import StepNo
from regrow.core.messages.lineage import Lineage
from regrow.hydration.durable.names import MANIFEST, ManifestHead, head_of
from regrow.hydration.durable.storage import CheckpointStorage, place


class WholeCheckpoint(msgspec.Struct, frozen=True):
    """A complete checkpoint, recognized without its tensors, by the manifest and the sizes of all files."""

    step: StepNo
    folder: str
    lineage: Lineage = Lineage()


class Catalog(msgspec.Struct, frozen=True):
    """Contents of a place for checkpoints.

    `whole`: complete ones, the newest first. `torn`, `unread`: folders that are damaged, or of another format, with the
    reason. `remains`: unfinished folders, each with its owner.
    """

    whole: list[WholeCheckpoint] = []
    torn: dict[str, str] = {}
    unread: dict[str, str] = {}
    remains: dict[str, str] = {}

    def own(self, lineage: Lineage) -> list[WholeCheckpoint]:
        """The complete checkpoints of a training, the newest first."""
        return [each for each in self.whole if lineage.owns(each.lineage.id)]


class CatalogQuestion(msgspec.Struct, frozen=True):
    """Request to the process that runs this module: list a place."""

    url: str


class CatalogAnswer(msgspec.Struct, frozen=True):
    """Answer to a `CatalogQuestion`. `error`: why there is no catalog; `usage`: the place is unusable (`hint`)."""

    catalog: Catalog = Catalog()
    error: str = ""
    usage: bool = False
    hint: str = ""


def manifest_at(at: CheckpointStorage, folder: str) -> tuple[ManifestHead, bytes]:
    """Head and text of the manifest of a complete checkpoint.

    Raises:
        OtherFormat: this version cannot read it.
        CheckpointError: it is torn; the message has the reason, whatever a store or a library raised.
    """
    try:
        with at.read(folder, MANIFEST) as file:
            data = file.read()
        head = head_of(data)
        sizes = at.sizes(folder)
    except RegrowError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError("it has no manifest") from error
    except Exception as error:
        raise CheckpointError(f"it cannot be read: {cause_of(error)}") from error
    for name, size in head.files.items():
        if sizes.get(name) != size:
            there = f"has {sizes[name]} bytes in the place of {size}" if name in sizes else "is missing"
            raise CheckpointError(f"its file {name} {there}")
    return head, data


def look(at: CheckpointStorage) -> Catalog:
    """List the place. Raises the store's own errors if the place itself cannot be read."""
    whole: list[WholeCheckpoint] = []
    torn, unread = dict[str, str](), dict[str, str]()
    remains = at.remains()
    for folder in sorted(set(at.folders()) - remains.keys()):
        try:
            head, _ = manifest_at(at, folder)
        except OtherFormat as error:
            unread[folder] = str(error)
        except CheckpointError as error:
            torn[folder] = str(error)
        else:
            whole.append(WholeCheckpoint(head.step, folder, head.lineage))
    return Catalog(sorted(whole, key=lambda each: (each.step, each.folder), reverse=True), torn, unread, remains)


def cause_of(error: BaseException) -> str:
    """Text of an error, for a message."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def main() -> None:
    """Answer one `CatalogQuestion`, from standard input to standard output."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=CatalogQuestion)
    try:
        answer = CatalogAnswer(look(place(asked.url)))
    except UsageError as error:
        answer = CatalogAnswer(error=error.cause, usage=True, hint=error.hint)
    except Exception as error:  # noqa: BLE001 - stores raise errors of their own; any is reported
        answer = CatalogAnswer(error=cause_of(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()

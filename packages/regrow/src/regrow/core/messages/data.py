"""Messages about training data: its order, its cache on a node, and the reads of a committed step."""

import msgspec

from regrow.core.ids import NodeId, Rank, WorkerId


class BatchRecord(msgspec.Struct, frozen=True):
    """Record of the data that one rank read for one step.

    `share` of `shares`: its slice of the step's global batch. `digest`: xxh3 of the batch's content, 16 hexadecimal
    digits, empty if the batch has no canonical bytes. `samples`: xxh3 of the samples' addresses as they were read
    (`regrow.data.order.samples_digest`), empty if the loader has no addresses.
    """

    share: int
    shares: int
    digest: str = ""
    samples: str = ""


class SourceSpec(msgspec.Struct, frozen=True):
    """One of the data sets from which an order draws samples."""

    name: str
    size: int


class OrderSpec(msgspec.Struct, frozen=True):
    """Everything on which the order of samples depends, apart from the step.

    `kind`: `ordered` (one map-style data set, in regrow's order), `mixture` (several, by weight), `opaque` (an order of
    the loader's own, known only by its output). `batch_size`: samples of a share; 0 if `global_batch` is given, which
    is then the same for any number of shares. `remainder`: treatment of an epoch's last samples (`keep`, `drop`,
    `wrap`). `weights`: pairs of a first step and the weights from that step on, in the order of `sources`.
    """

    kind: str
    seed: int
    sources: list[SourceSpec] = []
    batch_size: int = 0
    global_batch: int = 0
    shuffle: bool = False
    remainder: str = "keep"
    weights: list[tuple[int, list[float]]] = []


class CacheSettings(msgspec.Struct, frozen=True):
    """A worker's settings of its node's data cache. `folder`: belongs to the agent; `budget`: its limit in bytes."""

    folder: str
    budget: int


class ProducerSettings(msgspec.Struct, frozen=True):
    """Settings of a process, no training worker, that makes the batches of the script's loader number `loader`."""

    loader: int


def producer_socket(socket_dir: str, loader: int) -> str:
    """Path of the socket on which a loader's producer listens once it serves batches."""
    return f"{socket_dir}/data-{loader}"


def producer_given_up(data_dir: str, loader: int) -> str:
    """Path of a file in the cache's folder, written when a loader will get no producer any more; it has the reason."""
    return f"{data_dir}/producer-{loader}.given-up"


# --- a worker to its agent ---------------------------------------------------------------------------------------


class OrderDeclared(msgspec.Struct, frozen=True, tag=True):
    """The order of samples of the loader from which the worker's steps read."""

    worker: WorkerId
    rank: Rank
    order: OrderSpec


class LoaderShown(msgspec.Struct, frozen=True, tag=True):
    """Description of a worker's loop and of its first reads.

    `loader`: its name, for people. `until`: steps of the training; `length`: steps of an epoch, 0 if it has no length.
    `reads`: those of step 0, sent before the worker is ready, and again together with those of step 1; batches that
    contain no tensors, arrays or texts have no record.
    """

    worker: WorkerId
    loader: str
    until: int
    length: int = 0
    reads: list[list[BatchRecord]] = []


class ProducerWanted(msgspec.Struct, frozen=True, tag=True):
    """The worker reads from its script's loader number `loader`, counted from 0 in the order of creation."""

    worker: WorkerId
    loader: int


# --- a producer to its agent -------------------------------------------------------------------------------------


class ProducerServed(msgspec.Struct, frozen=True, tag=True):
    """A producer has made, or found, its first entry. Sent once; if it ends later, the script is not at fault.

    `worker`: the producer's own name, as in its `WorkerEnv`.
    """

    worker: WorkerId
    loader: int


# --- an agent to the coordinator ---------------------------------------------------------------------------------


class DataNoted(msgspec.Struct, frozen=True, tag=True):
    """A note about a node's data cache, for people; it has no consequence."""

    node: NodeId
    text: str

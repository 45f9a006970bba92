"""With how many replicas a job with spares trains: no more than are wanted, on however many nodes it is. Pure.

A coordinator takes each node that joins for the wish to grow, and a world grows onto any node that is free. Without
spares there is no such node, and who is given back is one replica fewer. With spares the coordinator must be told.
"""

from regrow.membership.view import JobView
from regrow_clusters.cluster.sizes import wanted_size
from regrow_clusters.slurm.job_file import SlurmJobSpec
from regrow_clusters.slurm.reading import JobRequests


def fewer_to_train(spec: SlurmJobSpec, requests: JobRequests, view: JobView) -> int | None:
    """Number of replicas to request from the coordinator; None: it wants no more than it should."""
    wanted = wanted_size(spec.elastic_spec(replicas=requests.replicas))
    return wanted if spec.spares and view.wanted > wanted else None

"""Number of replicas with which a job with spares trains: at most the wanted number, however many nodes it has. Pure.

A coordinator takes each node that joins as a request to grow, and the world grows onto any free node. Without spares
there is no free node, and a released node is one replica fewer. With spares the coordinator needs an explicit size.
"""

from regrow.membership.view import JobView
from regrow_clusters.cluster.sizes import wanted_size
from regrow_clusters.slurm.job_file import SlurmJobSpec
from regrow_clusters.slurm.reading import JobRequests


def fewer_to_train(spec: SlurmJobSpec, requests: JobRequests, view: JobView) -> int | None:
    """Smaller number of replicas to request from the coordinator; None: its own number is not too large."""
    wanted = wanted_size(spec.elastic_spec(replicas=requests.replicas))
    return wanted if spec.spares and view.wanted > wanted else None

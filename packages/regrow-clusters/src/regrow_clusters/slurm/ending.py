"""End of a gang's Slurm job: by its first node, or by a survivor if that is lost. No node stays allocated."""

import contextlib
import shlex
import time
from collections.abc import Callable
from typing import Final

import msgspec

from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.ids import Seconds
from regrow.launch.addresses import endpoint_of
from regrow_clusters.slurm.client import SlurmClient, SlurmFailure
from regrow_clusters.slurm.node_arguments import GangNode
from regrow_clusters.slurm.observing import backups
from regrow_clusters.slurm.reading import JobRequests, SlurmJob
from regrow_clusters.slurm.scripts import JobPart, script_again

TURN_S: Final[Seconds] = 5.0
"""Delay between two survivors, which in turn check whether another has submitted the next gang."""
_ANSWER_S: Final[Seconds] = 15.0
Say = Callable[[str], None]


class GangEnd:
    """The end of a gang's Slurm job, on one of its nodes.

    Args:
        part: the gang.
        gang_node: this node.
        slurm: the cluster.
        requests: reads the users' requests.
        say: prints a line for the user.
        sleep: waits this long.
    """

    def __init__(
        self,
        part: JobPart,
        gang_node: GangNode,
        slurm: SlurmClient,
        requests: Callable[[], JobRequests],
        say: Say,
        sleep: Callable[[Seconds], None] = time.sleep,
    ) -> None:
        self._part, self._gang_node, self._slurm = part, gang_node, slurm
        self._requests, self._say, self._sleep = requests, say, sleep

    def by_first(self, code: int, avoid: tuple[str, ...]) -> None:
        """End the gang from its first node: submit it again if it can be retried; else remove its pending replicas.

        `avoid`: the nodes that are bad now, which may be fewer than those that this gang excluded.
        """
        queue = self._slurm.queue(self._part.spec.name)
        if code != RUN_AGAIN or self._is_over(queue):
            self.end_replicas(queue)
        else:
            self._submit_next(queue, avoid)

    def by_survivor(self) -> None:
        """End the gang from another node, as its coordinator is gone, unless Slurm still reaches the first host."""
        in_line = backups(self._part.nodes)
        if self._gang_node.index not in in_line:
            return
        try:
            self._slurm.queue(self._part.spec.name)
        except SlurmFailure:
            return  # this node itself is cut off
        try:
            self._slurm.on_host(self._gang_node.job_id, self._gang_node.first_host, ["true"], within=_ANSWER_S)
        except SlurmFailure as failure:
            self._say(f"{self._gang_node.first_host} does not answer ({failure.cause}); the allocation ends")
        else:
            return  # its batch script ends the allocation
        self._sleep(TURN_S * in_line.index(self._gang_node.index))
        queue = self._slurm.queue(self._part.spec.name)
        if self._is_over(queue):
            self.end_replicas(queue)
        else:
            self._submit_next(queue, (*self._part.avoid, self._gang_node.first_host))
        self._slurm.cancel(self._gang_node.job_id)

    def by_successor(self, code: int, at: str) -> None:
        """End a gang that went on after the loss of its first coordinator; reports the code to the batch script.

        Args:
            code: the job's exit code; 75 also if it is unknown.
            at: address of the last coordinator.
        """
        in_line = backups(self._part.nodes)
        if self._gang_node.index and self._gang_node.index not in in_line:
            return
        self._sleep(TURN_S * (in_line.index(self._gang_node.index) if self._gang_node.index else 0))
        queue = self._slurm.queue(self._part.spec.name)
        if not any(job.job_id == self._gang_node.job_id and job.state == "RUNNING" for job in queue):
            return  # it is ending
        if code == RUN_AGAIN and self._listens(at, queue):
            return  # this node itself is cut off
        if code == RUN_AGAIN and not self._is_over(queue):
            self._submit_next(queue, (*self._part.avoid, self._gang_node.first_host))
        else:
            self.end_replicas(queue)
        try:
            word = shlex.quote(f"{self._gang_node.result}/code")
            say = ["sh", "-c", f"test -p {word} && echo {code} > {word}"]
            self._slurm.on_host(self._gang_node.job_id, self._gang_node.first_host, say, within=_ANSWER_S)
        except SlurmFailure as failure:
            self._say(f"{self._gang_node.first_host} does not answer ({failure.cause}); the allocation ends")
            self._slurm.cancel(self._gang_node.job_id)

    def _listens(self, at: str, queue: list[SlurmJob]) -> bool:
        """True if a coordinator listens at an address of one of the job's nodes; the node itself is asked."""
        host, port = endpoint_of("the coordinator's address", at)
        for job in queue:
            for node in job.nodes if job.state == "RUNNING" else ():
                if self._slurm.address(node) == host:
                    knock = ["bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}"]
                    with contextlib.suppress(SlurmFailure):
                        self._slurm.on_host(job.job_id, node, knock, within=_ANSWER_S)
                        return True
        return False

    def end_replicas(self, queue: list[SlurmJob]) -> None:
        """Cancel the pending replicas; running ones end with the job."""
        for job in queue:
            if job.place is not None and job.state == "PENDING":
                self._slurm.cancel(job.job_id, pending=True)

    def _is_over(self, queue: list[SlurmJob]) -> bool:
        """True if the user or Slurm wanted the end. A job that Slurm is ending is not RUNNING any more."""
        mine = next((job for job in queue if job.job_id == self._gang_node.job_id), None)
        return self._requests().over or mine is None or mine.state != "RUNNING"

    def _submit_next(self, queue: list[SlurmJob], avoid: tuple[str, ...]) -> None:
        if any(job.place is None and job.job_id > self._gang_node.job_id and not job.done for job in queue):
            return  # another survivor has submitted it
        attempt = self._part.attempt + 1
        if attempt > self._part.spec.max_restarts + 1:
            self._say(f"the gang was started {self._part.attempt} times; maxRestarts is {self._part.spec.max_restarts}")
            self.end_replicas(queue)
            return
        requests = self._requests()
        gone = tuple(sorted({*requests.avoided(time.time()), *avoid}))
        mine, spec = self._slurm.batch_script(self._gang_node.job_id), self._part.spec
        if requests.replicas is not None:
            spec = msgspec.structs.replace(spec, replicas=requests.replicas)
        job_id = self._slurm.submit(script_again(mine, JobPart(spec, None, attempt, gone)))
        without = f", without {', '.join(gone)}" if gone else ""
        self._say(f"the gang is submitted anew{without}: Slurm job {job_id}")

"""The used part of Ray: bundles of resources, actors in them, draining machines, metrics."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from regrow.core.errors import RegrowError, UsageError
from regrow.core.ids import Seconds
from regrow.core.process.extras import install_line
from regrow.observe.watch.present import JobFigures
from regrow_guests.ray.node import RayNode


def check_ray() -> None:
    """Raises `UsageError` if Ray is not installed."""
    if find_spec("ray") is None:
        raise UsageError("this needs Ray", hint=install_line("ray", package="regrow-guests"))


class RayCluster:
    """The cluster that the driver is connected to.

    Args:
        job: the job's name, a label of its metrics.
        resources: of one node of the job.
    """

    def __init__(self, job: str, resources: Mapping[str, float]) -> None:
        from ray.util import metrics

        self._resources = dict(resources)
        self._tags = {"job": job}
        self._gauges = {
            name: metrics.Gauge(f"regrow_{name}", description=text, tag_keys=("job",))
            for name, text in (
                ("step", "Newest step that all ranks have committed"),
                ("incidents", "Faults"),
                ("goodput", "Share of the ranks' time that was productive, 0 to 1"),
                ("nodes", "Nodes that run"),
            )
        }

    def bundles(self, count: int) -> Any:
        """Request a placement group with one bundle on each of this number of machines."""
        from ray.util.placement_group import placement_group

        return placement_group([dict(self._resources)] * count, strategy="STRICT_SPREAD")

    def release(self, group: Any) -> None:
        """Release a placement group, which ends all actors in it."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)

    def actor(self, group: Any, bundle: int) -> Any:
        """Create an actor in a bundle; it starts as soon as Ray has the bundle."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        rest = {name: amount for name, amount in self._resources.items() if name not in ("CPU", "GPU", "memory")}
        there = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        made = ray.remote(_Actor).options(
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            memory=self._resources.get("memory"),
            resources=rest or None,
            scheduling_strategy=there,
            max_restarts=0,
        )
        return made.remote()

    def end(self, actor: Any) -> None:
        """End an actor and its process."""
        import ray

        ray.kill(actor, no_restart=True)

    def ready(self, refs: list[Any], within: Seconds) -> list[Any]:
        """The available ones of these refs, after a wait of at most `within` seconds."""
        import ray

        return list(ray.wait(refs, num_returns=1, timeout=within)[0]) if refs else []

    def value(self, ref: Any) -> Any:
        """Value of an available ref. Raises `ActorLost`."""
        import ray
        from ray.exceptions import RayActorError, RaySystemError

        try:
            return ray.get(ref)
        except (RayActorError, RaySystemError) as error:
            raise ActorLost(str(error)) from error

    def going(self) -> set[str]:
        """Ids of draining machines, which will be preempted, or removed by the autoscaler."""
        # Ray's own libraries use this too; it has no public name yet.
        from ray._private.state import state

        return set(state.get_draining_nodes())

    def show(self, nodes: int, seen: JobFigures | None) -> None:
        """Set Ray's metrics."""
        self._gauges["nodes"].set(nodes, self._tags)
        if seen is not None:
            self._gauges["step"].set(max(0, seen.step), self._tags)
            self._gauges["incidents"].set(seen.incidents, self._tags)
            if seen.goodput is not None:
                self._gauges["goodput"].set(seen.goodput, self._tags)


class ActorLost(RegrowError):
    """The actor or its machine is gone."""


class _Actor(RayNode):
    """A node of the job that reports its machine."""

    def where(self) -> tuple[str, str, int]:
        """Ray's id of the machine, the machine's address, and a free port."""
        import ray

        address, port = self.place(ray.util.get_node_ip_address())
        return ray.get_runtime_context().get_node_id(), address, port

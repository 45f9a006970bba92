"""`regrow agent --join`: adds a node to a running job. Everything but the node's own settings comes from the job."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from regrow.core.errors import CoordinatorGone, NoPlaceYet, UsageError
from regrow.core.hosts import LOOPBACK, address_of, own_addresses, place_to_listen
from regrow.core.ids import NodeId, Seconds
from regrow.launch.addresses import check_reachable, endpoint_of
from regrow.launch.cache import cache_plan
from regrow.launch.checks import check_label, in_range, some_time
from regrow.launch.elastic import default_slots
from regrow.launch.folder import find_job
from regrow.launch.job import HostEnvironment, JobPlan
from regrow.launch.remote import CoordinatorClient
from regrow.launch.script import check_script
from regrow.membership.admission import JoinOffer, JoinRequest

_ASK_AGAIN_S: Final[Seconds] = 0.5


class AgentFlags(msgspec.Struct, frozen=True):
    """Flags of `regrow agent` as text, one field for each; `regrow agent --help` describes them.

    `join`: `HOST:PORT`, the name of a job of this user on this machine, or empty for the only one.
    """

    join: str = ""
    slots: int | None = None
    stay: str = ""
    name: str = ""
    domain: str = ""
    bind: str = ""
    local_addr: str = ""
    state_addr: str = ""
    data_cache: str = ""
    data_cache_bytes: str = ""
    grace: str = "30s"
    wait: str = ""
    node_metrics: str = ""
    quiet: bool = False


def make_join_plan(flags: AgentFlags, around: HostEnvironment, chdir: Callable[[str], None] = os.chdir) -> JobPlan:
    """Ask the job to admit this node, and make the plan of the node's part in it.

    The script is looked up from the folder in which the job was started, if this machine has it, else from here.

    Raises:
        UsageError: there is no such job, it takes no more nodes, its script is not on this machine, or a flag is wrong.
    """
    bind = flags.bind or LOOPBACK
    endpoint, token = _find(flags.join, around)
    check_reachable(endpoint[0], bind)
    # The node's own flags are checked before the job is asked.
    slots = None if flags.slots is None else in_range("--slots", flags.slots, 1)
    stay = some_time("--stay", flags.stay) if flags.stay else None
    grace = some_time("--grace", flags.grace)
    domains = [check_label(flags.domain)] if flags.domain else []
    node_metrics = place_to_listen("--node-metrics", flags.node_metrics)
    ways = own_addresses("--state-addr", flags.state_addr)
    cache = cache_plan(flags.data_cache, flags.data_cache_bytes, home=around.data_home)
    wait = some_time("--wait", flags.wait) if flags.wait else 0.0
    client = CoordinatorClient(address_of(*endpoint), token)
    offer = asked_for_a_place(lambda: client.join(JoinRequest(NodeId(flags.name))), wait)
    if Path(offer.folder).is_dir():
        chdir(offer.folder)
    _check_script(offer)
    return JobPlan(
        spec=offer.spec,
        script=offer.script,
        jobs_home=around.jobs_home,
        node_rank=offer.node_rank,
        name=offer.node,
        local=offer.local,
        domains=domains,
        slots=slots or default_slots(offer.spec),
        stay=stay,
        drain_grace=grace,
        token=token,
        bind=bind,
        endpoint=endpoint,
        term=offer.term,
        node_metrics=node_metrics,
        advertise=flags.local_addr,
        ways=ways,
        master_port=offer.master_port,
        preload=offer.preload,
        checkpoint_dir=offer.checkpoint_dir,
        cache=cache,
        grace=offer.grace,
        quiet=flags.quiet,
        notes=around.notes(bind),
    )


def asked_for_a_place(
    ask: Callable[[], JoinOffer],
    wait: Seconds,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[Seconds], None] = time.sleep,
) -> JoinOffer:
    """The job's offer; asks again for `wait` seconds if nobody answers or no place is free. Raises `UsageError`."""
    until = clock() + wait
    while True:
        try:
            return ask()
        except (CoordinatorGone, NoPlaceYet):
            if clock() >= until:
                raise
        sleep(_ASK_AGAIN_S)


def _find(join: str, around: HostEnvironment) -> tuple[tuple[str, int], str]:
    """Address of the coordinator, and the job's token."""
    if ":" in join:
        host, port = endpoint_of("--join", join)
        if not around.token:
            raise UsageError(
                "a node that joins a job needs the job's secret",
                hint="give --token-file or set REGROW_TOKEN; on the job's own machine, name the job instead",
            )
        return (LOOPBACK if host == "localhost" else host, port), around.token
    entry = find_job(around.jobs_home, join or None)
    entry.encrypt()
    return endpoint_of("--join", entry.address), entry.token


def _check_script(offer: JoinOffer) -> None:
    try:
        check_script(offer.script, offer.preload)
    except UsageError as error:
        raise UsageError(
            f"job {offer.spec.job} cannot run on this node: {error.cause}",
            hint=f"the job was started in {offer.folder}; its script must be at the same place here",
        ) from error

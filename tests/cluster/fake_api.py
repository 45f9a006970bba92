"""The store over HTTP, as an API server speaks it: for lightkube, and for whoever points kubectl at it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

from aiohttp import web
from tests.cluster.fake_discovery import NO_NAMESPACE, FakeDiscovery, as_table
from tests.cluster.fake_nodes import containers_of
from tests.cluster.fake_store import Change, FakeStore, Manifest, Refused

_TRUE = ("1", "t", "T", "TRUE", "true", "True")


class FakeApi:
    """Handlers. `cut`: ends all watches, as a load balancer does. `down`: every request is refused while it is true."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.requests: list[tuple[str, str]] = []
        self.down = False
        self.managers: set[str] = set()
        """Under which names was written."""
        self.unserved: set[str] = set()
        """Resources of which this server knows nothing."""
        self.logs: Callable[[str], str] = lambda name: ""
        """Output of a pod until now; `Refused` if it has not started."""
        self.clock_ahead = 0.0
        """Seconds by which its clock differs from this machine's, as its answers have it."""
        self._watches: set[asyncio.Queue[Change | None]] = set()
        store.listeners.append(self._spread)

    def app(self) -> web.Application:
        """As an application of aiohttp."""
        app = web.Application(client_max_size=2**24)
        FakeDiscovery(self.store).add_to(app)
        for root in ("/api/{version}", "/apis/{group}/{version}"):
            app.router.add_route("*", root + "/{plural}", self._collection)
            app.router.add_route("*", root + "/namespaces/{namespace}/{plural}", self._collection)
            app.router.add_route("*", root + "/namespaces/{namespace}/{plural}/{name}", self._object)
            app.router.add_route("*", root + "/namespaces/{namespace}/{plural}/{name}/{part}", self._object)
            bare = f"/{{plural:{'|'.join(NO_NAMESPACE)}}}"
            app.router.add_route("*", root + bare + "/{name}", self._object)
            app.router.add_route("*", root + bare + "/{name}/{part}", self._object)
        app.on_response_prepare.append(self._date)
        return app

    async def _date(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Date"] = formatdate(time.time() + self.clock_ahead, usegmt=True)

    def cut(self) -> None:
        """End all watches."""
        for queue in self._watches:
            queue.put_nowait(None)

    def forget_watches(self) -> None:
        """Those there are hear nothing from now on, and nobody ends them: as behind a NAT that has forgotten them."""
        self._watches.clear()

    def _spread(self, change: Change) -> None:
        for queue in self._watches:
            queue.put_nowait(change)

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._on_collection)

    async def _object(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._on_object)

    async def _answer(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        if request.method != "GET":
            self.managers.add(request.query.get("fieldManager", ""))
        if self.down:
            return _json(Refused(503, "ServiceUnavailable", "down").status(), status=503)
        if request.match_info["plural"] in self.unserved:
            return web.Response(status=404, text="404 page not found\n")
        if request.can_read_body and "json" not in request.content_type:
            text = "the body must be JSON: this server does not speak protobuf"
            return _json(Refused(415, "UnsupportedMediaType", text).status(), status=415)
        try:
            found: web.StreamResponse = await handler(request)
        except Refused as refusal:
            return _json(refusal.status(), status=refusal.code)
        return found

    async def _on_collection(self, request: web.Request) -> web.StreamResponse:
        plural, namespace = request.match_info["plural"], request.match_info.get("namespace", "")
        matches = _selector(request)
        if request.method == "POST":
            strict = request.query.get("fieldValidation") == "Strict"
            return _json(self.store.create(plural, namespace, await request.json(), strict=strict), status=201)
        if request.method == "DELETE":
            for each in self.store.all_of(plural, namespace, matches):
                self.store.delete(plural, each["metadata"]["namespace"], each["metadata"]["name"])
            return _json({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        if request.query.get("watch", "") in _TRUE:
            return await self._watch(request, plural, namespace, matches)
        found = self.store.all_of(plural, namespace, matches)
        if "as=Table" in request.headers.get("Accept", "") and plural in self.store.crds:
            return _json(as_table(self.store.crds[plural], found, str(self.store.version)))
        first = int(request.query.get("continue", "0"))
        limit = int(request.query.get("limit", "0")) or len(found)
        meta = {"resourceVersion": str(self.store.version)}
        if first + limit < len(found):
            meta["continue"] = str(first + limit)
        return _json({"kind": "List", "apiVersion": "v1", "metadata": meta, "items": found[first : first + limit]})

    async def _on_object(self, request: web.Request) -> web.StreamResponse:
        where = request.match_info
        plural, namespace, name, part = (
            where["plural"],
            where.get("namespace", ""),
            where["name"],
            where.get("part", ""),
        )
        if part == "eviction":
            self.store.evict(namespace, name)
            return _json({"kind": "Status", "apiVersion": "v1", "status": "Success"}, status=201)
        if part == "log":
            return await self._log(request, namespace, name)
        if part == "scale":
            return _json(await self._scale(request, plural, namespace, name))
        if request.method == "GET":
            found = self.store.get(plural, namespace, name)
            if "as=Table" in request.headers.get("Accept", "") and plural in self.store.crds:
                return _json(as_table(self.store.crds[plural], [found], str(self.store.version)))
            return _json(found)
        if request.method == "PUT":
            return _json(self.store.replace(plural, namespace, name, await request.json(), part=part))
        if request.method == "PATCH":
            return _json(self.store.patch(plural, namespace, name, await request.json(), part=part))
        grace, uid = request.query.get("gracePeriodSeconds"), ""
        if request.can_read_body and (body := await request.json()):  # then nothing of the query counts
            grace = body.get("gracePeriodSeconds")
            uid = (body.get("preconditions") or {}).get("uid", "")
        seconds = None if grace is None else int(grace)
        return _json(self.store.delete(plural, namespace, name, grace=seconds, uid=uid))

    async def _log(self, request: web.Request, namespace: str, name: str) -> web.StreamResponse:
        found = self.store.get("pods", namespace, name)
        names, asked = containers_of(found), request.query.get("container", "")
        if not asked and len(names) > 1:  # the rule of GET .../pods/NAME/log; kubectl chooses one itself
            text = f"a container name must be specified for pod {name}, choose one of: [{' '.join(names)}]"
            raise Refused(400, "BadRequest", text)
        if asked and asked not in names:
            raise Refused(400, "BadRequest", f"container {asked} is not valid for pod {name}")
        if not found["spec"].get("nodeName"):
            return web.Response(status=204)
        told = self.logs(name)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        tail = int(request.query.get("tailLines", "0"))
        await response.write("".join(told.splitlines(keepends=True)[-tail:]).encode())
        while request.query.get("follow", "") in _TRUE and not self._over(namespace, name):
            await asyncio.sleep(0.01)
            news = self.logs(name)[len(told) :]
            told += news
            await response.write(news.encode())
        return response

    def _over(self, namespace: str, name: str) -> bool:
        found = self.store.objects.get(("pods", namespace, name))
        return found is None or found["status"]["phase"] in ("Succeeded", "Failed")

    async def _scale(self, request: web.Request, plural: str, namespace: str, name: str) -> Manifest:
        paths = self.store.crds[plural]["spec"]["versions"][0]["subresources"]["scale"]
        found = self.store.get(plural, namespace, name)
        if request.method != "GET":
            body = await request.json()
            changed = {"spec": {_last(paths["specReplicasPath"]): body["spec"]["replicas"]}}
            found = self.store.patch(plural, namespace, name, changed)
        wanted = found["spec"].get(_last(paths["specReplicasPath"]))
        if wanted is None:
            raise Refused(500, "InternalError", f"the spec replicas field {paths['specReplicasPath']!r} does not exist")
        status = found.get("status") or {}
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {key: found["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")},
            "spec": {"replicas": wanted},
            "status": {
                "replicas": status.get(_last(paths["statusReplicasPath"]), 0),
                "selector": status.get(_last(paths["labelSelectorPath"]), ""),
            },
        }

    async def _watch(
        self, request: web.Request, plural: str, namespace: str, matches: Callable[[Manifest], bool]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        version = int(request.query.get("resourceVersion") or 0)
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        try:
            before = self.store.since(version) if version else []
        except Refused as refusal:
            await response.prepare(request)
            await response.write(json.dumps({"type": "ERROR", "object": refusal.status()}).encode() + b"\n")
            return response
        self._watches.add(queue)
        try:
            await response.prepare(request)
            for change in before:
                await _send(response, change, plural, namespace, matches)
            while (news := await queue.get()) is not None:
                await _send(response, news, plural, namespace, matches)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._watches.discard(queue)
        return response


async def _send(
    response: web.StreamResponse, change: Change, plural: str, namespace: str, matches: Callable[[Manifest], bool]
) -> None:
    """An object that comes into a selector is ADDED to who watches by it, one that leaves it DELETED."""
    if change.plural != plural or namespace not in ("", change.new["metadata"]["namespace"]):
        return
    before = change.old is not None and matches(change.old)
    after = change.what != "DELETED" and matches(change.new)
    if not before and not after:
        return
    what = "MODIFIED" if before and after else "ADDED" if after else "DELETED"
    await response.write(json.dumps({"type": what, "object": change.new}).encode() + b"\n")


def _json(body: Manifest, status: int = 200) -> web.Response:
    """As the API server sends it: without a charset."""
    return web.Response(body=json.dumps(body).encode(), status=status, headers={"Content-Type": "application/json"})


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _selector(request: web.Request) -> Callable[[Manifest], bool]:
    labels = [each for each in request.query.get("labelSelector", "").split(",") if each]
    fields = [each for each in request.query.get("fieldSelector", "").split(",") if each]

    def matches(found: Manifest) -> bool:
        have = found["metadata"].get("labels") or {}
        return all(_label_holds(have, each) for each in labels) and all(_field_holds(found, each) for each in fields)

    return matches


def _label_holds(have: dict[str, str], term: str) -> bool:
    if "!=" in term:
        name, value = term.split("!=", 1)
        return have.get(name) != value
    if "=" in term:
        name, value = term.replace("==", "=").split("=", 1)
        return have.get(name) == value
    return term[1:] not in have if term.startswith("!") else term in have


def _field_holds(found: Manifest, term: str) -> bool:
    path, value = term.replace("==", "=").split("=", 1)
    negated = path.endswith("!")
    node: Any = found
    for word in path.rstrip("!").split("."):
        node = node.get(word, "") if isinstance(node, dict) else ""
    return (str(node) == value) != negated


@asynccontextmanager
async def serve(api: FakeApi) -> AsyncIterator[str]:
    """Listens on loopback; gives the address."""
    runner = web.AppRunner(api.app(), shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}"
    finally:
        api.cut()
        await runner.cleanup()

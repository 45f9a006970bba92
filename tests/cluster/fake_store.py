"""Store of an API server, without HTTP: objects with versions, and their rules. One thread, no waiting.

Each rule has its case in `test_api_conformance.py`, with its source in Kubernetes' documentation.
"""

import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from tests.cluster.fake_schema import default_and_prune, unknown_fields, violations

Manifest = dict[str, Any]
Key = tuple[str, str, str]
"""Plural name, namespace, name."""
_FIXED = (
    *("uid", "resourceVersion", "creationTimestamp", "generation", "namespace", "name"),
    *("deletionTimestamp", "deletionGracePeriodSeconds"),
)
"""Of an object's metadata what only the server changes."""
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"


class Refused(Exception):
    """An answer other than the object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message

    def status(self) -> Manifest:
        """As the API server says it."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }


class Change:
    """One line of the history: what a watch is told."""

    def __init__(self, version: int, plural: str, what: str, old: Manifest | None, new: Manifest) -> None:
        self.version = version
        self.plural = plural
        self.what = what
        self.old = old
        self.new = new


_FOREGROUND = "foregroundDeletion"


class FakeStore:
    """All objects of a cluster. `wall`: seconds since the epoch."""

    def __init__(self, wall: Callable[[], float], *, seed: int = 0) -> None:
        self.wall = wall
        self.objects: dict[Key, Manifest] = {}
        self.history: list[Change] = []
        self.oldest = 0
        self.crds: dict[str, Manifest] = {}
        self.listeners: list[Callable[[Change], None]] = []
        self.refuse: Callable[[str, str, Manifest], Refused | None] = lambda verb, plural, body: None
        self._version = 1000
        self._chance = random.Random(seed)

    @property
    def version(self) -> int:
        """Of the newest change."""
        return self._version

    def install(self, crd: Manifest) -> None:
        """Take on a resource of its own."""
        self.crds[crd["spec"]["names"]["plural"]] = crd

    def take_over(self, objects: dict[Key, Manifest], version: int) -> None:
        """Have these objects and no others, as a server that is restored from a record of another one."""
        self.objects, self._version, self._chance = objects, version, random.Random(version)
        self.compact()

    # --- reading -----------------------------------------------------------------------------------------------

    def get(self, plural: str, namespace: str, name: str) -> Manifest:
        """One object."""
        found = self.objects.get((plural, namespace, name))
        if found is None:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found')
        return _copied(found)

    def all_of(
        self, plural: str, namespace: str = "", matches: Callable[[Manifest], bool] | None = None
    ) -> list[Manifest]:
        """All of a kind, by namespace and name."""
        found = [each for key, each in sorted(self.objects.items()) if key[0] == plural and namespace in ("", key[1])]
        return [_copied(each) for each in found if matches is None or matches(each)]

    def since(self, version: int) -> list[Change]:
        """Changes after a version. Raises `Refused` if that is too long ago."""
        if version < self.oldest:
            raise Refused(410, "Expired", f"too old resource version: {version} ({self._version})")
        return [change for change in self.history if change.version > version]

    def compact(self) -> None:
        """Forget the history, as etcd does after minutes."""
        self.history.clear()
        self.oldest = self._version

    # --- writing -----------------------------------------------------------------------------------------------

    def create(self, plural: str, namespace: str, body: Manifest, *, strict: bool = False) -> Manifest:
        """A new object."""
        new = _copied(body)
        meta = new.setdefault("metadata", {})
        meta["namespace"] = namespace
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + "".join(self._chance.choices(_SUFFIX, k=5))
        self._check_refused("create", plural, new)
        _check_name(plural, meta.get("name", ""))
        if plural == "services":
            _check_service_name(meta["name"])
        key = (plural, namespace, meta["name"])
        if key in self.objects:
            raise Refused(409, "AlreadyExists", f'{plural} "{meta["name"]}" already exists')
        if plural in self.crds:
            new.pop("status", None)
            new = self._fit(plural, new, strict=strict)
            meta = new["metadata"]
        if plural == "pods":
            _check_pod(new)
            new["status"] = {"phase": "Pending"}
        meta["uid"] = str(uuid.UUID(int=self._chance.getrandbits(128)))
        meta["creationTimestamp"] = self.stamp()
        meta["generation"] = 1
        meta.pop("deletionTimestamp", None)
        return self._store("ADDED", key, None, new)

    def replace(self, plural: str, namespace: str, name: str, body: Manifest, *, part: str = "") -> Manifest:
        """All of an object, or one part of it, if nobody has written since it was read."""
        old = self.get(plural, namespace, name)
        self._check_refused("update", plural, body)
        given = body.get("metadata", {}).get("resourceVersion")
        if not given and (plural in self.crds or plural in ("leases", "poddisruptionbudgets")):
            text = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
            raise Refused(422, "Invalid", f'{plural} "{name}" is invalid: {text}')
        if given and given != old["metadata"]["resourceVersion"]:
            text = f'Operation cannot be fulfilled on {plural} "{name}": the object has been modified'
            raise Refused(409, "Conflict", f"{text}; please apply your changes to the latest version and try again")
        if body.get("metadata", {}).get("uid") not in (None, old["metadata"]["uid"]):
            raise Refused(409, "Conflict", f"the UID in the precondition differs from that of {plural} {name}")
        new = _copied(old)
        if part == "status":
            new["status"] = _copied(body.get("status") or {})
        else:
            kept = {key: value for key, value in old["metadata"].items() if key in _FIXED}
            new = {**_copied(body), "metadata": {**kept, **_editable(body.get("metadata", {}))}}
            if plural in self.crds or plural in ("pods", "nodes"):
                new.pop("status", None)
                if "status" in old:
                    new["status"] = old["status"]
        return self._update(plural, old, new)

    def patch(self, plural: str, namespace: str, name: str, changes: Manifest, *, part: str = "") -> Manifest:
        """A merge patch (RFC 7386)."""
        old = self.get(plural, namespace, name)
        if (uid := (changes.get("metadata") or {}).get("uid")) not in (None, old["metadata"]["uid"]):
            text = f'metadata.uid: Invalid value: "{uid}": field is immutable'
            raise Refused(422, "Invalid", f'{plural} "{name}" is invalid: {text}')
        merged = merge(old, changes)
        merged["metadata"].setdefault("resourceVersion", old["metadata"]["resourceVersion"])
        return self.replace(plural, namespace, name, merged, part=part)

    def _update(self, plural: str, old: Manifest, new: Manifest) -> Manifest:
        if plural in self.crds:
            new = self._fit(plural, new)
        meta = new["metadata"]
        if new.get("spec") != old.get("spec"):
            meta["generation"] = old["metadata"].get("generation", 1) + 1
        if new == old:
            return _copied(old)
        key = (plural, meta["namespace"], meta["name"])
        if meta.get("deletionTimestamp") and not (meta.get("finalizers") or meta.get("deletionGracePeriodSeconds")):
            return self._remove(key, new)
        return self._store("MODIFIED", key, old, new)

    def delete(self, plural: str, namespace: str, name: str, *, grace: int | None = None, uid: str = "") -> Manifest:
        """Ask an object to end: a pod that has a node gets its grace, finalizers are waited for."""
        old = self.get(plural, namespace, name)
        if uid not in ("", old["metadata"]["uid"]):
            text = f"the UID in the precondition ({uid}) does not match the UID in record ({old['metadata']['uid']})"
            raise Refused(409, "Conflict", f'Operation cannot be fulfilled on {plural} "{name}": {text}')
        self._check_refused("delete", plural, old)
        new = _copied(old)
        meta = new["metadata"]
        key = (plural, namespace, name)
        if self._graceful(plural, new) and grace != 0:
            seconds = new["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
            until = self.wall() + seconds
            if "deletionTimestamp" in meta and meta["deletionGracePeriodSeconds"] <= seconds:
                return old  # a grace can become shorter alone
            meta["deletionTimestamp"], meta["deletionGracePeriodSeconds"] = self.stamp(until), seconds
            return self._store("MODIFIED", key, old, new)
        if meta.get("finalizers"):
            # A grace that becomes shorter counts from the same request.
            asked = self.wall()
            if "deletionTimestamp" in meta:
                told = datetime.fromisoformat(meta["deletionTimestamp"]).timestamp()
                asked = told - meta["deletionGracePeriodSeconds"]
            meta["deletionTimestamp"], meta["deletionGracePeriodSeconds"] = self.stamp(asked), 0
            return self._store("MODIFIED", key, old, new) if new != old else old
        return self._remove(key, new)

    def evict(self, namespace: str, name: str) -> None:
        """As the eviction subresource: refused where a budget of the pod would have too few left of those that run."""
        pod = self.get("pods", namespace, name)
        for each in self.all_of("poddisruptionbudgets", namespace):
            wanted = each["spec"]["selector"]["matchLabels"].items()
            covered = [one for one in self.all_of("pods", namespace) if wanted <= one["metadata"]["labels"].items()]
            healthy = [one["metadata"]["name"] for one in covered if _healthy(one)]
            if pod in covered and name in healthy and len(healthy) <= each["spec"]["minAvailable"]:
                text = "Cannot evict pod as it would violate the pod's disruption budget."
                raise Refused(429, "TooManyRequests", text)
        self.delete("pods", namespace, name)

    def collect(self) -> int:
        """One turn of the garbage collector: what has no owner any more is deleted. How many there were."""
        alive = {each["metadata"]["uid"] for each in self.objects.values()}
        count = 0
        for key, each in list(self.objects.items()):
            owners = each["metadata"].get("ownerReferences") or []
            gone = owners and not any(owner["uid"] in alive for owner in owners)
            if gone and "deletionTimestamp" not in each["metadata"]:
                self.delete(*key)
                count += 1
            if "deletionTimestamp" in each["metadata"] and _FOREGROUND in (each["metadata"].get("finalizers") or []):
                count += self._collect_first(each)
        return count

    def _collect_first(self, owner: Manifest) -> int:
        """Delete what an object owns; it goes itself when nothing of that is left (foreground cascading deletion)."""
        uid = owner["metadata"]["uid"]
        own = [
            (key, each)
            for key, each in list(self.objects.items())
            if any(one["uid"] == uid for one in each["metadata"].get("ownerReferences") or [])
        ]
        left = [key for key, each in own if "deletionTimestamp" not in each["metadata"]]
        for key in left:
            self.delete(*key)
        if not own:
            where = next(key for key, each in self.objects.items() if each["metadata"]["uid"] == uid)
            kept = [each for each in owner["metadata"]["finalizers"] if each != _FOREGROUND]
            self.patch(*where, {"metadata": {"finalizers": kept}})
        return len(left)

    def stamp(self, at: float | None = None) -> str:
        """A time, in whole seconds as the API has it."""
        moment = datetime.fromtimestamp(self.wall() if at is None else at, UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

    # --- inside ------------------------------------------------------------------------------------------------

    def _graceful(self, plural: str, found: Manifest) -> bool:
        ended = found.get("status", {}).get("phase") in ("Succeeded", "Failed")
        return plural == "pods" and bool(found["spec"].get("nodeName")) and not ended

    def _fit(self, plural: str, found: Manifest, *, strict: bool = False) -> Manifest:
        crd = self.crds[plural]
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        if strict and (unknown := [each for each in unknown_fields(schema, found) if not each.startswith("metadata")]):
            text = ", ".join(f'unknown field "{each}"' for each in unknown)
            raise Refused(400, "BadRequest", f"strict decoding error: {text}")
        fitted = {**default_and_prune(schema, found), "metadata": found["metadata"]}
        if wrong := violations({**schema, "properties": {**schema["properties"], "metadata": {}}}, fitted):
            kind = crd["spec"]["names"]["kind"]
            raise Refused(422, "Invalid", f'{kind} "{found["metadata"]["name"]}" is invalid: {"; ".join(wrong)}')
        return fitted

    def _check_refused(self, verb: str, plural: str, body: Manifest) -> None:
        if refusal := self.refuse(verb, plural, body):
            raise refusal

    def _store(self, what: str, key: Key, old: Manifest | None, new: Manifest) -> Manifest:
        self._version += 1
        new["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = new
        self._tell(Change(self._version, key[0], what, old, _copied(new)))
        return _copied(new)

    def _remove(self, key: Key, last: Manifest) -> Manifest:
        self._version += 1
        last["metadata"]["resourceVersion"] = str(self._version)
        old = self.objects.pop(key, None)
        self._tell(Change(self._version, key[0], "DELETED", old, _copied(last)))
        return _copied(last)

    def _tell(self, change: Change) -> None:
        self.history.append(change)
        for listener in list(self.listeners):
            listener(change)


def _healthy(pod: Manifest) -> bool:
    return bool(pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"])


def _copied(found: Manifest) -> Manifest:
    return msgspec.json.decode(msgspec.json.encode(found), type=dict[str, Any])


def merge(old: Any, changes: Any) -> Any:
    """RFC 7386."""
    if not isinstance(changes, dict):
        return changes
    found = dict(old) if isinstance(old, dict) else {}
    for key, value in changes.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merge(found.get(key), value)
    return found


def _editable(meta: Manifest) -> Manifest:
    return {key: value for key, value in meta.items() if key not in _FIXED}


def _check_name(plural: str, name: str) -> None:
    if not name:
        raise Refused(422, "Invalid", f"{plural}: metadata.name: Required value: name or generateName is required")
    ok = all(part and part[0].isalnum() and part[-1].isalnum() for part in name.split("."))
    if not ok or len(name) > 253 or any(not (each.isalnum() or each in "-.") or each.isupper() for each in name):
        raise Refused(
            422, "Invalid", f"{plural}: metadata.name: Invalid value: {name!r}: a lowercase RFC 1123 subdomain"
        )


def _check_service_name(name: str) -> None:
    if not (name[0].isalpha() and "." not in name and len(name) <= 63):
        raise Refused(422, "Invalid", f"services: metadata.name: Invalid value: {name!r}: a DNS-1035 label")


def _check_pod(pod: Manifest) -> None:
    if not pod.get("spec", {}).get("containers"):
        raise Refused(422, "Invalid", "Pod is invalid: spec.containers: Required value")
    for name, value in (pod["metadata"].get("labels") or {}).items():
        if len(str(value)) > 63:
            raise Refused(
                422, "Invalid", f"Pod is invalid: metadata.labels: {name}: must be no more than 63 characters"
            )
    terms = (
        pod["spec"]
        .get("affinity", {})
        .get("nodeAffinity", {})
        .get("requiredDuringSchedulingIgnoredDuringExecution", {})
        .get("nodeSelectorTerms", [])
    )
    if any(len(field["values"]) != 1 for term in terms for field in term.get("matchFields", [])):
        raise Refused(422, "Invalid", "Pod is invalid: matchFields[0].values: must be only one value")

"""Requests of kubectl before anything else: the resources of an API server, their schemas, their tables."""

import re
from typing import Any

from aiohttp import web
from tests.cluster.fake_store import FakeStore, Manifest

CORE = {
    "pods": "Pod",
    "services": "Service",
    "secrets": "Secret",
    "events": "Event",
    "nodes": "Node",
    "namespaces": "Namespace",
    "serviceaccounts": "ServiceAccount",
}
GROUPS = {
    "apps/v1": {"deployments": "Deployment"},
    "rbac.authorization.k8s.io/v1": {
        "clusterroles": "ClusterRole",
        "clusterrolebindings": "ClusterRoleBinding",
        "roles": "Role",
        "rolebindings": "RoleBinding",
    },
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
}
NO_NAMESPACE = ("nodes", "namespaces", "clusterroles", "clusterrolebindings", "customresourcedefinitions", "queues")
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


class FakeDiscovery:
    """Handlers under `/version`, `/api`, `/apis` and `/openapi/v3`. `store`: which resources of its own there are."""

    def __init__(self, store: FakeStore) -> None:
        self._store = store

    def add_to(self, app: web.Application) -> None:
        """Its routes, which come before those of objects."""
        for path, handler in (
            ("/version", self._version),
            ("/api", self._core),
            ("/apis", self._groups),
            ("/api/v1", self._resources),
            ("/apis/{group}/{version}", self._resources),
            ("/openapi/v3", self._schemas),
            ("/openapi/v3/{where:.+}", self._schema),
        ):
            app.router.add_get(path, handler)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"major": "1", "minor": "32", "gitVersion": "v1.32.0"})

    async def _core(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "APIVersions", "versions": ["v1"]})

    async def _groups(self, request: web.Request) -> web.Response:
        found = []
        for each in self._known():
            group, _, version = each.partition("/")
            said = {"groupVersion": each, "version": version}
            found.append({"name": group, "versions": [said], "preferredVersion": said})
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": found})

    async def _resources(self, request: web.Request) -> web.Response:
        where = request.match_info
        name = f"{where['group']}/{where['version']}" if "group" in where else "v1"
        kinds = CORE if name == "v1" else self._known().get(name)
        if kinds is None:
            raise web.HTTPNotFound
        resources: list[Manifest] = []
        for plural, kind in kinds.items():
            names = self._store.crds.get(plural, {"spec": {"names": {}}})["spec"]["names"]
            inside = plural not in NO_NAMESPACE
            said = {"name": plural, "singularName": kind.lower(), "namespaced": inside, "kind": kind, "verbs": _VERBS}
            resources.append({**said, "shortNames": names.get("shortNames", [])})
            if plural in self._store.crds:
                scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": ["get", "patch", "update"]}
                resources.append({**said, **scale, "name": f"{plural}/scale"})
        return web.json_response(
            {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources}
        )

    async def _schemas(self, request: web.Request) -> web.Response:
        paths = {f"apis/{each}": {"serverRelativeURL": f"/openapi/v3/apis/{each}"} for each in self._known()}
        return web.json_response({"paths": {**paths, "api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}})

    async def _schema(self, request: web.Request) -> web.Response:
        name = request.match_info["where"].partition("/")[2]
        group, _, version = name.rpartition("/")
        schemas, paths = {}, {}
        for plural, kind in (CORE if name == "v1" else self._known().get(name, {})).items():
            mark = {"group": group, "version": version, "kind": kind}
            crd = self._store.crds.get(plural)
            body = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] if crd else {"type": "object"}
            schemas[f"{group}.{version}.{kind}"] = {**body, "x-kubernetes-group-version-kind": [mark]}
            operation = {
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "responses": {"200": {"description": "OK"}},
                "x-kubernetes-group-version-kind": mark,
            }
            root = f"/apis/{name}" if group else f"/api/{name}"
            inside = "" if plural in NO_NAMESPACE else "/namespaces/{namespace}"
            paths[f"{root}{inside}/{plural}/{{name}}"] = {"get": operation, "patch": operation}
        info = {"title": "fake", "version": "v1"}
        return web.json_response({"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}})

    def _known(self) -> dict[str, dict[str, str]]:
        own: dict[str, dict[str, str]] = {}
        for plural, crd in self._store.crds.items():
            for version in crd["spec"]["versions"]:
                name = f"{crd['spec']['group']}/{version['name']}"
                own.setdefault(name, {})[plural] = crd["spec"]["names"]["kind"]
        return {**GROUPS, **own}


def as_table(crd: Manifest, items: list[Manifest], version: str) -> Manifest:
    """Table of `kubectl get`, by the CRD's columns. (KEP-2334; only paths of plain fields.)"""
    columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    named = [{"name": "Name", "type": "string", "format": "name", "description": "", "priority": 0}]
    named += [{"format": "", "priority": 0, "description": "", **each} for each in columns]
    rows = [
        {
            "cells": [each["metadata"]["name"], *(_at(each, column["jsonPath"]) for column in columns)],
            "object": {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": each["metadata"]},
        }
        for each in items
    ]
    meta = {"resourceVersion": version}
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": meta,
        "columnDefinitions": named,
        "rows": rows,
    }


def _at(found: Any, path: str) -> Any:
    for word in re.findall(r"\w+", path):
        found = found.get(word) if isinstance(found, dict) else None
    return found

"""A CRD's structural schema applied as the API server does: unknown fields pruned, defaults filled in, all checked."""

from typing import Any


def default_and_prune(schema: dict[str, Any], value: Any) -> Any:
    """The value as it is stored."""
    if isinstance(value, dict) and schema.get("type") == "object":
        properties = schema.get("properties")
        keep = schema.get("x-kubernetes-preserve-unknown-fields") or properties is None
        found = dict(value) if keep else {key: each for key, each in value.items() if key in (properties or {})}
        for name, each in (properties or {}).items():
            if name in found and found[name] is None and not each.get("nullable"):
                del found[name]  # dropped, and then defaulted
            if name not in found and "default" in each:
                found[name] = each["default"]
            if name in found:
                found[name] = default_and_prune(each, found[name])
        return found
    if isinstance(value, list) and "items" in schema:
        return [default_and_prune(schema["items"], each) for each in value]
    return value


def violations(schema: dict[str, Any], value: Any, path: str = "") -> list[str]:
    """Errors in a value, in the API server's words."""
    kinds: dict[Any, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
    }
    kind = schema.get("type")
    if kind in kinds and (not isinstance(value, kinds[kind]) or (kind != "boolean" and isinstance(value, bool))):
        return [f"{path}: Invalid value: {value!r}: must be of type {kind}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path}: Unsupported value: {value!r}: supported values: {schema['enum']}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            found.append(f"{path}: Invalid value: {value}: should be greater than or equal to {schema['minimum']}")
        if value > schema.get("maximum", value):
            found.append(f"{path}: Invalid value: {value}: should be less than or equal to {schema['maximum']}")
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        found.append(f"{path}: Invalid value: {value!r}: should be at least {schema['minLength']} chars long")
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            found.append(f"{path}: Invalid value: {len(value)}: should have at least {schema['minItems']} items")
        for number, each in enumerate(value):
            found.extend(violations(schema.get("items", {}), each, f"{path}[{number}]"))
    if isinstance(value, dict):
        found.extend(f"{path}.{name}: Required value" for name in schema.get("required", []) if name not in value)
        for name, each in (schema.get("properties") or {}).items():
            if name in value:
                found.extend(violations(each, value[name], f"{path}.{name}".lstrip(".")))
    return found


def unknown_fields(schema: dict[str, Any], value: Any, path: str = "") -> list[str]:
    """Fields that would be pruned: what kubectl's strict validation refuses."""
    found: list[str] = []
    properties = schema.get("properties")
    if isinstance(value, dict) and properties is not None and not schema.get("x-kubernetes-preserve-unknown-fields"):
        for name, each in value.items():
            if name not in properties:
                found.append(f"{path}.{name}".lstrip("."))
            else:
                found.extend(unknown_fields(properties[name], each, f"{path}.{name}".lstrip(".")))
    return found

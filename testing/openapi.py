"""The OpenAPI description of the control interface, generated from the table of its operations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from .. import __version__
from .operations import Operation
from .shapes import Problem

PROBLEMS: Final = {
    "400": "the request is invalid; the message names the field and its allowed values",
    "404": "the object does not exist",
    "409": "the condition did not hold in time, or the broker's state does not allow it",
}
_REF: Final = "#/components/schemas/{name}"


def path_names(path: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", path)


def description(operations: Sequence[Operation[Any]]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document."""
    types = list(_types(operations))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Control of a Rocketlet broker under test",
            "version": __version__,
            "description": "Advances the broker's clock, injects faults, and shows the broker's state. For tests.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _types(operations: Sequence[Operation[Any]]) -> Iterator[Any]:
    yield Problem
    for operation in operations:
        yield operation.answer
        if operation.body is not None:
            yield operation.body


def _operation(operation: Operation[Any], by_type: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {
            "200": {"description": operation.summary, "content": _json(by_type[repr(operation.answer)])},
            **{
                code: {"description": text, "content": _json(by_type[repr(Problem)])} for code, text in PROBLEMS.items()
            },
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in path_names(operation.path)
    ]
    if operation.query is not None:
        parameters += _query(operation.query)
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(by_type[repr(operation.body)])}
    return described


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _query(query: type[msgspec.Struct]) -> list[dict[str, Any]]:
    _, components = msgspec.json.schema_components([query], ref_template=_REF)
    properties = components[query.__name__]["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]


def allowed(wanted: Any, path: str) -> str:
    """Return text about the allowed values of a field in a body: its JSON schema; the names of its fields if it is an
    object; the tags if it selects the type of an object; empty if they are unknown. `path` has the form of msgspec's
    errors, such as `$[0].nth`."""
    (schema,), components = msgspec.json.schema_components([wanted], ref_template=_REF)
    for part in re.findall(r"\.(\w+)|\[", path):
        schema = _resolved(schema, components)
        if part and "discriminator" in schema:
            if part == schema["discriminator"]["propertyName"]:
                return ", ".join(schema["discriminator"]["mapping"])
            schema = _with(part, schema["anyOf"], components)
        below = schema.get("properties", {}).get(part) if part else schema.get("items")
        if below is None:
            return ""
        schema = below
    schema = _resolved(schema, components)
    if "properties" in schema:
        return ", ".join(schema["properties"])
    shown = {name: value for name, value in schema.items() if name not in ("title", "description", "default")}
    return msgspec.json.encode(shown).decode()


def _with(name: str, schemas: list[dict[str, Any]], components: dict[str, Any]) -> dict[str, Any]:
    """Return the first schema that has a field of this name."""
    found = (_resolved(schema, components) for schema in schemas)
    return next((schema for schema in found if name in schema.get("properties", {})), {})


def _resolved(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return components[reference.rpartition("/")[2]] if reference else schema

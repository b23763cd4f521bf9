"""The dependencies of an application's handler, besides its message: `db: Annotated[Database, Depends(database)]`.

A dependency is a function. Its result is given to the handler; a generator's value is, and the rest of it runs when the
handler has ended. Dependencies may have dependencies. Each is called once for a message.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, get_type_hints

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Depends:
    """Beside the type of a parameter, in Annotated. `call`: a function, async or not, or a generator."""

    call: Callable[..., Any]


def dependencies_of(function: Callable[..., Any]) -> dict[str, Depends]:
    """By the name of the parameter. Raises ConfigError for annotations that cannot be read."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:  # names may be known to type checkers alone, or to a function
        texts = map(str, getattr(function, "__annotations__", {}).values())
        if any("Depends" in text for text in texts):
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigError(f"{name}: its annotations cannot be read: {error}; use names of its module") from None
        return {}
    found: dict[str, Depends] = {}
    for name, hint in hints.items():
        depends = next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Depends)), None)
        if depends is not None:
            found[name] = depends
    return found


async def resolved(
    wanted: Mapping[str, Depends],
    replaced: Mapping[Callable[..., Any], Callable[..., Any]],
    stack: AsyncExitStack,
    known: dict[Callable[..., Any], Any],
) -> dict[str, Any]:
    """The values by parameter. `replaced`: what a test gives in place of a dependency. `stack` ends the generators."""
    values: dict[str, Any] = {}
    for name, depends in wanted.items():
        call = replaced.get(depends.call, depends.call)
        if call not in known:
            below = await resolved(dependencies_of(call), replaced, stack, known)
            known[call] = await _value(call, below, stack)
        values[name] = known[call]
    return values


async def _value(call: Callable[..., Any], arguments: dict[str, Any], stack: AsyncExitStack) -> Any:
    if inspect.isasyncgenfunction(call):
        whole: Callable[..., AsyncIterator[Any]] = call
        return await stack.enter_async_context(asynccontextmanager(whole)(**arguments))
    if inspect.isgeneratorfunction(call):
        part: Callable[..., Iterator[Any]] = call
        return stack.enter_context(contextmanager(part)(**arguments))
    value = call(**arguments)
    return await value if inspect.isawaitable(value) else value


__all__ = ["Depends", "dependencies_of", "resolved"]

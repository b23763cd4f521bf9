"""The argument of an application's handler, as its annotation says: a Message, a model of pydantic, or a list of either."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from .consuming.decoding import Decode
from .dependencies import dependencies_of
from .errors import ConfigError
from .message import Message


def decode_of(function: Callable[..., Any], decode: Decode[Any] | None, *, takes_batches: bool) -> Decode[Any] | None:
    """The decoder of a handler: the one that is given, or its model's. Raises ConfigError for a handler whose parameters
    are not what it gets."""
    if not callable(function):
        raise ConfigError(f"{function!r} cannot be called; declare a function or `async def` function")
    taken = without(function, dependencies_of(function))
    hint = _first_hint(function, taken)
    is_list = hint is list or get_origin(hint) in (list, Sequence)
    if is_list and not takes_batches:
        raise _odd(function, hint, "without batch_size it gets one message at a time")
    one = next(iter(get_args(hint)), Any) if is_list else hint
    found: Decode[Any] | None = decode or getattr(one, "model_validate_json", None)
    if takes_batches and not is_list and _kind(hint) is not object:
        raise _odd(function, hint, "with batch_size it gets a list")
    if found is None and not issubclass(Message, _kind(one)):
        raise _odd(function, hint, "without decode=... it gets a Message, or a model of pydantic")
    if decode is not None and one is Message:
        raise _odd(function, hint, "with decode it gets what that returns, and a Message as its second parameter")
    return found


def without(handler: Callable[..., Any], wanted: Collection[str]) -> Callable[..., Any]:
    """A function with the parameters of a handler that its consumer gives."""
    signature = inspect.signature(handler)
    kept = [item for name, item in signature.parameters.items() if name not in wanted]

    def stand_in(*arguments: Any) -> None: ...

    stand_in.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    stand_in.__qualname__ = getattr(handler, "__qualname__", repr(handler))
    return stand_in


def _kind(hint: Any) -> type:
    """The class that a value has; object where it may be of any, or of several."""
    kind = get_origin(hint) or hint
    return kind if isinstance(kind, type) and kind not in (Any, UnionType) else object


def _first_hint(function: Callable[..., Any], taken: Callable[..., Any]) -> Any:
    """Any where a parameter says nothing, or names what only type checkers know."""
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):
        return Any
    return hints.get(next(iter(inspect.signature(taken).parameters), ""), Any)


def _odd(function: Callable[..., Any], hint: Any, reason: str) -> ConfigError:
    said = getattr(hint, "__qualname__", None) if isinstance(hint, type) else None
    name = getattr(function, "__qualname__", repr(function))
    return ConfigError(f"{name}: its first parameter is annotated {said or hint}; {reason}")


__all__ = ["decode_of", "without"]

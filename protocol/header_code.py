"""Functions that read and write one kind of header, spelled out field by field, as dataclasses write their `__init__`: a loop
over the fields takes two to three times as long, and each request has a header.

    def read(ext, find, pack, new, kind, boolean, long):
        f0 = str(ext['topic'])
        f1 = int(ext['queueId'])
        f2 = None if (found := find('epoch')) is None else long(found)
        pack(f1)
        return new(kind, (f0, f1, f2))

    def write(header):
        f0, f1, f2 = header
        ext = {'topic': f0, 'queueId': f1}
        if f2 is not None: ext['epoch'] = f2
        return ext
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final, NamedTuple, get_type_hints

REQUIRED: Final = object()


class Field(NamedTuple):
    """`key`: as the wire spells it. `convert` raises TypeError, ValueError."""

    key: str
    convert: Callable[[Any], Any]
    default: Any


def fields_of(kind: type[Any]) -> tuple[Field, ...]:
    """The fields of a NamedTuple, which are text, numbers or booleans."""
    defaults = kind._field_defaults
    return tuple(
        Field(_camel(name), _converter(hint), defaults.get(name, REQUIRED))
        for name, hint in get_type_hints(kind).items()
    )


def reader_of(kind: type[Any]) -> Callable[..., Any]:
    """`read(ext, ext.get)`; raises KeyError, TypeError, ValueError, struct.error."""
    fields = fields_of(kind)
    lines = [f"f{number} = {_reading(field)}" for number, field in enumerate(fields)]
    # All numbers that are there at once: no field of any header has more than 64 bits.
    numbers = [
        f"f{number}" for number, field in enumerate(fields) if field.convert is long and field.default is not None
    ]
    lines.append(f"pack({', '.join(numbers)})" if numbers else "")
    lines.append(f"return new(kind, ({''.join(f'f{number}, ' for number in range(len(fields)))}))")
    names = {
        "pack": Struct(f">{len(numbers)}q").pack,
        "new": tuple.__new__,  # a NamedTuple's own constructor costs twice as much
        "kind": kind,
        "boolean": boolean,
        "long": long,
    }
    return _function("read(ext, find, " + ", ".join(f"{name}={name}" for name in names) + ")", lines, names)


def _reading(field: Field) -> str:
    """The expression for one value."""
    name = {str: "str", boolean: "boolean", long: "long" if field.default is None else "int"}[field.convert]
    if field.default is REQUIRED:
        return f"{name}(ext[{field.key!r}])"
    return f"{field.default!r} if (found := find({field.key!r})) is None else {name}(found)"


def writer_of(kind: type[Any]) -> Callable[[Any], Any]:
    """`write(header)`: the extension fields; those that are None are left out."""
    fields = list(enumerate(fields_of(kind)))
    always = [f"{field.key!r}: f{number}" for number, field in fields if field.default is not None]
    lines = [
        "".join(f"f{number}, " for number, _ in fields) + "= header",
        f"ext = {{{', '.join(always)}}}",
        *(
            f"if f{number} is not None: ext[{field.key!r}] = f{number}"
            for number, field in fields
            if field.default is None
        ),
        "return ext",
    ]
    return _function("write(header)", lines, {})


def _function(signature: str, lines: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    """Keys and defaults come from our own headers; nothing that a client sent is in it."""
    exec(f"def {signature}:\n    " + "\n    ".join(lines), names)
    made: Callable[..., Any] = names[signature.partition("(")[0]]
    return made


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def _converter(hint: Any) -> Callable[[Any], Any]:
    if hint is bool or hint == bool | None:
        return boolean
    return long if hint in (int, int | None) else str


def boolean(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


def long(value: Any) -> int:
    number = int(value)
    if not -0x8000_0000_0000_0000 <= number <= 0x7FFF_FFFF_FFFF_FFFF:
        raise ValueError("more than 64 bits")
    return number

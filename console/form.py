"""Checks of forms. An invalid field raises FieldFault, which the page shows beside the field, with the typed value."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from urllib.parse import parse_qsl

from starlette.requests import Request

from ..client.errors import ConfigError, RocketletError
from .config import MAX_FORM_BYTES
from .guard import TOKEN, is_token


class FieldFault(ConfigError):
    """The value of a field is invalid. `reason` is the text shown beside it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def faults_of(error: RocketletError) -> dict[str, str]:
    """Return the error by the name of its field; the name is empty if no field caused it."""
    return {error.field: error.reason} if isinstance(error, FieldFault) else {"": str(error)}


class Form:
    """Fields by name; each may occur several times."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        self.fields = fields
        self._last = dict(fields)

    def __contains__(self, name: str) -> bool:
        return name in self._last

    def text(self, name: str, default: str = "") -> str:
        return self._last.get(name, "").strip() or default

    def raw(self, name: str, default: str = "") -> str:
        """Return the value as it was typed, with LF in place of the CR and LF that browsers send."""
        return self._last.get(name, default).replace("\r\n", "\n")

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name]

    def number(self, name: str, default: int, *, least: int = 0, most: int = 2**63 - 1) -> int:
        given = self.text(name)
        if not given:
            return default
        digits = given.removeprefix("-")
        if not digits.isascii() or not digits.isdigit() or not least <= int(given) <= most:
            raise FieldFault(name, f"{given[:40]!r} is not a whole number from {least} to {most}")
        return int(given)

    def choice(self, name: str, choices: Sequence[str], default: str = "") -> str:
        given = self.text(name, default)
        if given not in choices:
            raise FieldFault(name, f"{given[:40]!r} is not one of {', '.join(choices)}")
        return given

    def time_ms(self, name: str, default: int) -> int:
        """Return a local time in the format of browsers, such as 2026-01-31T12:00, in ms since the epoch; `default` if the
        field is empty."""
        given = self.text(name)
        if not given:
            return default
        try:
            return int(datetime.fromisoformat(given).timestamp() * 1000)
        except (ValueError, OverflowError, OSError):
            raise FieldFault(name, f"{given[:40]!r} is not a time such as 2026-01-31T12:00") from None


def query_of(request: Request) -> Form:
    return Form(request.query_params.multi_items())


async def posted(request: Request) -> Form:
    """Return the submitted form. `check_token` checks whether it came from a page of the console. Raises ConfigError."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise ConfigError(f"the form has more than {MAX_FORM_BYTES} bytes")
    try:
        return Form(parse_qsl(body.decode(), keep_blank_values=True))
    except ValueError:
        raise ConfigError("the form is not UTF-8 text") from None


def check_token(request: Request, form: Form) -> None:
    if not is_token(request, form.text(TOKEN)):
        raise ConfigError("the form is from another session of the console; submit it a second time")

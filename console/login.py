"""Users of the console, with one of two roles, and their sessions.

A file has a line for each user: name, role and password, separated by blanks. A session is a random cookie that the server
knows. It ends when the user logs out, after SESSION_S, and when the console stops.

A wrong password takes FAILED_LOGIN_S, and only MAX_FAILING_LOGINS may take that concurrently, so that passwords cannot be
guessed quickly, from however many addresses.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..client.errors import ConfigError
from .config import FAILED_LOGIN_S, MAX_FAILING_LOGINS, MAX_SESSIONS, MIN_PASSWORD_CHARS, SESSION_S


class Role(Enum):
    LOOK = "look"  # sees all pages
    OPERATE = "operate"  # changes the cluster, too


@dataclass(frozen=True, slots=True)
class User:
    name: str
    role: Role
    digest: bytes


def read_users(path: Path) -> dict[str, User]:
    """Return the users in a file by name. Raises ConfigError if it cannot be read or has an invalid line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"logins: {path} cannot be read: {reason}") from None
    users: dict[str, User] = {}
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        where = f"logins: line {number} of {path}"
        if len(fields) != 3 or fields[1] not in {role.value for role in Role}:
            raise ConfigError(f"{where}: expected NAME look PASSWORD or NAME operate PASSWORD")
        name, role, password = fields
        if len(password) < MIN_PASSWORD_CHARS:
            raise ConfigError(f"{where}: the password has {len(password)} characters; use {MIN_PASSWORD_CHARS} or more")
        if name in users:
            raise ConfigError(f"{where}: {name} has two lines; remove one")
        users[name] = User(name, Role(role), _digest(password))
    if not users:
        raise ConfigError(f"logins: {path} has no user; add a line: NAME operate PASSWORD")
    return users


class TooManyLogins(ConfigError):
    """No password is checked, because MAX_FAILING_LOGINS logins are failing now."""

    def __init__(self) -> None:
        super().__init__("too many logins have failed; wait some seconds, then retry")


class Sessions:
    """The users that are logged in. `users` has the users that may log in, by name; the others are limits."""

    def __init__(
        self,
        users: Mapping[str, User],
        *,
        session_s: float = SESSION_S,
        failed_login_s: float = FAILED_LOGIN_S,
        max_failing: int = MAX_FAILING_LOGINS,
    ) -> None:
        self._users = users
        self._session_s = session_s
        self._failed_login_s = failed_login_s
        self._max_failing = max_failing
        self._open: OrderedDict[str, tuple[User, float]] = OrderedDict()
        self._failing = 0

    def user_of(self, cookie: str) -> User | None:
        user, end_s = self._open.get(cookie, (None, 0.0))
        return user if time.monotonic() < end_s else None

    async def user_with(self, name: str, password: str) -> User | None:
        """Return the user with a password; None, after FAILED_LOGIN_S, if the name or the password is wrong. Raises
        TooManyLogins."""
        if self._failing >= self._max_failing:
            raise TooManyLogins
        user = self._users.get(name)
        if hmac.compare_digest(_digest(password), user.digest if user is not None else b"") and user is not None:
            return user
        self._failing += 1
        try:
            await asyncio.sleep(self._failed_login_s)
        finally:
            self._failing -= 1
        return None

    async def user_of_header(self, authorization: str) -> User | None:
        """Return the user in an Authorization header of the scheme Basic, for clients that are not browsers."""
        scheme, _, encoded = authorization.partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except ValueError:
            return None
        return await self.user_with(name, password)

    def open(self, user: User) -> str:
        """Start a session. Return its cookie."""
        cookie = secrets.token_urlsafe(32)
        self._open[cookie] = user, time.monotonic() + self._session_s
        if len(self._open) > MAX_SESSIONS:
            self._open.popitem(last=False)
        return cookie

    def close(self, cookie: str) -> None:
        self._open.pop(cookie, None)


def _digest(password: str) -> bytes:
    return hashlib.sha256(password.encode()).digest()

"""The accounts' file: read at the start, again when it changes, and rewritten by mqadmin's ACL commands.

It needs PyYAML, which only brokers with accounts do: `pip install 'rocketlet[acl]'`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from threading import Lock
from typing import Any, Final

import structlog

from ...host.files import read_file
from ...protocol.bodies import DataVersion
from ..config import MAX_ACL_FILE_BYTES
from ..running.settings_files import Unsettled, Watched, is_readable_by_all, replace_file
from ..sessions.generation import Generation
from .accounts import ACCOUNTS, FORMER, GLOBAL_WHITE, AclError, Policy, read_account, read_policy

log = structlog.get_logger("rocketlet.acl")

_VERSION: Final = "dataVersion"

Document = dict[str, Any]


class _Unsettled(AclError):
    """The file is being written."""


class AclFile:
    """`policy` is the file's present content; `generation` rises with it. Raises AclError if it cannot be used at the start;
    a later version that cannot be used is reported, and the former stays."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._watched = Watched((self.path,))
        self._reading = Lock()  # a thread reads it when it has changed
        self._document: Document
        self.policy: Policy
        self.generation = Generation()
        self._take()
        if is_readable_by_all(self.path):
            log.warning("acl_file_readable_by_all", file=str(self.path), hint="it holds secrets; chmod o-r")

    def look(self) -> bool:
        """Whether the file is to be loaded: it has changed, and nobody writes it any more."""
        return self._watched.look()

    def load(self) -> None:
        """Reads the file again if it has changed. 1,000 accounts take 0.4 s, so that a thread does it."""
        with self._reading, suppress(AclError):
            if self._watched.has_changed:
                self._take_changed()

    def _take_changed(self) -> None:
        """Raises AclError; the former accounts stay in force then."""
        try:
            self._take()
        except _Unsettled:  # a later look finds it settled
            raise
        except AclError as error:
            log.error("acl_file_not_reloaded", file=str(self.path), reason=str(error))
            raise
        log.info("acl_file_reloaded", file=str(self.path), accounts=len(self.policy.accounts))

    def _take(self) -> None:
        """Raises AclError."""
        try:
            document = self._watched.take(self._read)
        except Unsettled:
            raise _Unsettled(f"{self.path} is being written; try again in a few seconds") from None
        self._put(read_policy(document), document)

    def _put(self, policy: Policy, document: Document) -> None:
        self.policy, self._document = policy, document
        self.generation.rise()

    def _read(self) -> Document:
        import yaml

        try:
            data = read_file(self.path, MAX_ACL_FILE_BYTES)
        except OSError as error:
            raise AclError(f"cannot read {self.path}: {error.strerror}") from None
        if not data:  # as it is for a moment when an editor writes it anew; nobody would have an account
            raise AclError(f"{self.path} is empty")
        try:
            found = yaml.safe_load(data)
        except Exception as error:  # not YAMLError alone: `!!int ""` is an IndexError, `!!bool x` a KeyError
            raise AclError(f"{self.path} is not YAML{_place(error)}") from None
        if found is not None and not isinstance(found, dict):
            raise AclError(f"{self.path} is not a mapping; it needs {ACCOUNTS!r} and may have {GLOBAL_WHITE!r}")
        return found or {}

    # Changes by mqadmin

    @property
    def entries(self) -> Sequence[Mapping[str, Any]]:
        """The accounts as the file has them, secrets included."""
        return self._document.get(ACCOUNTS) or ()

    @property
    def white_addresses(self) -> list[str]:
        return [str(text) for text in self._document.get(GLOBAL_WHITE) or ()]

    @property
    def version(self) -> DataVersion:
        found = self._document.get(_VERSION)
        first = found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}
        timestamp, counter = first.get("timestamp"), first.get("counter")
        return DataVersion(timestamp if isinstance(timestamp, int) else 0, counter if isinstance(counter, int) else 0)

    def put_account(self, entry: Mapping[str, Any]) -> None:
        """A new account, or the fields of one that is there; what `entry` has not stays. Raises AclError."""

        def change(document: Document) -> None:
            accounts = document.get(ACCOUNTS) or []
            document[ACCOUNTS] = accounts
            known = next((account for account in accounts if str(account["accessKey"]) == entry["accessKey"]), None)
            if known is None:
                accounts.append(dict(entry))
            else:
                if "secretKey" in entry:  # perhaps because somebody has got hold of the former
                    known.pop(FORMER, None)
                known.update(entry)
            read_account(known or accounts[-1])

        self._change(change)

    def delete_account(self, access_key: str) -> None:
        """Raises AclError."""

        def change(document: Document) -> None:
            if access_key not in self.policy.accounts:
                raise AclError(f"there is no account {access_key[:100]}")
            document[ACCOUNTS] = [entry for entry in document[ACCOUNTS] if str(entry["accessKey"]) != access_key]

        self._change(change)

    def put_white_addresses(self, addresses: Sequence[str]) -> None:
        """Raises AclError."""

        def change(document: Document) -> None:
            document[GLOBAL_WHITE] = list(addresses)

        self._change(change)

    def _change(self, change: Callable[[Document], None]) -> None:
        """Changes the file's present content, which may be newer than the policy in force. The file is written first: a
        change that cannot be kept does not take effect."""
        with self._reading:
            self._change_file(change)

    def _change_file(self, change: Callable[[Document], None]) -> None:
        import yaml

        if self._watched.has_changed:
            self._take_changed()
        else:
            self._take()
        document = deepcopy(self._document)
        change(document)
        policy = read_policy(document)
        version = {"counter": self.version.counter + 1, "timestamp": int(time.time() * 1000)}
        document[_VERSION] = [version]
        text = yaml.safe_dump(document, allow_unicode=True, sort_keys=False)
        try:
            replace_file(self.path, text.encode())
        except OSError as error:
            raise AclError(f"cannot write {self.path}: {error.strerror}") from None
        self._put(policy, document)
        self._watched.written()


def _place(error: Exception) -> str:
    """The line of the mistake, but not its text, which may be a secret."""
    mark = getattr(error, "problem_mark", None)
    return f": see line {mark.line + 1}" if mark is not None else ""

"""Exceptions of the test kit."""

from __future__ import annotations


class UnknownName(KeyError):
    """The broker has no group or topic of this name. `until` and `skip_waits` wait for it."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownGroup(UnknownName):
    """No client has joined a group of this name, or the name is misspelled."""


class UnknownTopic(UnknownName):
    """No topic of this name was created or sent to, or the name is misspelled."""


__all__ = ["UnknownGroup", "UnknownName", "UnknownTopic"]

"""Exceptions of the test kit."""

from __future__ import annotations


class UnknownName(KeyError):
    """The broker has no group or topic of this name. `until` and `skip_waits` wait for it."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownGroup(UnknownName):
    """The broker has neither members nor settings, offsets or dead letters of a group of this name."""


class UnknownTopic(UnknownName):
    """The broker has no topic of this name: it was neither created nor sent to, or was deleted."""


__all__ = ["UnknownGroup", "UnknownName", "UnknownTopic"]

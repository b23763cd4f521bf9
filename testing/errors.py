"""The kit's own exceptions."""

from __future__ import annotations


class UnknownName(KeyError):
    """The broker knows no group, or no topic, of this name. `until` and `skip_waits` wait for it."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownGroup(UnknownName):
    """Nobody has joined a group of this name, or the name is mistyped."""


class UnknownTopic(UnknownName):
    """Nobody has sent to a topic of this name or created it, or the name is mistyped."""


__all__ = ["UnknownGroup", "UnknownName", "UnknownTopic"]

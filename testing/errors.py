"""The kit's own exceptions."""

from __future__ import annotations


class UnknownGroup(KeyError):
    """The broker knows no group of this name: nobody has joined it, or the name is mistyped. `until` and `skip_waits` wait
    for it."""

    def __str__(self) -> str:
        return str(self.args[0])


__all__ = ["UnknownGroup"]

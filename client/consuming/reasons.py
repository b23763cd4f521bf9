"""Why a message was not handled: the text that travels with its retry and its dead letter.

It is short and on one line. Text that looks like a password, a token or a key is left out: more people read dead letters
than a service's log.
"""

from __future__ import annotations

import re
from typing import Final

from ..config import MAX_REASON_CHARS

_LOOKED_AT_CHARS: Final = 4 * MAX_REASON_CHARS
_LEFT_OUT: Final = "***"
_IN_ADDRESS: Final = re.compile(r"(\w://)[^\s/@]{1,200}@")
_SCHEME: Final = re.compile(r"(?i)\b(bearer|basic)\s+[^\s,;]+")
_NAMED: Final = re.compile(
    r"""(?i)((?:password|passwd|pwd|secret|token|api[_-]?key|access[_-]?key|authorization|credentials?|signature)"""
    r"""[\w-]{0,20}["']?\s{0,3}[=:]\s{0,3})("[^"]*"?|'[^']*'?|[^\s,;&)}\]]+(?:\s\*\*\*)?)"""
)


def reason_of(error: BaseException) -> str:
    """An exception's type and text."""
    try:
        text = str(error)
    except Exception:  # the exception's class is the user's
        text = ""
    name = type(error).__qualname__
    return shown(f"{name}: {text}" if text else name)


def shown(text: str) -> str:
    """A text as it may be kept beside a message."""
    line = " ".join(text[:_LOOKED_AT_CHARS].split())
    line = "".join(char if char.isprintable() else " " for char in line)
    line = _IN_ADDRESS.sub(rf"\1{_LEFT_OUT}@", line)
    line = _SCHEME.sub(rf"\1 {_LEFT_OUT}", line)
    line = _NAMED.sub(rf"\1{_LEFT_OUT}", line)
    return line if len(line) <= MAX_REASON_CHARS else f"{line[: MAX_REASON_CHARS - 3]}..."


__all__ = ["reason_of", "shown"]

"""Proves who sent a request: HMAC-SHA1 over its header fields and body, as Apache's clients sign (AclClientRPCHook,
AclUtils.combineRequestContent, AclSigner).

It covers the values of all other fields in the order of their names, with nothing between them, then the body. Neither the
request's code nor its number nor the time is signed, and values may be shifted from one field to the next: only TLS
protects against somebody on the way.
"""

from __future__ import annotations

import hashlib
import hmac
from binascii import b2a_base64
from collections.abc import Callable
from operator import itemgetter
from typing import Final

from .config import MAX_LAYOUT_BYTES, MAX_LAYOUT_FIELDS, MAX_LAYOUTS
from .frame import Ext, ExtValue, text_of

_BLOCK_BYTES: Final = 64  # SHA-1's

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
SECURITY_TOKEN: Final = "SecurityToken"
CREDENTIALS: Final = frozenset((ACCESS_KEY, SIGNATURE, SECURITY_TOKEN))
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"  # Apache's client signs it, its broker does not count it


_Order = tuple[str, Callable[[Ext], tuple[ExtValue, ...]]]
_orders: Final[dict[tuple[str, ...], _Order]] = {}  # requests of one kind have the same names


def _found_order(names: tuple[str, ...]) -> _Order:
    """A format with a place for each signed value of these fields, and a function that takes the values in their order."""
    signed = sorted(name for name in names if name != SIGNATURE)
    take = itemgetter(*signed) if len(signed) > 1 else lambda ext: tuple(ext[name] for name in signed)
    order = "%s" * len(signed), take
    if len(names) <= MAX_LAYOUT_FIELDS and sum(map(len, names)) <= MAX_LAYOUT_BYTES:
        if len(_orders) >= MAX_LAYOUTS:
            _orders.clear()
        _orders[names] = order
    return order


class Signer:
    """Signs with one secret, whose part of the computation is done once: the inner and the outer hash of RFC 2104. To copy
    two hashes takes half as long as to copy OpenSSL's HMAC."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, secret: str) -> None:
        key = secret.encode()
        key = (hashlib.sha1(key).digest() if len(key) > _BLOCK_BYTES else key).ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha1(bytes(byte ^ 0x36 for byte in key))
        self._outer = hashlib.sha1(bytes(byte ^ 0x5C for byte in key))

    def signature(self, ext: Ext, body: bytes, without: str = "") -> str:
        """Base64 of the HMAC. `without`: one of the fields, which does not count beside the signature."""
        if without:
            ext = {name: value for name, value in ext.items() if name != without}
        names = tuple(ext)
        template, take = _orders.get(names) or _found_order(names)
        text = template % take(ext)
        if "True" in text or "False" in text:  # perhaps a value that has another text on the wire
            text = "".join(map(text_of, take(ext)))
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text.encode())
        inner.update(body)
        outer.update(inner.digest())
        return b2a_base64(outer.digest(), newline=False).decode()

    def signature_of(self, text: bytes) -> str:
        """The HMAC of a text in hex, as 5.x clients sign."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        return outer.hexdigest()

    def __eq__(self, other: object) -> bool:
        """Whether both have the same secret."""
        return isinstance(other, Signer) and hmac.compare_digest(self._inner.digest(), other._inner.digest())

    def __hash__(self) -> int:
        return hash(self._inner.digest())

    def has_signed(self, ext: Ext, body: bytes) -> bool:
        """Whether the signature among the fields is this secret's; takes as long for every wrong one."""
        shown = ext.get(SIGNATURE)
        if type(shown) is not str or not shown.isascii():
            return False
        if hmac.compare_digest(self.signature(ext, body), shown):
            return True
        return UNIQUE_KEY_QUERY in ext and hmac.compare_digest(self.signature(ext, body, UNIQUE_KEY_QUERY), shown)

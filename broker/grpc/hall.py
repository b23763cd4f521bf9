"""The state that every handler needs."""

from __future__ import annotations

from dataclasses import dataclass

from ..access.acl import Acl
from ..broker import Broker
from .clients import GrpcClients


@dataclass(frozen=True, slots=True)
class Hall:
    broker: Broker
    clients: GrpcClients
    acl: Acl | None

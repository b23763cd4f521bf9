"""The state that every handler needs."""

from __future__ import annotations

from dataclasses import dataclass

from ..access.acl import Acl
from ..broker import Broker
from .calls import Call
from .clients import GrpcClients


@dataclass(frozen=True, slots=True)
class Hall:
    broker: Broker
    clients: GrpcClients
    acl: Acl | None

    def may_publish(self, call: Call, topic: str) -> bool:
        """Whether the account of a call that was authorized may send to a topic."""
        return self.acl is None or self.acl.may_publish(call.session, topic)

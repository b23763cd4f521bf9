"""The current settings of a broker."""

from __future__ import annotations

from ..config import BrokerConfig
from .generation import Generation


class LiveConfig:
    """The current settings, which may be replaced while the broker runs, for example by UPDATE_BROKER_CONFIG."""

    __slots__ = ("_generation", "changes", "now")

    def __init__(self, config: BrokerConfig, generation: Generation) -> None:
        self.now = config
        self.changes = 0
        self._generation = generation

    def change(self, config: BrokerConfig) -> None:
        self.now = config
        self.changes += 1
        self._generation.increment()

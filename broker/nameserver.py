"""The name server: routes of topics to brokers, and addresses for clients outside of the brokers' network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from typing import Final

import msgspec
import structlog

from ..protocol.admin_bodies import Departed
from ..protocol.bodies import LOOKS, SLICE, BrokerData, DataVersion, QueueData, Route, TopicConfig, Work
from ..protocol.codes import PERM_READ_WRITE, PERM_WRITE
from .config import DEPARTED_KEPT_S, LIMITS, LimitExceeded, Limits
from .runtime import MACHINE, Clock
from .sessions import Session, is_loopback

log = structlog.get_logger("rocketlet.nameserver")


# ------------------------------------------------------------------------------
# The name server's table: which brokers there are, where, and which topics each has. In memory only.


@dataclass(slots=True)
class _Address:
    """One broker process. `session` is None for the broker in the name server's own process."""

    session: Session | None
    seen_s: float
    version: DataVersion | None
    external: str


@dataclass(slots=True)
class _Broker:
    cluster: str
    addresses: dict[int, str] = field(default_factory=dict)
    topics: dict[str, QueueData] = field(default_factory=dict)


class Routes:
    """networks: with them, a client gets the address at which it reached us for the broker of this process, and the
    broker's external address if it comes from outside of these networks."""

    def __init__(self, clock: Clock = MACHINE, networks: Networks | None = None, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.clock = clock
        self._networks = networks
        self._tells_reached = networks is not None
        self._brokers: dict[str, _Broker] = {}
        self._addresses: dict[str, _Address] = {}
        self._names: dict[str, str] = {}  # the broker that an address was last registered for
        self._of_connection: dict[Session | None, dict[str, None]] = {}
        self._entries = 0  # topics of all brokers together
        self.kv: dict[str, dict[str, str]] = {}
        self._kv_chars = 0
        self._departed: dict[str, Departed] = {}  # the one that left first is first
        self._gone: list[dict[str, QueueData]] = []  # topics of brokers that are gone, to be freed

    def registering(
        self,
        cluster: str,
        name: str,
        broker_id: int,
        address: str,
        version: DataVersion,
        topics: Iterable[TopicConfig],
        session: Session | None,
        external: str | None = None,
    ) -> Work[str | None]:
        """Stores a broker's registration, all of it at the end. Returns the master's address, for a slave. Raises
        LimitExceeded."""
        fresh: dict[str, QueueData] = {}
        for number, topic in enumerate(topics, 1):
            fresh[topic.name] = QueueData(name, topic.read_queues, topic.write_queues, topic.perm, topic.sys_flag)
            if number % SLICE == 0:
                yield
        if session is None and name in self._brokers and not self._is_local(name):
            self._forget(name)  # somebody took the name before the broker of this process was there
        former = self._names.get(address, name)
        if former != name:  # an address is one broker; this one has another name now
            self.unregister(former, address)
        known = self._addresses.get(address)
        # Only a master speaks for the topics, and only when its version says that they have changed.
        if broker_id != 0 or (known is not None and known.version == version):
            fresh = {}
        broker = self._brokers.get(name, _Broker(cluster))
        # RouteInfoManager.registerBroker: a slave that became the master registers as another number.
        addresses = {number: other for number, other in broker.addresses.items() if other != address}
        addresses[broker_id] = address
        more = len(fresh.keys() - broker.topics.keys())
        if session is not None:  # a stranger's registration hides no topic of the broker in this process
            self._check_limits(name, len(addresses), len(broker.topics) + more, more)
        if name not in self._brokers:
            self._brokers[name] = broker
            self._departed.pop(name, None)
            log.info("broker_registered", broker=name, cluster=cluster, address=address)
        self._entries += more
        broker.topics |= fresh
        moved_from = broker.addresses.get(broker_id, address)
        broker.addresses = addresses
        for replaced in {moved_from, address}:
            self._forget_address(replaced)
        self._addresses[address] = _Address(session, self.clock.monotonic_s(), version, external or address)
        self._of_connection.setdefault(session, {})[address] = None
        self._names[address] = name
        return broker.addresses.get(0)

    def _check_limits(self, name: str, addresses: int, topics: int, more: int) -> None:
        """Raises LimitExceeded for a broker with too many addresses and topics; `more` is how much they grew."""
        if name not in self._brokers and len(self._brokers) >= self.limits.max_brokers:
            raise LimitExceeded(f"this name server knows {self.limits.max_brokers} brokers and takes no more")
        if addresses > self.limits.max_broker_addresses:
            raise LimitExceeded(
                f"the broker {name} has {self.limits.max_broker_addresses} addresses and can have no more"
            )
        if topics > self.limits.max_topics:
            raise LimitExceeded(f"the broker {name} has more than {self.limits.max_topics} topics")
        if more > 0 and self._entries + more > self.limits.max_routes:
            raise LimitExceeded(
                f"this name server keeps {self.limits.max_routes} topics of all brokers and takes no more"
            )

    def ownership_fault(self, name: str, address: str) -> str | None:
        """Why a stranger may not register or unregister this broker: it runs in this process. None if it may."""
        if self._is_local(name):
            return f"the broker {name} runs with this name server, which takes its registration from nobody else"
        entry = self._addresses.get(address)
        if entry is not None and entry.session is None:
            return f"{address} is the address of the broker that runs with this name server"
        return None

    def _is_local(self, name: str) -> bool:
        broker = self._brokers.get(name)
        found = [self._addresses.get(address) for address in broker.addresses.values()] if broker else []
        return any(entry is not None and entry.session is None for entry in found)

    def _forget(self, name: str) -> None:
        for address in list(self._brokers[name].addresses.values()):
            self.unregister(name, address)

    def unregister(self, name: str, address: str) -> None:
        """Does nothing for an address of another broker: that one would be known for ever then."""
        if self._names.get(address, name) != name:
            return
        self._forget_address(address)
        broker = self._brokers.get(name)
        if broker is None:
            return
        broker.addresses = {number: other for number, other in broker.addresses.items() if other != address}
        if not broker.addresses:
            del self._brokers[name]
            self._remember(Departed(name, broker.cluster, address, len(broker.topics), self.clock.time_ms()))
            self._entries -= len(broker.topics)
            if len(broker.topics) > SLICE:
                self._gone.append(broker.topics)
            log.info("broker_gone", broker=name, address=address)

    def _remember(self, broker: Departed) -> None:
        """Only a broker that had topics. A client could otherwise push the others out by registering empty names."""
        if not broker.topics:
            return
        self._departed.pop(broker.name, None)
        self._departed[broker.name] = broker
        if len(self._departed) > self.limits.max_departed_brokers:
            del self._departed[next(iter(self._departed))]

    @property
    def entries(self) -> int:
        """Topics of all brokers together."""
        return self._entries

    def departed(self) -> list[Departed]:
        """Brokers that were here, had topics, and are gone for at most DEPARTED_KEPT_S."""
        limit_ms = self.clock.time_ms() - DEPARTED_KEPT_S * 1000
        return [broker for broker in self._departed.values() if broker.left_ms >= limit_ms]

    def forget_departed(self, name: str) -> bool:
        """Whether it was remembered."""
        return self._departed.pop(name, None) is not None

    @property
    def has_gone(self) -> bool:
        """Whether there is something to be freed."""
        return bool(self._gone)

    def freeing(self) -> Work[None]:
        """Frees the topics of brokers that are gone: 50,000 in one iteration would take 10 ms."""
        while self._gone:
            topics = self._gone[-1]
            for _ in range(min(LOOKS, len(topics))):
                topics.popitem()
            if not topics:
                self._gone.pop()
            yield

    def _forget_address(self, address: str) -> None:
        entry = self._addresses.pop(address, None)
        self._names.pop(address, None)
        if entry is not None:
            others = self._of_connection[entry.session]
            del others[address]
            if not others:
                del self._of_connection[entry.session]

    def drop(self, session: Session | None) -> None:
        """A broker's session is closed."""
        self._unregister_addresses(list(self._of_connection.get(session, ())))

    def expire(self) -> list[Session]:
        """Forgets brokers that were silent for 120 s and returns their sessions, to be closed."""
        # RouteInfoManager.BROKER_CHANNEL_EXPIRED_TIME
        limit = self.clock.monotonic_s() - self.limits.heartbeat_limit_s
        silent = {
            address: entry.session
            for address, entry in self._addresses.items()
            if entry.seen_s < limit and entry.session is not None
        }
        self._unregister_addresses(list(silent))
        return list(silent.values())

    def _unregister_addresses(self, addresses: list[str]) -> None:
        for address in addresses:
            self.unregister(self._names.get(address, ""), address)

    def version(self, address: str) -> DataVersion | None:
        entry = self._addresses.get(address)
        return entry.version if entry else None

    def refresh(self, address: str) -> None:
        """The broker at this address is alive."""
        entry = self._addresses.get(address)
        if entry is not None:
            entry.seen_s = self.clock.monotonic_s()

    def tell_registered(self) -> None:
        """Clients inside of our networks get the address that the broker gives, not the one at which they reached us."""
        self._tells_reached = False

    def route(self, topic: str, to: Session | None = None) -> Route | None:
        """A topic's queues, with the brokers' addresses for the client that asks."""
        queues: list[QueueData] = []
        brokers: list[BrokerData] = []
        for name, broker in self._brokers.items():
            if topic in broker.topics:
                queues.append(broker.topics[topic])
                brokers.append(self._broker_data(name, to))
        return Route(tuple(queues), tuple(brokers)) if queues else None

    def brokers(self, to: Session | None = None) -> list[BrokerData]:
        return [self._broker_data(name, to) for name in self._brokers]

    def _broker_data(self, name: str, to: Session | None) -> BrokerData:
        broker = self._brokers[name]
        addresses: dict[int, str] = {}
        for number, address in broker.addresses.items():
            addresses[number] = self._address_for(address, to)
        return BrokerData(name, addresses, broker.cluster)

    def _address_for(self, registered: str, to: Session | None) -> str:
        entry = self._addresses.get(registered)
        if entry is None or to is None:
            return registered
        if to.is_external or (self._networks is not None and self._networks.is_outside(to.address)):
            return entry.external
        if entry.session is None and self._tells_reached:
            return to.reached or registered
        return registered

    def topics(self, cluster: str | None = None) -> Work[list[str]]:
        """The names of all topics, or of those of one cluster."""
        found: dict[str, None] = {}
        for broker in [broker for broker in self._brokers.values() if cluster in (None, broker.cluster)]:
            for number, topic in enumerate(list(broker.topics), 1):
                found[topic] = None
                if number % LOOKS == 0:
                    yield
            yield
        return list(found)

    def set_write(self, name: str, *, allowed: bool) -> Work[int]:
        """Lets a broker's topics be written to, or not; how many they are."""
        broker = self._brokers.get(name)
        if broker is None:
            return 0
        for number, topic in enumerate(list(broker.topics), 1):
            queues = broker.topics.get(topic)
            if queues is not None:
                # RouteInfoManager.operateWritePermOfBroker: until the broker registers other topics, as there.
                perm = PERM_READ_WRITE if allowed else queues.perm & ~PERM_WRITE
                broker.topics[topic] = msgspec.structs.replace(queues, perm=perm)
            if number % SLICE == 0:
                yield
        return len(broker.topics)

    def put_kv(self, namespace: str, key: str, value: str) -> None:
        """Raises LimitExceeded beyond 10,000 keys in a namespace, 100 namespaces, or 8,388,608 characters in all."""
        table = self.kv.get(namespace, {} if len(self.kv) < self.limits.max_kv_namespaces else None)
        if table is None or (key not in table and len(table) >= self.limits.max_kv_keys):
            namespaces, keys = self.limits.max_kv_namespaces, self.limits.max_kv_keys
            raise LimitExceeded(f"the name server keeps {namespaces} namespaces of {keys} keys at most; delete some")
        more = len(value) - len(table[key]) if key in table else len(namespace) + len(key) + len(value)
        if more > 0 and self._kv_chars + more > self.limits.max_kv_chars:
            raise LimitExceeded(
                f"the name server keeps {self.limits.max_kv_chars} characters of keys and values; delete some"
            )
        self._kv_chars += more
        table[key] = value
        self.kv[namespace] = table

    def delete_kv(self, namespace: str, key: str) -> None:
        table = self.kv.get(namespace, {})
        value = table.pop(key, None)
        if value is not None:
            self._kv_chars -= len(namespace) + len(key) + len(value)
            if not table:
                del self.kv[namespace]

    def delete_topic(self, topic: str) -> None:
        for broker in self._brokers.values():
            self._entries -= broker.topics.pop(topic, None) is not None


# ------------------------------------------------------------------------------
# The networks that this machine or container is in. They distinguish clients inside from clients outside.
#
# A container is reached in two ways: by its neighbours at its own address, and through a published port. Clients of a
# published port come from the gateway or from another network, and cannot reach the container's own address.


_COLUMNS: Final = 8  # up to the mask; see route_seq_show in Linux's net/ipv4/fib_trie.c


@dataclass(frozen=True, slots=True)
class Networks:
    own: tuple[IPv4Network, ...] = ()
    gateways: frozenset[IPv4Address] = frozenset()

    def is_outside(self, address: str) -> bool:
        """Whether a client at this address (without a port) cannot reach our own. An IPv6 client can: nothing translates
        its address."""
        if is_loopback(address):
            return False
        try:
            client = IPv4Address(address)
        except AddressValueError:
            return False
        return client in self.gateways or not any(client in network for network in self.own)


def parse_networks(text: str) -> Networks:
    """Reads Linux's /proc/net/route, whose numbers are hexadecimal in the machine's byte order. Other lines are skipped."""
    own: list[IPv4Network] = []
    gateways: set[IPv4Address] = set()
    for line in text.splitlines()[1:]:
        parts = line.split()
        if len(parts) < _COLUMNS:
            continue
        try:
            to, gateway, mask = (IPv4Address(int(parts[number], 16).to_bytes(4, "little")) for number in (1, 2, 7))
            network = IPv4Network(f"{to}/{mask}")
        except (ValueError, OverflowError):
            continue
        if int(gateway):
            gateways.add(gateway)
        elif int(mask):
            own.append(network)
    return Networks(tuple(own), frozenset(gateways))

"""The name server: routes of topics to brokers, and addresses for clients outside of the brokers' network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from typing import Final

import msgspec
import structlog

from ..host.address import is_loopback
from ..protocol import names
from ..protocol.admin_bodies import Departed
from ..protocol.bodies import LOOKS, SLICE, BrokerData, DataVersion, QueueData, Route, TopicConfig, Work
from ..protocol.codes import PERM_READ_WRITE, PERM_WRITE
from .config import DEPARTED_KEPT_S, LIMITS, LimitExceeded, Limits
from .runtime.clock import MACHINE, Clock
from .sessions.session import Session
from .sessions.shares import AddressShares

log = structlog.get_logger("rocketlet.nameserver")


# ------------------------------------------------------------------------------
# The name server's tables: brokers, their addresses, and their topics. In memory only.


@dataclass(slots=True)
class _Address:
    """The registration of one broker's address: its session, the time and data version of its last registration, and
    its address for external clients. `session` is None for the broker in the name server's own process."""

    session: Session | None
    seen_s: float
    version: DataVersion | None
    external: str


@dataclass(slots=True)
class _Broker:
    """The registration of one broker name, with its addresses by broker id.

    Attributes:
        host: the address of the client that registered the name first; empty for the broker in the name server's process
        name_chars: the characters of the names of its topics
    """

    cluster: str
    host: str
    addresses: dict[int, str] = field(default_factory=dict)
    topics: dict[str, QueueData] = field(default_factory=dict)
    name_chars: int = 0


class Routes:
    """The routes of all topics.

    Args:
        clock: the clock
        networks: the networks of this machine. With them, a client outside of these networks receives the brokers'
            external addresses; other clients receive for the broker of this process the address at which they have reached
            the name server, until `announce_registered`.
        limits: limits of the name server
    """

    def __init__(self, clock: Clock = MACHINE, networks: Networks | None = None, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.clock = clock
        self._networks = networks
        self._returns_reached = networks is not None
        self._brokers: dict[str, _Broker] = {}
        self._addresses: dict[str, _Address] = {}
        self._names: dict[str, str] = {}  # the broker name for which an address was last registered
        self._of_connection: dict[Session | None, dict[str, None]] = {}
        # the topics of all brokers and the characters of their names; a topic counts once for each of its brokers
        self._topics = AddressShares(limits.max_routes)
        self._name_chars = AddressShares(limits.max_route_chars)
        self.kv: dict[str, dict[str, str]] = {}
        self._kv_chars = 0
        self._departed: dict[str, Departed] = {}  # in the order of their departure
        self._to_free: list[dict[str, QueueData]] = []  # topics of departed brokers, to be freed in pieces

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
        """Register a broker's address, and return the address of its master; None without a master. Nothing is stored before
        the last piece of work. Raises LimitExceeded."""
        fresh: dict[str, QueueData] = {}
        for number, topic in enumerate(topics, 1):
            fresh[topic.name] = QueueData(name, topic.read_queues, topic.write_queues, topic.perm, topic.route_flag)
            if number % SLICE == 0:
                yield
        if session is None and name in self._brokers and not self._is_local(name):
            self._forget(name)  # another broker registered this name before the broker of this process
        previous = self._names.get(address, name)
        if previous != name:  # an address belongs to one broker name; this broker was renamed
            self.unregister(previous, address)
        known = self._addresses.get(address)
        # Topics are stored only from a master, and only if its version has changed.
        if broker_id != 0 or (known is not None and known.version == version):
            fresh = {}
        broker = self._brokers.get(name, _Broker(cluster, "" if session is None else session.address))
        # RouteInfoManager.registerBroker: a slave that became the master registers with another broker id.
        addresses = {number: other for number, other in broker.addresses.items() if other != address}
        addresses[broker_id] = address
        added = [topic for topic in fresh if topic not in broker.topics]  # a difference of sets would read all topics
        chars = sum(map(len, added))
        # limits apply only to other brokers, so that these cannot displace the broker in this process
        if session is not None:
            self._check_limits(name, broker, len(addresses), len(added), chars)
        if name not in self._brokers:
            self._brokers[name] = broker
            self._departed.pop(name, None)
            log.info("broker_registered", broker=name, cluster=cluster, address=address)
        self._topics.acquire(broker.host, count=len(added))
        self._name_chars.acquire(broker.host, count=chars)
        broker.name_chars += chars
        broker.topics |= fresh
        moved_from = broker.addresses.get(broker_id, address)
        broker.addresses = addresses
        for replaced in {moved_from, address}:
            self._forget_address(replaced)
        self._addresses[address] = _Address(session, self.clock.monotonic_s(), version, external or address)
        self._of_connection.setdefault(session, {})[address] = None
        self._names[address] = name
        return broker.addresses.get(0)

    def _check_limits(self, name: str, broker: _Broker, addresses: int, topics: int, chars: int) -> None:
        """Check the limits of a registration. Raises LimitExceeded.

        Args:
            addresses: number of the broker's addresses
            topics: the number of topics that the registration adds
            chars: the characters of their names
        """
        if name not in self._brokers and len(self._brokers) >= self.limits.max_brokers:
            raise LimitExceeded(f"the name server has {self.limits.max_brokers} brokers, which is the maximum")
        if addresses > self.limits.max_broker_addresses:
            raise LimitExceeded(
                f"the broker {name} has {self.limits.max_broker_addresses} addresses, which is the maximum"
            )
        if len(broker.topics) + topics > self.limits.max_topics:
            raise LimitExceeded(f"the broker {name} has more than {self.limits.max_topics} topics")
        chars_of_names = self._name_chars, chars, "characters of topics' names"
        for shares, wanted, what in ((self._topics, topics, "topics"), chars_of_names):
            if wanted and not shares.has_room(broker.host, wanted):
                raise LimitExceeded(
                    f"the name server has {shares.count} {what}, and the broker {name} adds {wanted}; maximum {shares.most}, "
                    "and half of that for the brokers of one address; delete topics"
                )

    def ownership_fault(self, name: str, address: str) -> str | None:
        """Return the reason why another broker may not register or unregister this name and address: they belong to the
        broker in this process. None if it may."""
        if self._is_local(name):
            return (
                f"the broker {name} runs in the process of this name server, which accepts its registration from no other "
                "process"
            )
        entry = self._addresses.get(address)
        if entry is not None and entry.session is None:
            return f"{address} is the address of the broker in the process of this name server"
        return None

    def _is_local(self, name: str) -> bool:
        broker = self._brokers.get(name)
        found = [self._addresses.get(address) for address in broker.addresses.values()] if broker else []
        return any(entry is not None and entry.session is None for entry in found)

    def _forget(self, name: str) -> None:
        for address in list(self._brokers[name].addresses.values()):
            self.unregister(name, address)

    def unregister(self, name: str, address: str) -> None:
        """Unregister a broker's address. Do nothing for an address of another broker name, whose entry would otherwise
        never be removed."""
        if self._names.get(address, name) != name:
            return
        self._forget_address(address)
        broker = self._brokers.get(name)
        if broker is None:
            return
        broker.addresses = {number: other for number, other in broker.addresses.items() if other != address}
        if not broker.addresses:
            del self._brokers[name]
            own = {*names.SYSTEM_TOPICS, name, broker.cluster, names.reply_topic(broker.cluster)}
            topics = len(broker.topics) - sum(topic in broker.topics for topic in own)
            if broker.topics:
                self._add_departed(Departed(name, broker.cluster, address, topics, self.clock.time_ms()))
            self._topics.release(broker.host, len(broker.topics))
            self._name_chars.release(broker.host, broker.name_chars)
            if len(broker.topics) > SLICE:
                self._to_free.append(broker.topics)
            log.info("broker_gone", broker=name, address=address)

    def _add_departed(self, broker: Departed) -> None:
        """Remember a departed broker that had topics. Without topics, a client could displace other entries by registering
        empty names."""
        self._departed.pop(broker.name, None)
        self._departed[broker.name] = broker
        if len(self._departed) > self.limits.max_departed_brokers:
            del self._departed[next(iter(self._departed))]

    @property
    def addresses(self) -> list[str]:
        """The addresses of brokers, in the order of their last registration."""
        return list(self._addresses)

    @property
    def entries(self) -> int:
        """The number of topics of all brokers."""
        return self._topics.count

    def departed(self) -> list[Departed]:
        """Return brokers that departed at most DEPARTED_KEPT_S ago with topics, and have not registered again; the newest
        ones if there are more than `max_departed_brokers`."""
        limit_ms = self.clock.time_ms() - DEPARTED_KEPT_S * 1000
        return [broker for broker in self._departed.values() if broker.left_ms >= limit_ms]

    def forget_departed(self, name: str) -> bool:
        """Remove a broker from the departed ones. Return False if it is none of them."""
        return self._departed.pop(name, None) is not None

    @property
    def has_gone(self) -> bool:
        """True if topics of departed brokers must be freed."""
        return bool(self._to_free)

    def freeing(self) -> Work[None]:
        """Free the topics of departed brokers in pieces, because 50,000 of them take 10 ms."""
        while self._to_free:
            topics = self._to_free[-1]
            for _ in range(min(LOOKS, len(topics))):
                topics.popitem()
            if not topics:
                self._to_free.pop()
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
        """Unregister the addresses of a closed session."""
        self._unregister_addresses(list(self._of_connection.get(session, ())))

    def expire(self) -> list[Session]:
        """Unregister the addresses of other brokers without a registration or `refresh` for `heartbeat_limit_s`. Return the
        sessions that registered them, which the caller must close."""
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
        """Let a registered address count as registered just now."""
        entry = self._addresses.get(address)
        if entry is not None:
            entry.seen_s = self.clock.monotonic_s()

    def announce_registered(self) -> None:
        """Return the registered address to clients inside of the networks from now on, instead of the address at which
        they reached the name server."""
        self._returns_reached = False

    def route(self, topic: str, to: Session | None = None) -> Route | None:
        """Return the queues of a topic, with the brokers' addresses for the client of a session; None if no broker has
        the topic."""
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
        if entry.session is None and self._returns_reached:
            return to.reached or registered
        return registered

    def topics(self, cluster: str | None = None) -> Work[list[str]]:
        """Return the names of all topics, or of the topics of one cluster."""
        found: dict[str, None] = {}
        for broker in [broker for broker in self._brokers.values() if cluster in (None, broker.cluster)]:
            for number, topic in enumerate(list(broker.topics), 1):
                found[topic] = None
                if number % LOOKS == 0:
                    yield
            yield
        return list(found)

    def set_write(self, name: str, *, allowed: bool) -> Work[int]:
        """Permit reads and writes of a broker's topics, or forbid writes, and return the number of topics."""
        broker = self._brokers.get(name)
        if broker is None:
            return 0
        for number, topic in enumerate(list(broker.topics), 1):
            queues = broker.topics.get(topic)
            if queues is not None:
                # RouteInfoManager.operateWritePermOfBroker: in force until the broker registers the topic with another data
                # version, as in Apache's name server.
                perm = PERM_READ_WRITE if allowed else queues.perm & ~PERM_WRITE
                broker.topics[topic] = msgspec.structs.replace(queues, perm=perm)
            if number % SLICE == 0:
                yield
        return len(broker.topics)

    def put_kv(self, namespace: str, key: str, value: str) -> None:
        """Store a value. Raises LimitExceeded beyond `max_kv_namespaces`, `max_kv_keys` in a namespace, or `max_kv_chars`
        altogether."""
        table = self.kv.get(namespace, {} if len(self.kv) < self.limits.max_kv_namespaces else None)
        if table is None or (key not in table and len(table) >= self.limits.max_kv_keys):
            namespaces, keys = self.limits.max_kv_namespaces, self.limits.max_kv_keys
            raise LimitExceeded(f"the name server stores at most {namespaces} namespaces of {keys} keys; delete some")
        more = len(value) - len(table[key]) if key in table else len(namespace) + len(key) + len(value)
        if more > 0 and self._kv_chars + more > self.limits.max_kv_chars:
            raise LimitExceeded(
                f"the name server stores at most {self.limits.max_kv_chars} characters of keys and values; delete some"
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
            if broker.topics.pop(topic, None) is not None:
                self._topics.release(broker.host)
                self._name_chars.release(broker.host, len(topic))
                broker.name_chars -= len(topic)


# ------------------------------------------------------------------------------
# The networks of this machine or container, by which clients inside and outside are distinguished.
#
# A container is reached in two ways: by other containers at its own address, and through a published port. Clients of a
# published port come from the gateway or from another network, and cannot reach the container's own address.


_COLUMNS: Final = 8  # columns up to the mask; see route_seq_show in Linux's net/ipv4/fib_trie.c


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks that this machine is directly connected to, and its gateways."""

    own: tuple[IPv4Network, ...] = ()
    gateways: frozenset[IPv4Address] = frozenset()

    def is_outside(self, address: str) -> bool:
        """Return True if a client at this address (without port) is taken to be unable to reach this machine's own address:
        it has the IPv4 address of a gateway, or one outside of this machine's networks."""
        if is_loopback(address):
            return False
        try:
            client = IPv4Address(address)
        except AddressValueError:
            return False
        return client in self.gateways or not any(client in network for network in self.own)


def parse_networks(text: str) -> Networks:
    """Parse Linux's /proc/net/route, whose numbers are hexadecimal in the machine's byte order. Lines without a network
    are skipped."""
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

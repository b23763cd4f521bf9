"""RocketMQ for test suites: a real broker, in this process or another one, with a clock that tests advance, and faults
that tests inject.

under_test     interface of a broker under test, in this or another process
broker         a broker in this process
errors         exceptions of this package
cluster        several brokers with one name server
loop_thread    a thread with an event loop
remote         a broker in another process or a container, by its control port
rig            starts, clears and kills a broker
state          the state of a running broker
report         a report for a failed test
clock          clocks that `advance` moves, such as that of a broker under test
faults         the faults that a test can inject
grpc_tap       recording and faults for gRPC calls
tap            recording and faults for remoting requests
loop           an event loop that names handles which a test left open
ports          free ports, on Linux safe with concurrent processes
config         limits and intervals
control        the control interface: a rig behind HTTP, for `rocketlet start --control-port`
operations     the operations of the control interface
shapes, fault_orders   JSON of requests, responses and faults
openapi        OpenAPI description of the control interface
pytest_plugin  the fixture `rocketlet`, which installing `rocketlet[pytest]` registers

Names are loaded on first use, because pytest loads the plugin in every run, even if no broker is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .broker import Broker
    from .clock import BrokerClock
    from .cluster import Cluster
    from .errors import UnknownGroup, UnknownTopic
    from .faults import Fault, Injected
    from .remote import RemoteBroker
    from .tap import Request
    from .under_test import BrokerUnderTest

__all__ = [
    "Broker",
    "BrokerClock",
    "BrokerUnderTest",
    "Cluster",
    "Fault",
    "Injected",
    "RemoteBroker",
    "Request",
    "UnknownGroup",
    "UnknownTopic",
]

_MODULES = {
    "Broker": "broker",
    "BrokerClock": "clock",
    "BrokerUnderTest": "under_test",
    "Cluster": "cluster",
    "RemoteBroker": "remote",
    "Request": "tap",
    "UnknownGroup": "errors",
    "UnknownTopic": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f".{_MODULES.get(name, 'faults')}", __name__)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is missing, which a broker needs: pip install '.[pytest]'", name=error.name
        ) from error
    found = globals()[name] = getattr(module, name)
    return found

"""RocketMQ in your test suite: a real broker in this process, a clock you can turn, and faults you can order.

under_test  what a test does with a broker, wherever that runs
broker      one in this process
errors      what it raises of its own
cluster     several of them, with one name server
loop_thread  a thread with an event loop for them
remote      one in another process or a container, by its control port
rig         starts it, cleans it, kills it
state       what it holds
report      what one needs to see when a test failed
clock       the broker's time, which `advance` moves
faults      what may go wrong, in one line each
grpc_tap    the same for calls of gRPC
tap         sees each request and each answer, and lets faults act
loop        names what a test left open
ports       free ports, also beside other processes that look for some
config      every limit
control     the rig behind HTTP, for `rocketlet start --control-port`
operations  what can be asked of it there
shapes, fault_orders   the JSON of questions and answers, and of faults
openapi     their description
pytest_plugin  the fixture `rocketlet`, which installing `rocketlet[pytest]` registers

Names load when they are first used: pytest loads the plugin in every run, also where no broker is installed.
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

"""RocketMQ in your test suite: a real broker in this process, a clock you can turn, and faults you can order.

broker     starts it, cleans it, looks into it
cluster    several of them
loop_thread  a thread with an event loop for them
clock      the broker's time, which `advance` moves
faults     what may go wrong, in one line each
tap        sees each request and each answer, and lets faults act
ports      free ports, also beside other processes that look for some
pytest_plugin  the fixture `rocketlet`, which installing `rocketlet[pytest]` registers

Names load when they are first used: pytest loads the plugin in every run, also where no broker is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .broker import Broker
    from .clock import BrokerClock
    from .cluster import Cluster
    from .faults import Fault, Injected
    from .tap import Request

__all__ = ["Broker", "BrokerClock", "Cluster", "Fault", "Injected", "Request"]

_MODULES = {"Broker": "broker", "Cluster": "cluster", "BrokerClock": "clock", "Request": "tap"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f".{_MODULES.get(name, 'faults')}", __name__)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is missing, which a broker needs: pip install 'rocketlet[pytest]'", name=error.name
        ) from error
    found = globals()[name] = getattr(module, name)
    return found

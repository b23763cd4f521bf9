"""`rocketlet bench`: measures the throughput and latency of a cluster."""

from __future__ import annotations

import argparse
import sys

from ...client.admin.admin_client import AdminClient
from ..plumbing.access import access_of
from ..plumbing.administration import Commands, verb
from ..plumbing.output import Output
from .load import Load, LoadSide, apply

_COLUMNS = ("what", "messages", "per_s", "mib_per_s", "p50_ms", "p99_ms", "p999_ms", "max_ms")


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    bench = verb(commands, "bench", "load a cluster for some seconds and show rates and latencies", _bench)
    plain = Load()
    bench.add_argument(
        "--seconds", type=float, default=plain.seconds, help=f"duration of the load (default: {plain.seconds:g})"
    )
    bench.add_argument(
        "--rate",
        type=float,
        default=plain.rate,
        metavar="PER_SECOND",
        help="messages per second (default: unlimited)",
    )
    bench.add_argument(
        "--size", type=int, default=plain.size, metavar="BYTES", help=f"size of each body (default: {plain.size})"
    )
    bench.add_argument(
        "--queues", type=int, default=plain.queues, help=f"queues of the topic on each broker (default: {plain.queues})"
    )
    bench.add_argument(
        "--in-flight", type=int, default=plain.in_flight, help=f"concurrent sends (default: {plain.in_flight})"
    )


async def _bench(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    """Run the benchmark. Return the exit status, which is 1 if a send failed or fewer messages arrived than were sent."""
    load = Load(options.seconds, options.rate, options.size, options.queues, options.in_flight)
    if sys.stderr.isatty():
        print(f"sending and consuming for {load.seconds:g} s ...", file=sys.stderr)
    found = await apply(options.nameserver, load, access_of(options))
    output.records(_COLUMNS, [_row("sent", found.sent, load), _row("consumed", found.consumed, load)])
    if found.failed:
        print(f"{found.failed} sends failed; the last one: {found.fault}", file=sys.stderr)
    if found.missing > 0:
        print(f"{found.missing} messages did not arrive", file=sys.stderr)
    return int(found.failed > 0 or found.missing > 0)


def _row(what: str, half: LoadSide, load: Load) -> dict[str, object]:
    """Return a row of the table. The latency of a send ends with its response; that of a consumed message begins with its
    send, too, and ends when its handler starts."""
    p50, p99, p999, most = (round(ms, 2) for ms in half.percentiles_ms((0.5, 0.99, 0.999, 1.0)))
    return {
        "what": what,
        "messages": len(half.latencies_ms),
        "per_s": round(half.per_s),
        "mib_per_s": round(half.per_s * load.size / (1 << 20), 1),
        "p50_ms": p50,
        "p99_ms": p99,
        "p999_ms": p999,
        "max_ms": most,
    }

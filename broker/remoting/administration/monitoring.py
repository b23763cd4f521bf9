"""Requests of monitoring: mqadmin's brokerStatus and statsAll, Apache's exporter for Prometheus, and Apache's dashboard."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

import orjson

from ....host.version import own_version
from ....protocol import admin_bodies, names
from ....protocol.bodies import Work
from ....protocol.codes import VERSION, RequestCode, ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import ViewStats, read
from ...broker import BrokerController
from ...config import MAX_NAMED_MEMBERS
from ...machine import resident_bytes
from ...messages.statistics import GOT, GOT_BYTES, PUT, PUT_BYTES, SENT_BACK, Rate, Statistics, Totals
from ...runtime.histogram import Histogram
from ..connection import RemotingConnection
from ..responses import Buffers, answer

# The response contains every value that Apache's broker 4.9.7 returns, because the exporter ignores a broker whose
# response lacks a value. For parts that this broker does not have, such as thread pools, the values are those of an
# idle Apache broker.


# Capacities of the queues of Apache's thread pools (defaults of BrokerConfig), by which dashboards divide the number of
# waiting requests.
_POOLS: Final = {"send": 10_000, "pull": 100_000, "query": 20_000, "EndTransaction": 100_000}
_OF_BROKER: Final = {"BROKER_PUT_NUMS": PUT, "BROKER_GET_NUMS": GOT}
_STATS: Final = (PUT, PUT_BYTES, GOT, GOT_BYTES, SENT_BACK)
_SENDS: Final = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
_PULLS: Final = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
_LEVELS_MS: Final = (0, 10, 50, 100, 200, 500, 1_000, 2_000, 3_000, 4_000, 5_000, 10_000)  # levels of StoreStatsService
_LEVEL_NAMES: Final = (
    "<=0ms", "0~10ms", "10~50ms", "50~100ms", "100~200ms", "200~500ms", "500ms~1s", "1~2s", "2~3s", "3~4s", "4~5s", "5~10s",
    "10s~",
)  # fmt: skip
_UNLIMITED: Final = (1 << 31) - 1


def runtime_info(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    totals = yield from broker.statistics.totals()
    table = {
        **_identity(broker),
        **_rates(broker.statistics, totals),
        **_store(broker),
        **dict(_waiting()),
        **_latencies(broker),
        **dict(_delays(broker)),
        **_ours(broker),
    }
    return answer(frame, body=admin_bodies.encode_table({name: str(value) for name, value in table.items()}))


def _identity(broker: BrokerController) -> dict[str, object]:
    boot_ms = broker.statistics.boot_ms
    return {
        "brokerVersionDesc": "V4_9_8",
        "rocketletVersion": own_version(),
        "brokerVersion": VERSION,
        "bootTimestamp": boot_ms,
        "startAcceptSendRequestTimeStamp": 0,  # 0 as at Apache's broker, which refuses sends before this time
        "runtime": _spelled(broker.clock.time_ms() - boot_ms),
    }


def _rates(stats: Statistics, totals: Totals) -> dict[str, object]:
    got_rates, since_start = stats.rates(GOT, totals), stats.since_start(totals)
    table: dict[str, object] = {
        "putTps": stats.rates(PUT, totals),
        "getTransferedTps": got_rates,
        "getTransferredTps": got_rates,  # the name in 5.x
        "getTotalTps": got_rates,
        "getFoundTps": got_rates,
        "getMissTps": "0.0 0.0 0.0",
        "putMessageTimesTotal": since_start[PUT],
        "putMessageSizeTotal": since_start[PUT_BYTES],
        "putMessageAverageSize": since_start[PUT_BYTES] / max(since_start[PUT], 1),
    }
    for name, key in (("Put", PUT), ("Get", GOT)):
        yesterday, morning, now = stats.sums(key, totals)
        table[f"msg{name}TotalYesterdayMorning"] = yesterday
        table[f"msg{name}TotalTodayMorning"] = morning
        table[f"msg{name}TotalTodayNow"] = now
    return table


def _store(broker: BrokerController) -> dict[str, object]:
    store = broker.store
    ratio, (total, free) = round(store.disk_ratio(), 4), store.room.size_and_free_bytes()
    return {
        "earliestMessageTimeStamp": store.earliest_ms(),
        "commitLogMinOffset": store.begin,
        "commitLogMaxOffset": store.end,
        "commitLogDiskRatio": ratio,
        f"commitLogDiskRatio_{broker.config.data_dir / 'commitlog'}": ratio,
        "consumeQueueDiskRatio": ratio,
        "commitLogDirCapacity": f"Total : {total / (1 << 30):.1f} GiB, Free : {free / (1 << 30):.1f} GiB.",
        "putMessageFailedTimes": store.room.refused,
        "pageCacheLockTimeMills": 0,
        "remainHowManyDataToFlush": "0 B",
        "remainTransientStoreBufferNumbs": _UNLIMITED,
        "dispatchBehindBytes": 0,
        "dispatchMaxBuffer": 0,
    }


def _waiting() -> Iterator[tuple[str, int]]:
    for pool, capacity in _POOLS.items():
        yield f"{pool}ThreadPoolQueueCapacity", capacity
        name = pool[0].lower() + pool[1:]
        yield f"{name}ThreadPoolQueueSize", 0
        yield f"{name}ThreadPoolQueueHeadWaitTimeMills", 0
    yield "EndTransactionQueueSize", 0


def _latencies(broker: BrokerController) -> dict[str, object]:
    """Return the durations of sends and pulls, each rounded up to the upper bound of its histogram bucket; those in the last
    bucket count as twice its lower bound."""
    puts = [broker.request_times[code] for code in _SENDS]
    pulls = [broker.request_times[code] for code in _PULLS]
    counts = [0] * len(_LEVEL_NAMES)
    for histogram in puts:
        for bound_ms, count in zip(_bounds_ms(histogram), histogram.counts, strict=True):
            counts[bisect_left(_LEVELS_MS, bound_ms if bound_ms > 1 else 0)] += count  # Apache's broker counts whole ms
    levels = " ".join(f"[{name}]:{count}" for name, count in zip(_LEVEL_NAMES, counts, strict=True))
    return {
        "putMessageDistributeTime": f"{levels} ",
        "putLatency99": f"{_quantile_ms(puts, 0.99):.2f}",
        "putLatency999": f"{_quantile_ms(puts, 0.999):.2f}",
        "putMessageEntireTimeMax": round(_quantile_ms(puts, 1.0)),
        "getMessageEntireTimeMax": round(_quantile_ms(pulls, 1.0)),
    }


def _bounds_ms(histogram: Histogram) -> list[float]:
    return [bound_s * 1000 for bound_s in (*histogram.bounds_s, 2 * histogram.bounds_s[-1])]


def _quantile_ms(histograms: list[Histogram], share: float) -> float:
    counts = [sum(column) for column in zip(*(histogram.counts for histogram in histograms), strict=True)]
    wanted, seen = share * sum(counts), 0
    for bound_ms, count in zip(_bounds_ms(histograms[0]), counts, strict=True):
        seen += count
        if count and seen >= wanted:
            return bound_ms
    return 0.0


def _delays(broker: BrokerController) -> Iterator[tuple[str, str]]:
    for level in range(1, len(broker.config.delay_levels_ms) + 1):
        queue = broker.store.queues.get((names.SCHEDULE_TOPIC, level - 1))
        if queue is not None:
            yield f"scheduleMessageOffset_{level}", f"{broker.delays.progress.get(level, 0)},{queue.next}"


def _ours(broker: BrokerController) -> dict[str, object]:
    """Return values that only Rocketlet's brokers have, for `rocketlet doctor`."""
    return {
        "residentBytes": resident_bytes(),
        "writeFault": broker.store.write_fault() or "",
        "clockAheadSeconds": round(broker.retention_time.ahead_s),
        "damagedMessages": len(broker.store.damaged),
        "leases": len(broker.locks),
        "notAdopted": _json(broker.runtime.adoption.faults[:MAX_NAMED_MEMBERS]),
        "refusedHeartbeats": _json(broker.refused_heartbeats.recent()[-MAX_NAMED_MEMBERS:]),
        "repeats": _json({**broker.repeats.recent(), "away": broker.draining.agreement.away()}),
        "refusedRequests": _json(broker.acl.recent()[-MAX_NAMED_MEMBERS:] if broker.acl else []),
        "unburied": _json(broker.pops.unstored_dead_letters.texts()[-MAX_NAMED_MEMBERS:]),
        "turnedAway": _json([*broker.tls.turned_away(), *broker.turned_away.texts()][-MAX_NAMED_MEMBERS:]),
        "outdatedClients": _json(broker.callers.outdated()[-MAX_NAMED_MEMBERS:]),
        "failedCalls": _json(broker.callers.failed()[-MAX_NAMED_MEMBERS:]),
        "certificates": _json({path.name: int(at_s) for path, at_s in broker.tls.expires_s.items()}),
        "members": sum(len(group.members) for group in broker.groups),
        "server": f"rocketlet, Python {sys.version.split()[0]}",
    }


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _spelled(duration_ms: int) -> str:
    """Return a duration as text, like Apache's StoreStatsService.getFormatRuntime."""
    minutes, seconds = divmod(duration_ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def view_stats(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """VIEW_BROKER_STATS_DATA: return the rates of a topic, of a group in a topic, or of the broker."""
    header = read(ViewStats, frame.ext)
    stats = broker.statistics
    if header.stats_name in _STATS:
        rates = {
            "statsMinute": stats.rate(*header, 60),
            "statsHour": stats.rate(*header, 3600),
            "statsDay": stats.today(*header),
        }
    elif header.stats_name in _OF_BROKER:
        totals = yield from stats.totals()
        kind = _OF_BROKER[header.stats_name]
        rates = {
            "statsMinute": stats.rate_of_all(kind, totals, 60),
            "statsHour": stats.rate_of_all(kind, totals, 3600),
            "statsDay": stats.today_of_all(kind, totals),
        }
    else:
        remark = f"The stats <{header.stats_name}> not exist; these do: {', '.join((*_STATS, *_OF_BROKER))}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    value = {name: _rate_values(rate) for name, rate in rates.items()}
    return answer(frame, body=orjson.dumps(value))


def _rate_values(rate: Rate) -> dict[str, float]:
    return {"avgpt": 0.0, "sum": rate.total, "tps": rate.per_second}

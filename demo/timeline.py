"""The picture of the rebalance: one row per queue, time to the right, coloured by owner; PNG, and HTML in one file."""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

COLOURS = ("#3b6fb6", "#e0913a", "#4f9d69", "#a05fb4", "#c44e52", "#7f7f7f", "#17a2b8", "#bcbd22")
_ENDS = frozenset(("unlocked", "lock lost", "lock expired"))


@dataclass(frozen=True, slots=True)
class Ownership:
    """One member had one queue from `begin_ms` to `end_ms`."""

    queue: str
    owner: str
    begin_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: somebody joined, left or was killed."""

    ms: int
    text: str


def ownerships(events: Sequence[Mapping[str, Any]], topic: str, now_ms: int) -> list[Ownership]:
    """From the brokers' events, oldest first, each with its broker's name."""
    open_since: dict[tuple[str, int], Ownership] = {}
    done: list[Ownership] = []
    for event in events:
        if event.get("topic") != topic or "epoch" not in event:
            continue
        queue = f"{event['broker']}:{event['queue']}"
        key = (queue, int(event["epoch"]))
        if event["event"] == "locked":
            open_since[key] = Ownership(queue, str(event["client"]), int(event["ms"]), now_ms)
        elif event["event"] in _ENDS and key in open_since:
            begun = open_since.pop(key)
            done.append(Ownership(begun.queue, begun.owner, begun.begin_ms, int(event["ms"])))
    return done + list(open_since.values())


def double_owned_ms(spans: Sequence[Ownership]) -> int:
    """For how long queues had two owners, in all. The brokers' locks should make it 0."""
    total = 0
    for queue in {span.queue for span in spans}:
        mine = sorted((span for span in spans if span.queue == queue), key=lambda span: span.begin_ms)
        total += sum(max(earlier.end_ms - later.begin_ms, 0) for earlier, later in itertools.pairwise(mine))
    return total


def draw(
    spans: Sequence[Ownership], marks: Sequence[Mark], names: Mapping[str, str], folder: Path, summary: str
) -> tuple[Path, Path]:
    """Writes `rebalance.png` and `rebalance.html`. `names`: what to call a client id; strangers share a name."""
    if not spans:
        raise ValueError("no queue was owned by anybody: there is nothing to draw")
    queues = sorted({span.queue for span in spans}, key=_by_number)
    rows = {queue: index for index, queue in enumerate(queues)}
    owners = list(
        dict.fromkeys(names.get(span.owner, span.owner) for span in sorted(spans, key=lambda span: span.begin_ms))
    )
    colours = {owner: COLOURS[index % len(COLOURS)] for index, owner in enumerate(owners)}
    begin_ms = min(span.begin_ms for span in spans)
    figure, axes = plt.subplots(figsize=(13, 1.9 + 0.31 * len(queues)), layout="constrained")
    for span in spans:
        axes.barh(
            rows[span.queue],
            (span.end_ms - span.begin_ms) / 1000,
            left=(span.begin_ms - begin_ms) / 1000,
            height=0.82,
            color=colours[names.get(span.owner, span.owner)],
            edgecolor="white",
            linewidth=0.4,
        )
    for index, mark in enumerate(sorted(marks, key=lambda mark: mark.ms)):
        at = (mark.ms - begin_ms) / 1000
        axes.axvline(at, color="#222222", linewidth=0.9, linestyle="--")
        axes.annotate(
            mark.text,
            (at, -0.8 - 0.75 * (index % 2)),
            fontsize=8,
            ha="center",
            va="bottom",
            annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    axes.set_yticks(range(len(queues)), queues, fontsize=8)
    axes.set_ylim(len(queues) - 0.5, -2.4)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colours[owner], label=owner) for owner in owners]
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=min(len(owners), 8), frameon=False
    )
    png, page = folder / "rebalance.png", folder / "rebalance.html"
    figure.savefig(png, dpi=130)
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    plt.close(figure)
    page.write_text(_page(picture.getvalue(), summary), encoding="utf-8")
    return png, page


def _by_number(queue: str) -> tuple[str, int]:
    broker, _, number = queue.rpartition(":")
    return broker, int(number)


def _page(svg: str, summary: str) -> str:
    picture = svg[svg.index("<svg") :]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Rocketlet: who owned which queue</title>'
        "<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:78rem;padding:0 1rem;color:#222}"
        "svg{width:100%;height:auto}pre{background:#f6f6f4;padding:1rem;overflow-x:auto}</style></head><body>"
        "<h1>Who owned which queue</h1><p>One row per queue, time to the right, coloured by the member that held the "
        "queue's lock. White gaps are hand-overs.</p>"
        f"{picture}<pre>{html.escape(summary)}</pre></body></html>"
    )

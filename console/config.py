"""Every limit of the console."""

from __future__ import annotations

from typing import Final

DEFAULT_PORT: Final = 9890
LIVE_INTERVAL_S: Final = 1.0  # between two looks of an open page
MAX_STREAMS: Final = 64  # pages that are open and live at once
STOP_S: Final = 3.0  # for what is under way when the console stops

PAGE_ROWS: Final = 50
NAMES_INTERVAL_S: Final = 5.0  # between two lists of all groups and topics
SHOWN_INTERVAL_S: Final = 2.0  # between two samples of what a page shows
SAMPLE_INTERVAL_S: Final = 10.0  # for groups that no page shows
ASKING_SHARE: Final = (
    0.1  # the part of the time in which samples are asked for; with many groups each is asked less often
)
FIRST_SAMPLE_S: Final = 0.5  # how long a page that is loaded waits for samples; the others come live
LAG_POINTS: Final = 360  # samples of a group; an hour at one in 10 s

MAX_OLDEST: Final = 10_000  # queues whose first message is known
MAX_WATCHES: Final = 32  # groups that are looked at closely
WATCH_INTERVAL_S: Final = 0.9
FINDINGS_INTERVAL_S: Final = 5.0
QUEUE_POINTS: Final = 300  # lag of one queue; five minutes while somebody looks
MAX_EVENTS: Final = 10_000
TIMELINE_S: Final = (60, 300, 900)
TIMELINE_LEAST_MS: Final = 10_000  # for a group that has just begun
SHOWN_EVENTS: Final = 100
SHOWN_HAND_OVERS: Final = 50

MAX_RETRIES: Final = 1000
MAX_RETRY_QUEUES: Final = 64
MAX_FORM_BYTES: Final = 64 * 1024
MAX_NOTICES: Final = 100
MAX_FOUND: Final = 200  # messages of one search
LISTED_TOPICS: Final = 500  # that a field suggests
TAIL_MESSAGES: Final = 100  # that a tail keeps on the page
TAIL_BATCH: Final = 200  # newest messages of a queue that a tail takes in one look; it names what it skips
SHOWN_BODY_BYTES: Final = 64 * 1024
SHOWN_HEX_BYTES: Final = 4096
PREVIEW_CHARS: Final = 160
MAX_REPLAY: Final = 10_000  # dead letters that are sent again at once

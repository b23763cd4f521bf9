"""Limits and intervals of the console."""

from __future__ import annotations

from typing import Final

DEFAULT_PORT: Final = 9890  # the port, unless another one is given
LIVE_INTERVAL_S: Final = 1.0  # pause between two updates of an open page
MAX_STREAMS: Final = 64  # maximum open pages that are updated concurrently
STOP_S: Final = 3.0  # time that open requests may take when the console stops

MIN_PASSWORD_CHARS: Final = 8  # minimum length of a user's password
SESSION_S: Final = 12 * 3600.0  # time after which a user must log in again
MAX_SESSIONS: Final = 1000  # open sessions of users; the oldest one ends when there are more
FAILED_LOGIN_S: Final = 1.0  # time after which the console responds to a wrong password
MAX_FAILING_LOGINS: Final = 8  # wrong passwords that are responded to concurrently; more logins are refused

PAGE_ROWS: Final = 50  # rows of a list on one page
NAMES_INTERVAL_S: Final = 5.0  # age at which the lists of groups and topics are queried again, as when a page is loaded
SHOWN_INTERVAL_S: Final = 2.0  # minimum interval of samples of a group or topic on open pages
SAMPLE_INTERVAL_S: Final = 10.0  # minimum interval of samples of a group or topic that no page shows
ASKING_SHARE: Final = 0.1  # fraction of time spent on samples; with many groups the intervals become longer
FIRST_SAMPLE_S: Final = 0.5  # time after which a page that is loaded queries no more samples; later ones update it
RATE_S: Final = 30.0  # time span over which the rate of a group is computed, because commits may be seconds apart
LAG_POINTS: Final = 360  # samples of a group's lag, which is an hour with one sample in 10 s
GAP_S: Final = 60.0  # time without samples of a chart after which its line is interrupted
GAP_INTERVALS: Final = 4  # usual intervals between two samples of a chart up to which its line is not interrupted

MAX_OLDEST: Final = 10_000  # store times of queues' first messages that are cached
MAX_WATCHES: Final = 32  # groups whose detailed samples are kept
WATCH_INTERVAL_S: Final = 0.9  # minimum interval of detailed samples of a group that a page shows
DESCRIPTION_INTERVAL_S: Final = 5.0  # minimum interval at which topics and settings of a group on a page are queried
BROKERS_INTERVAL_S: Final = 10.0  # pause between two computations of the findings about brokers
MARKS_INTERVAL_S: Final = 2.0  # minimum interval at which the marks of dead letters are read
QUEUE_POINTS: Final = 300  # samples of one queue's lag, which is five minutes of an open page
MAX_EVENTS: Final = 10_000  # events kept for a group that a page shows
TIMELINE_S: Final = (60, 300, 900)  # time spans that the ownership chart offers
TIMELINE_LEAST_MS: Final = 10_000  # minimum time span of the ownership chart, for a new group
COLOURS: Final = 12  # colours of members in the ownership chart; further members share one
SHOWN_EVENTS: Final = 100  # events that a page shows
NEWEST_HAND_OVERS: Final = 5  # hand-overs that a page shows unfolded
HAND_OVER_ROWS: Final = 20  # rows of one page of a group's older hand-overs

MAX_REPORTING_MEMBERS: Final = 100  # members of a group up to which its page shows running handlers
MEMBER_TIMEOUT_S: Final = 1.0  # time that the page of a group waits for the running handlers of a member
SHOWN_HANDLERS: Final = 20  # running handlers that the page of a group shows, the longest first

MAX_FORM_BYTES: Final = 256 * 1024  # maximum size of a form, as browsers encode it
# maximum body that a form shows when its message is copied; larger bodies are copied without being shown
TYPED_BODY_BYTES: Final = 32 * 1024
PRODUCER_GROUP: Final = "console"  # producer group of messages that the console sends
MAX_SENT_DELAY_S: Final = 3_456_000  # maximum delay of a message that a form sends, as brokers allow it
MAX_NOTICES: Final = 100  # notices of changes that are kept for the next page
# messages of a topic that a page of a search by text, property or tags reads; older pages continue the search
MAX_SEARCHED: Final = 20_000
MAX_FOUND: Final = 200  # maximum messages of one search
LISTED_TOPICS: Final = 500  # maximum topics that a field suggests
TAIL_MESSAGES: Final = 100  # messages that a tail keeps on the page
TAIL_BATCH: Final = 200  # newest messages of a queue that a tail reads in one poll; it reports how many it skips
SHOWN_BODY_BYTES: Final = 64 * 1024  # bytes of a body that a page shows as text
SHOWN_HEX_BYTES: Final = 4096  # bytes of a body that a page shows in hex
PREVIEW_CHARS: Final = 160  # characters of a body that a list shows
MAX_REPLAY: Final = 10_000  # maximum stored dead letters of a group of which a form may select all new ones
MAX_JOBS: Final = 100  # replays that the console keeps; the oldest one that has ended is dropped for a new one
MAX_JOB_AHEAD_S: Final = 366 * 86_400  # maximum time from the creation of a replay to its start
JOB_SAVE_S: Final = 1.0  # how often the progress of a running replay is written to the disk
JOB_POLL_S: Final = 60.0  # maximum time between two comparisons of the clock with the start of a replay
JOB_RETRY_S: Final = 10.0  # pause after which a running replay whose broker does not respond continues

OVERVIEW_ROWS: Final = 50  # groups on the first page
OVERVIEW_FINDINGS: Final = 5  # findings on the first page; the page Doctor has all of them
CATCH_UP_S: Final = 120.0  # time span of lag samples from which the time to catch up is estimated

"""Dispatch of remoting requests: the table of request codes with handlers and permissions, limits, and responses."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Final

import structlog

from ...host.address import is_loopback
from ...protocol import fast
from ...protocol.bodies import BodyError, Work
from ...protocol.codes import ONEWAY_FLAG, RESPONSE_FLAG, RequestCode, ResponseCode, request_name
from ...protocol.codes import RequestCode as Code
from ...protocol.fast import IS_COMPILED
from ...protocol.frame import UNREADABLE, Frame
from ...protocol.headers import ACCESS_KEY, HeaderError
from ...protocol.names import IllegalName
from ..access import Acl
from ..broker import BrokerController
from ..config import KEPT_FRAME_BYTES, LARGE_REQUEST_BYTES, LIMITS, PIECE_S, UNWRITTEN_BYTES, LimitExceeded, Limits
from ..messages.sending import LongBatch
from ..nameserver import Routes
from ..runtime.histogram import Histogram
from ..runtime.turns import Turns
from ..sessions.refusal import Refusal
from ..sessions.shares import AddressShares
from ..store.files import StoreError, StoreFull
from ..store.store import Flusher
from . import accounts, groups, messages, permissions, pops
from . import name_server as nameserver
from .administration import broker_settings, clients, group_settings, history, monitoring, progress, topics
from .connection import RemotingConnection
from .events import read_response
from .messages import FAILED_REMARK, REGION_EXT, Sends, Staged, awaited, not_kept_remark, not_stored, store_batch
from .permissions import ADMIN, WITH_ACCOUNT, Rule, authorize
from .responses import Buffers, Reply, ResponseError, answer, response_error, small

log = structlog.get_logger("rocketlet.dispatch")


# ------------------------------------------------------------------------------
# Passes the frames of one socket read to their handlers.
#
# Consecutive sends are staged, and committed together before the next other request is handled and before their responses
# are written: usually one log append and one socket write per socket read. Large batches are stored on their own. Every
# other request goes to the handler in the table for its code. With accounts or `--admin loopback`, a request is authorized
# here before it is staged or handled, unless it repeats a request that was authorized under the same accounts.


Handler = Callable[[RemotingConnection, Frame], Reply]

_OF_LOCKS: Final = (Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ)
_PULL_MESSAGE: Final = int(Code.PULL_MESSAGE)
_PULL: Final = Frame(_PULL_MESSAGE)
PULLS = frozenset((RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE))
# Requests of readers. Such a request may create a group or its retry topic; if these cannot be synced to the device, the
# reader gets its response nevertheless.
SYNC_EXEMPT = PULLS | {RequestCode.HEART_BEAT, RequestCode.QUERY_CONSUMER_OFFSET}

# errors whose text is returned to the client and not logged; struct.error is raised for a number that is too large for its
# field
_CLIENT_FAULTS = (
    HeaderError,
    BodyError,
    IllegalName,
    StoreError,
    LimitExceeded,
    OverflowError,
    UnicodeError,
    struct.error,
)


class Dispatch:
    """The handlers of the servers in this process: a broker, a name server, or both. Without `acl`, every client may make
    every request, except that `admin_is_local` refuses administrative requests from other machines, other than those of
    brokers."""

    def __init__(
        self,
        broker: BrokerController | None,
        routes: Routes | None,
        turns: Turns,
        acl: Acl | None = None,
        admin_is_local: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        self._handlers: dict[int, tuple[Handler, Rule]] = {}
        if routes is not None:
            for code, (name_server_handler, rule) in NAME_SERVER_REQUESTS.items():
                self._handlers[code] = partial(name_server_handler, routes), rule
        if broker is not None:
            for code, (broker_handler, rule) in BROKER_REQUESTS.items():
                self._handlers[code] = partial(broker_handler, broker), rule
            for code, rule in SENDS.items():  # for large batches; other sends are staged
                self._handlers[code] = partial(store_batch, broker), rule
        self._broker = broker
        self._flusher = broker.flusher if broker is not None else None
        self._acl = acl
        self._turns = turns
        self._answering = AddressShares(limits.max_answering)
        self._admin_is_local = admin_is_local
        self._has_checks = acl is not None or admin_is_local
        self._records = broker.store if broker is not None else None
        self._sends = Sends(broker) if broker is not None else None
        self._times: dict[int, Histogram] = dict(broker.request_times) if broker is not None else {}

    def serve(self, connection: RemotingConnection) -> None:
        """Serve requests that a connection has read: at least one, and further ones for up to `PIECE_S`. Stop before if the
        client does not read its responses, or if a response is made in pieces. The remaining requests stay in
        `connection.requests`."""
        out: Buffers = []
        reply: Reply
        requests, sends, unwritten_bytes, is_first = connection.requests, self._sends, 0, True
        end_s = (began_s := time.perf_counter()) + PIECE_S
        try:
            while is_first or (requests.data and time.perf_counter() < end_s):
                is_first, account, code, reply = False, None, None, None
                if IS_COMPILED and sends is not None:
                    data, at = requests.data, requests.at
                    if (code := fast.code_at(data, at)) in SENDS:
                        account = self._sender(connection)
                        if account is not None and sends.stage_run(connection, account):
                            continue
                    elif code == _PULL_MESSAGE and not sends.staged:
                        reply = self._repeat_pulls(connection, began_s)
                if reply is None:
                    if (frame := requests.next()) is None:
                        break
                    is_send = frame.code in SENDS and not frame.flag & RESPONSE_FLAG
                    if is_send and sends is not None and self._stage(sends, connection, frame, account, out):
                        continue
                    if sends is not None and sends.staged:  # the client's other requests must see its earlier sends
                        self._commit_sends(sends, connection, out, began_s)
                        out, began_s = [], time.perf_counter()
                    if frame.flag & RESPONSE_FLAG:
                        began_s = self._pass_on_response(connection, frame, began_s)
                        continue
                    if len(frame.body) > LARGE_REQUEST_BYTES and frame.code not in SENDS:
                        reply = self._in_turn(connection, frame)
                    else:
                        reply = self._handle(connection, frame)
                    former_s, began_s = began_s, time.perf_counter()
                    if (times := self._times.get(frame.code)) is not None:
                        times.observe(began_s - former_s)
                    if code == _PULL_MESSAGE:
                        connection.pulls.name(connection, data, at, frame)
                    if not isinstance(reply, list):  # a check for a list is faster than one for a generator
                        if reply is not None and self._answer_later(connection, frame, reply, out):
                            out = []
                            break
                        continue
                    if frame.flag & ONEWAY_FLAG:
                        continue
                else:
                    began_s = time.perf_counter()
                out += reply
                if requests.data and (unwritten_bytes := unwritten_bytes + sum(map(len, reply))) > UNWRITTEN_BYTES:
                    connection.write(out)
                    out, unwritten_bytes = [], 0
                    if connection.is_paused:
                        break
        finally:  # staged messages belong to this read: otherwise their responses would go to the next client
            if sends is not None and sends.staged:
                self._commit_sends(sends, connection, out, began_s)
            elif out:
                connection.write(out)

    def _pass_on_response(self, connection: RemotingConnection, frame: Frame, began_s: float) -> float:
        """Pass on a client's response to a request of the broker. Return the time at which the next request starts."""
        if self._broker is None:
            return began_s
        self._broker.client_requests.answer(connection, frame.opaque, read_response(frame))
        return time.perf_counter()

    def _answer_later(self, connection: RemotingConnection, frame: Frame, reply: Reply, out: Buffers) -> bool:
        """Start to make a response that is not ready yet. Return True if the client's next requests wait for it; the
        responses so far are then written."""
        if isinstance(reply, Coroutine):
            self._begin(connection, frame, reply)
            return False
        assert isinstance(reply, Generator)
        connection.write(out)
        self._work_on(connection, frame, reply)
        return True

    def _work_on(self, connection: RemotingConnection, frame: Frame, work: Work[Buffers]) -> None:
        """Make a response in pieces, in turn with other long work. The client's next requests wait until it is made."""
        connection.hold(len(frame.body))
        self._answering.acquire(connection.address)
        self._turns.do(self._work(connection, frame, work), connection.address)

    def _begin(self, connection: RemotingConnection, frame: Frame, answering: Coroutine[object, None, Buffers]) -> None:
        """Make a response in a task, for a request that waits for an event such as the response of another client. The
        client's next requests are served meanwhile."""
        assert self._broker is not None
        self._answering.acquire(connection.address)
        size = KEPT_FRAME_BYTES + len(frame.body)
        connection.charge(size)
        task = self._broker.tasks.spawn(self._wait(connection, small(frame), size, answering))
        task.add_done_callback(lambda _: answering.close())  # for a task that was cancelled before it started

    async def _wait(
        self, connection: RemotingConnection, frame: Frame, size: int, answering: Coroutine[object, None, Buffers]
    ) -> None:
        written = self._written
        try:
            reply = await answering
        except Exception as error:
            reply = self._fault(connection, frame, error)
        finally:
            self._answering.release(connection.address)
            connection.charge(-size)
        self._write(connection, frame, reply, written)

    @property
    def _written(self) -> int:
        """A number that grows with each write that must be on the device before it is acknowledged; 0 without `--flush
        sync`."""
        return self._flusher.written if self._flusher is not None else 0

    def _write(self, connection: RemotingConnection, frame: Frame, reply: Buffers, written: int) -> None:
        """Write a response, unless the request is one-way. If data was written since `written` with `--flush sync`, write it
        once the data is on the device; if the sync fails, refuse the request, unless it is one of `SYNC_EXEMPT`."""
        if frame.flag & ONEWAY_FLAG:
            reply = []
        if self._flusher is None or self._flusher.written == written:
            connection.write(reply)
            return
        write = partial(connection.write, reply)
        refuse = partial(self._refuse, connection, [small(frame)])
        self._flusher.after_sync(write, write if frame.code in SYNC_EXEMPT else refuse)

    def _sender(self, connection: RemotingConnection) -> bytes | None:
        """Return the access key of the account as which the connection is authenticated, so that its requests need no
        signature; empty if the client may send without an account; None if each request must be authenticated."""
        found = self._acl.authentication_of(connection) if self._acl is not None else None
        if found is None or found.is_white:
            return b""
        return found.identified.access_key.encode() if found.identified is not None else None

    def _stage(
        self, sends: Sends, connection: RemotingConnection, frame: Frame, account: bytes | None, out: Buffers
    ) -> bool:
        """Stage or refuse a send, and return True. Return False for a large batch, which is not staged. The next sends of a
        known account to the same queue may then be staged by the compiled module."""
        reply, is_long = None, False
        try:
            if self._acl is not None:  # no send is administration
                self._check(connection, frame, SENDS[frame.code])
            sends.stage(connection, frame)
        except ResponseError as refusal:
            refusal.ext = REGION_EXT
            reply = refusal.answer(frame)
        except Refusal as refusal:
            reply = response_error(refusal, REGION_EXT).answer(frame)
        except LongBatch:
            is_long = True
        except Exception as error:
            reply = self._fault(connection, frame, error)
        if reply is None:
            if account is not None and ACCESS_KEY not in frame.ext:  # a signed send may be of another account
                sends.pass_queue(account, frame)
        elif not frame.flag & ONEWAY_FLAG:
            out += reply
        return not is_long

    def _commit_sends(self, sends: Sends, connection: RemotingConnection, out: Buffers, began_s: float) -> None:
        """Commit the staged messages and write the responses; with `--flush sync`, once the messages are on the device, or
        refusals if the sync fails. In the metrics of request times, each send counts with the time of all of them."""
        staged = sends.staged
        code, count = staged[0].code, len(staged) + sends.more
        out += sends.commit()
        self._times[code].observe(time.perf_counter() - began_s, count)
        if self._flusher is None:
            connection.write(out)
        else:
            staged = [small(item) if isinstance(item, Frame) else item for item in staged]
            self._flusher.after_sync(partial(connection.write, out), partial(self._refuse, connection, staged))

    def _refuse(self, connection: RemotingConnection, staged: list[Staged]) -> None:
        """Report to clients that what their requests have stored may not be on the device."""
        remark = FAILED_REMARK + str(self._broker.store.fault if self._broker else "")
        for frame in awaited(staged):
            connection.write(not_stored(frame, remark))

    def _in_turn(self, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
        """Handle a large request in turns with other long work, because many clients may send one at the same time."""
        yield
        if connection.is_closed:
            return []
        reply = self._handle(connection, frame)
        if isinstance(reply, Coroutine):
            self._begin(connection, frame, reply)
            return []
        if isinstance(reply, Generator):
            reply = yield from reply
        return reply or []

    def _work(self, connection: RemotingConnection, frame: Frame, work: Work[Buffers]) -> Work[None]:
        written = self._written
        try:
            reply = yield from work
            # writing a large response copies it, so let other work run before
            if reply and len(reply[-1]) > UNWRITTEN_BYTES:
                yield
        except Exception as error:
            reply = self._fault(connection, frame, error)
        finally:
            self._answering.release(connection.address)
        self._write(connection, frame, reply, written)
        connection.resume()

    def _check(self, connection: RemotingConnection, frame: Frame, rule: Rule) -> None:
        """Raises ResponseError if the client may not make the request, and a handler's errors if it cannot be decoded."""
        if self._admin_is_local and rule.is_admin and frame.code not in OF_BROKERS:
            _refuse_other_machines(connection, frame)
        if self._acl is not None:
            authorize(self._acl, connection, frame, rule, self._records)

    def _handle(self, connection: RemotingConnection, frame: Frame) -> Reply:
        found = self._handlers.get(frame.code)
        if found is None or (connection.is_vip and frame.code in PULLS):  # as on Apache's VIP channel
            if frame.code == UNREADABLE:
                return answer(frame, ResponseCode.SYSTEM_ERROR, remark=frame.remark)
            remark = f" request type {frame.code} not supported"
            return answer(frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        handler, rule = found
        try:
            if self._has_checks:
                self._check(connection, frame, rule)
            if self._flusher is not None:
                return self._handle_synced(self._flusher, connection, frame, handler)
            reply = handler(connection, frame)
            return reply if type(reply) is list else self._admitted(connection, frame.code, reply)
        except Exception as error:
            self._forget_staged()
            return self._fault(connection, frame, error)

    def _repeat_pulls(self, connection: RemotingConnection, began_s: float) -> Buffers | None:
        """Return the responses to the next requests, as far as these are pulls that the compiled module can repeat; None if
        the next request is no such pull. Responses that wait for the device are written later, and not returned. In the
        metrics of request times, each of these pulls counts with the time of all of them."""
        requests, named, written = connection.requests, connection.pulls.named, self._written
        if self._broker is None or not named or not self._may_repeat(connection):
            return None
        served = self._broker.pulling.checked.repeat(
            connection, requests.data, requests.at, named, UNWRITTEN_BYTES, messages.encode_repeated
        )
        if served is None:
            return None
        requests.skip_to(served.end)
        self._times[_PULL_MESSAGE].observe(time.perf_counter() - began_s, served.served)
        if self._written == written:
            return served.responses
        self._write(connection, _PULL, served.responses, written)
        return []

    def _may_repeat(self, connection: RemotingConnection) -> bool:
        """Return False if the broker has accounts and the client's account is no longer known. The permissions of the
        client's pulls were checked before, and a change of the accounts ends their repetition."""
        if self._has_checks:
            try:
                self._check(connection, _PULL, WITH_ACCOUNT)
            except ResponseError:
                return False
        return True

    def _admitted(self, connection: RemotingConnection, code: int, reply: Reply) -> Reply:
        """Return a handler's result. Raises LimitExceeded if the response is not ready and too many other responses are
        being made for this address or for all. Locks are never refused for that, because members would lose their leases; a
        connection has one of these requests at a time."""
        if (
            reply is None
            or isinstance(reply, list)
            or code in _OF_LOCKS
            or self._answering.has_room(connection.address)
        ):
            return reply
        reply.close()
        raise LimitExceeded(f"{self._answering.count} long requests are being answered; retry later")

    def _handle_synced(self, flusher: Flusher, connection: RemotingConnection, frame: Frame, handler: Handler) -> Reply:
        """Handle a request with `--flush sync`. If the request has stored data, its response waits until the data is on
        the device."""
        written = flusher.written
        reply = self._admitted(connection, frame.code, handler(connection, frame))
        if not isinstance(reply, list) or flusher.written == written:
            return reply
        self._write(connection, frame, reply, written)
        return None

    def _forget_staged(self) -> None:
        """Discard messages that a failed handler has staged and not committed, so that the next commit does not store
        them."""
        if self._broker is not None:
            self._broker.store.roll_back()

    def _fault(self, connection: RemotingConnection, frame: Frame, error: Exception) -> Buffers:
        """Return the response to a request whose handler raised: because the request was refused or invalid, the disk is
        full, or the broker has a defect, which is logged unless the client's address has repeated it."""
        if isinstance(error, ResponseError):
            return error.answer(frame)
        if isinstance(error, Refusal):
            return response_error(error).answer(frame)
        if isinstance(error, StoreFull):
            return answer(frame, ResponseCode.SERVICE_NOT_AVAILABLE, remark=not_kept_remark(error))
        if isinstance(error, _CLIENT_FAULTS):
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=str(error))
        name = request_name(frame.code)
        if connection.is_news(f"request_failed {name}"):
            log.exception("request_failed", request=name, peer=connection.peer)
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"{type(error).__name__}: {error}")


def _refuse_other_machines(connection: RemotingConnection, frame: Frame) -> None:
    """Raises ResponseError for an administrative request that does not come from a loopback address, for `--admin
    loopback`."""
    if not is_loopback(connection.address):
        if connection.is_news("admin_refused"):
            log.warning("admin_refused", request=request_name(frame.code), peer=connection.peer)
        remark = (
            f"{request_name(frame.code)} is administrative; such requests are accepted from this machine only (--admin)"
        )
        raise ResponseError(ResponseCode.NO_PERMISSION, remark)


# ------------------------------------------------------------------------------
# The tables of request codes, each with its handler and its permission rule.
#
# A new request needs a line here and one in docs/compatibility.md.


BrokerHandler = Callable[[BrokerController, RemotingConnection, Frame], Reply]
NameServerHandler = Callable[[Routes, RemotingConnection, Frame], Reply]
"""Handlers raise `ResponseError`, `Refusal`, `StoreFull`, or another error of `_CLIENT_FAULTS`."""

# Sends are staged and committed together (`messages.Sends`). Large batches are stored by `messages.store_batch`.
SENDS: Mapping[int, Rule] = {
    Code.SEND_MESSAGE: permissions.SEND,
    Code.SEND_MESSAGE_V2: permissions.SEND_V2,
    Code.SEND_BATCH_MESSAGE: permissions.SEND_V2,
}
BROKER_REQUESTS: Mapping[int, tuple[BrokerHandler, Rule]] = {
    # messages
    Code.PULL_MESSAGE: (messages.pull_message, permissions.READS_TOPIC_AS_GROUP),
    Code.LITE_PULL_MESSAGE: (messages.pull_message, permissions.READS_TOPIC_AS_GROUP),
    Code.POP_MESSAGE: (pops.pop_message, permissions.READS_TOPIC_AS_GROUP),
    Code.ACK_MESSAGE: (pops.ack_message, permissions.READS_TOPIC_AS_GROUP),
    Code.BATCH_ACK_MESSAGE: (pops.batch_ack_message, permissions.BATCH_ACK),
    Code.CHANGE_MESSAGE_INVISIBLETIME: (pops.change_invisible_time, permissions.READS_TOPIC_AS_GROUP),
    Code.NOTIFICATION: (pops.notification, permissions.READS_TOPIC_AS_GROUP),
    Code.POLLING_INFO: (pops.polling_info, permissions.READS_TOPIC_AS_GROUP),
    Code.PEEK_MESSAGE: (pops.peek_message, permissions.READS_TOPIC_AS_GROUP),
    Code.POP_LITE_MESSAGE: (pops.pop_lite_message, permissions.READS_TOPIC_AS_GROUP),
    Code.LITE_SUBSCRIPTION_CTL: (pops.sync_lite_subscriptions, permissions.LITE_SYNCS),
    Code.CONSUMER_SEND_MSG_BACK: (messages.send_back, permissions.SEND_BACK),
    Code.RECALL_MESSAGE: (messages.recall_message, permissions.SEND),
    Code.END_TRANSACTION: (messages.end_transaction, permissions.END_TRANSACTION),
    Code.SEND_REPLY_MESSAGE: (messages.send_reply, WITH_ACCOUNT),
    Code.SEND_REPLY_MESSAGE_V2: (messages.send_reply, WITH_ACCOUNT),
    Code.QUERY_MESSAGE: (messages.query_message, permissions.READS_TOPIC),
    Code.VIEW_MESSAGE_BY_ID: (messages.view_message, permissions.VIEW),
    # membership
    Code.HEART_BEAT: (groups.heartbeat, permissions.HEARTBEAT),
    Code.UNREGISTER_CLIENT: (groups.unregister_client, permissions.OF_GROUP),
    Code.AGREE_ON_MEMBERS: (groups.agree_on_members, ADMIN),
    Code.CONFIRM_WORD: (groups.confirm_word, ADMIN),
    Code.GET_CONSUMER_LIST_BY_GROUP: (groups.consumer_list, permissions.OF_GROUP),
    Code.LOCK_BATCH_MQ: (groups.lock, permissions.LOCKS),
    Code.UNLOCK_BATCH_MQ: (groups.unlock, permissions.LOCKS),
    Code.CHECK_CLIENT_CONFIG: (groups.check_client, permissions.CLIENT_CHECK),
    Code.QUERY_ASSIGNMENT: (groups.query_assignment, permissions.ASSIGNMENT),
    Code.SET_MESSAGE_REQUEST_MODE: (pops.set_request_mode, ADMIN),
    Code.GET_ALL_MESSAGE_REQUEST_MODE: (pops.request_modes, ADMIN),
    # offsets
    Code.QUERY_CONSUMER_OFFSET: (groups.query_consumer_offset, permissions.READS_TOPIC_AS_GROUP),
    Code.UPDATE_CONSUMER_OFFSET: (groups.update_consumer_offset, permissions.READS_TOPIC_AS_GROUP),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: (groups.search_offset, permissions.MAY_KNOW_TOPIC),
    Code.GET_MAX_OFFSET: (groups.max_offset, permissions.MAY_KNOW_TOPIC),
    Code.GET_MIN_OFFSET: (groups.min_offset, permissions.MAY_KNOW_TOPIC),
    Code.GET_EARLIEST_MSG_STORETIME: (groups.earliest_store_time, permissions.MAY_KNOW_TOPIC),
    Code.GET_QUEUE_OFFSETS: (groups.queue_offsets, permissions.EXTENTS),
    # topics
    Code.UPDATE_AND_CREATE_TOPIC: (topics.create_topic, ADMIN),
    Code.UPDATE_AND_CREATE_TOPIC_LIST: (topics.create_topics, ADMIN),
    Code.DELETE_TOPIC_IN_BROKER: (topics.delete_topic, ADMIN),
    Code.DELETE_TOPIC_IN_BROKER_LIST: (topics.delete_topics, ADMIN),
    Code.GET_ALL_TOPIC_CONFIG: (topics.all_topics, ADMIN),
    Code.GET_TOPIC_CONFIG: (topics.one_topic, permissions.MAY_KNOW_TOPIC),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: (topics.system_topics, ADMIN),
    Code.GET_TOPIC_STATS_INFO: (topics.topic_stats, permissions.MAY_KNOW_TOPIC),
    Code.QUERY_CONSUME_QUEUE: (topics.query_consume_queue, permissions.READS_TOPIC_AS_GROUP),
    Code.CLEAN_UNUSED_TOPIC: (topics.clean_unused_topics, ADMIN),
    # groups
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: (group_settings.update_group, ADMIN),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: (group_settings.update_groups, ADMIN),
    Code.DELETE_SUBSCRIPTIONGROUP: (group_settings.delete_group, ADMIN),
    Code.DELETE_SUBSCRIPTIONGROUP_LIST: (group_settings.delete_groups, ADMIN),
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: (group_settings.all_groups, ADMIN),
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: (group_settings.one_group, permissions.GROUP),
    Code.GET_ALL_CONSUMER_OFFSET: (progress.all_consumer_offsets, ADMIN),
    Code.GET_CONSUMER_CONNECTION_LIST: (clients.consumer_connections, permissions.OF_GROUP),
    Code.GET_CONSUME_STATS: (progress.consume_stats, permissions.READS_TOPIC_AS_GROUP),
    Code.GET_BROKER_CONSUME_STATS: (progress.all_consume_stats, ADMIN),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: (progress.consumed_by, permissions.READS_TOPIC),
    Code.QUERY_CONSUME_TIME_SPAN: (progress.time_span, permissions.OF_GROUP_AND_TOPIC),
    Code.QUERY_CORRECTION_OFFSET: (progress.correction_offset, permissions.CORRECTION),
    Code.CLONE_GROUP_OFFSET: (progress.clone_offsets, permissions.CLONE),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: (progress.reset_offset, permissions.OF_GROUP_AND_TOPIC),
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: (clients.consumer_status, permissions.OF_GROUP_AND_TOPIC),
    Code.GET_CONSUMER_RUNNING_INFO: (clients.forward, permissions.OF_GROUP),
    Code.CONSUME_MESSAGE_DIRECTLY: (clients.forward, ADMIN),
    Code.GET_GROUP_HISTORY: (history.group_history, permissions.OF_GROUP),
    # lite topics
    Code.GET_BROKER_LITE_INFO: (pops.broker_lite_info, ADMIN),
    Code.GET_PARENT_TOPIC_INFO: (pops.parent_topic_info, permissions.MAY_KNOW_TOPIC),
    Code.GET_LITE_TOPIC_INFO: (pops.lite_topic_info, permissions.PARENT_TOPIC),
    Code.GET_LITE_CLIENT_INFO: (pops.lite_client_info, permissions.GROUP),
    Code.GET_LITE_GROUP_INFO: (pops.lite_group_info, permissions.GROUP),
    Code.TRIGGER_LITE_DISPATCH: (pops.trigger_lite_dispatch, ADMIN),
    # the broker
    Code.GET_BROKER_CONFIG: (broker_settings.broker_config, ADMIN),
    Code.UPDATE_BROKER_CONFIG: (broker_settings.update_broker_config, ADMIN),
    Code.GET_BROKER_RUNTIME_INFO: (monitoring.runtime_info, ADMIN),
    Code.VIEW_BROKER_STATS_DATA: (monitoring.view_stats, ADMIN),
    Code.GET_ALL_DELAY_OFFSET: (progress.all_delay_offsets, ADMIN),
    Code.CLEAN_EXPIRED_CONSUMEQUEUE: (broker_settings.clean, ADMIN),
    Code.DELETE_EXPIRED_COMMITLOG: (broker_settings.clean, ADMIN),
    Code.IDENTIFY: (accounts.identify, WITH_ACCOUNT),
    Code.UPDATE_AND_CREATE_ACL_CONFIG: (accounts.put_account, ADMIN),
    Code.DELETE_ACL_CONFIG: (accounts.delete_account, ADMIN),
    Code.GET_BROKER_CLUSTER_ACL_INFO: (accounts.acl_version, ADMIN),
    Code.GET_BROKER_CLUSTER_ACL_CONFIG: (accounts.acl_config, ADMIN),
    Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: (accounts.put_white_addresses, ADMIN),
    Code.AUTH_CREATE_USER: (accounts.create_user, ADMIN),
    Code.AUTH_UPDATE_USER: (accounts.update_user, ADMIN),
    Code.AUTH_DELETE_USER: (accounts.delete_user, ADMIN),
    Code.AUTH_GET_USER: (accounts.get_user, ADMIN),
    Code.AUTH_LIST_USER: (accounts.list_users, ADMIN),
    Code.AUTH_CREATE_ACL: (accounts.put_acl, ADMIN),
    Code.AUTH_UPDATE_ACL: (accounts.put_acl, ADMIN),
    Code.AUTH_DELETE_ACL: (accounts.delete_acl, ADMIN),
    Code.AUTH_GET_ACL: (accounts.get_acl, ADMIN),
    Code.AUTH_LIST_ACL: (accounts.list_acls, ADMIN),
    Code.GET_PRODUCER_CONNECTION_LIST: (clients.producer_connections, ADMIN),
    Code.GET_ALL_PRODUCER_INFO: (clients.all_producers, ADMIN),
}
NAME_SERVER_REQUESTS: Mapping[int, tuple[NameServerHandler, Rule]] = {
    Code.REGISTER_BROKER: (nameserver.register_broker, ADMIN),
    Code.UNREGISTER_BROKER: (nameserver.unregister_broker, ADMIN),
    Code.QUERY_DATA_VERSION: (nameserver.data_version, ADMIN),
    Code.GET_ROUTEINFO_BY_TOPIC: (nameserver.route, WITH_ACCOUNT),
    Code.GET_BROKER_CLUSTER_INFO: (nameserver.cluster, WITH_ACCOUNT),
    Code.GET_DEPARTED_BROKERS: (nameserver.departed, WITH_ACCOUNT),
    Code.FORGET_BROKER: (nameserver.forget_broker, ADMIN),
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: (nameserver.topics, WITH_ACCOUNT),
    Code.GET_TOPICS_BY_CLUSTER: (nameserver.topics_of_cluster, WITH_ACCOUNT),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: (nameserver.system_topics, WITH_ACCOUNT),
    Code.GET_KV_CONFIG: (nameserver.get_kv, WITH_ACCOUNT),
    Code.GET_KVLIST_BY_NAMESPACE: (nameserver.kv_list, WITH_ACCOUNT),
    Code.GET_NAMESRV_CONFIG: (nameserver.config, ADMIN),
    Code.PUT_KV_CONFIG: (nameserver.put_kv, ADMIN),
    Code.DELETE_KV_CONFIG: (nameserver.delete_kv, ADMIN),
    Code.DELETE_TOPIC_IN_NAMESRV: (nameserver.delete_topic, ADMIN),
    Code.WIPE_WRITE_PERM_OF_BROKER: (nameserver.wipe_write, ADMIN),
    Code.ADD_WRITE_PERM_OF_BROKER: (nameserver.add_write, ADMIN),
}
# Requests of other brokers, which may be on other machines. `--admin loopback` does not restrict them.
OF_BROKERS = frozenset(
    (
        Code.AGREE_ON_MEMBERS,
        Code.CONFIRM_WORD,
        Code.REGISTER_BROKER,
        Code.UNREGISTER_BROKER,
        Code.QUERY_DATA_VERSION,
    )
)

"""plain_acl.yml: address patterns, permissions, mistakes, reloads, and what mqadmin rewrites."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.broker.access import AclError, AclFile, PatternError, Permission, parse_pattern, read_policy
from rocketlet.broker.config import MAX_ACL_FILE_BYTES
from structlog.testing import capture_logs

from ...support.accounts import reload

SECRET = "its-secret"
INNER = (
    "SCHEDULE_TOPIC_XXXX",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRACE_TOPIC",
    "rmq_sys_x",
    "DefaultCluster_REPLY_TOPIC",
)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*", ["10.0.0.1", "::1"], []),
        ("*.*.*.*", ["10.0.0.1", "::1"], []),
        ("", [], ["10.0.0.1", "::1", "0.0.0.0"]),
        ("10.0.0.1", ["10.0.0.1", "::ffff:10.0.0.1"], ["10.0.0.10", "10.0.0.11", "110.0.0.1"]),
        ("10.0.0.1,10.0.0.3", ["10.0.0.1", "10.0.0.3"], ["10.0.0.2"]),
        ("10.0.0.{1,2,7}", ["10.0.0.1", "10.0.0.7"], ["10.0.0.3", "10.0.1.1"]),
        ("10.0.*.*", ["10.0.0.0", "10.0.255.255"], ["10.1.0.0"]),
        ("10.0.3.*", ["10.0.3.9"], ["10.0.30.9", "10.0.4.9"]),
        ("10.0.0.20-60", ["10.0.0.20", "10.0.0.60"], ["10.0.0.19", "10.0.0.61", "10.0.0.2"]),
        ("10.0.1-5.*", ["10.0.1.9", "10.0.5.0"], ["10.0.6.0"]),
        ("10.0.1-5.7", ["10.0.3.7"], ["10.0.3.9"]),
        ("2001:db8::1", ["2001:db8::1", "2001:DB8:0::0:1"], ["2001:db8::2"]),
        ("2001:db8::{1,ff}", ["2001:db8::ff"], ["2001:db8::2"]),
        ("2001:db8::1-ff", ["2001:db8::a0"], ["2001:db8::100", "2001:db8::1:1"]),
        ("2001:db8:*:*:*:*:*:*", ["2001:db8:1::"], ["2001:db9::"]),
        ("::", ["::"], ["::1"]),
        ("::ffff:10.0.0.1", ["10.0.0.1", "::ffff:10.0.0.1"], ["10.0.0.2"]),
    ],
)
def test_address_patterns(pattern: str, matching: list[str], others: list[str]) -> None:
    parsed = parse_pattern(pattern)
    assert [host for host in matching if not parsed.matches(host)] == []
    assert [host for host in others if parsed.matches(host)] == []


@pytest.mark.parametrize(
    "pattern",
    ["10.0.0", "10.0.0.256", "10.0.0.9-3", "10.0.0.{1,2", "10.{1,2}.0.0", "10.0.0.{1}.{2}", "host", "10.0.0.a", "1:2:3",
     "-1.0.0.0", "10.0.0.0x1", "::1::", "10.0.0.1/8", "10.0.0.{" + ",".join(map(str, range(1002))) + "}"],
)  # fmt: skip
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="address pattern"):
        parse_pattern(pattern)


@pytest.mark.parametrize(("pattern", "allowed"), [("10.0.0.256", "0 to 255"), ("::9-3", "0 to ffff")])
def test_error_for_a_number_that_is_too_large_names_what_is_allowed(pattern: str, allowed: str) -> None:
    with pytest.raises(PatternError, match=f"expected {allowed}"):
        parse_pattern(pattern)


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_breaks_the_patterns(pattern: str, host: str) -> None:
    try:
        parse_pattern(pattern).matches(host)
    except PatternError:
        pass


@given(st.ip_addresses(), st.ip_addresses())
def test_an_address_is_a_pattern_for_itself_only(one: object, other: object) -> None:
    parsed = parse_pattern(str(one))
    assert parsed.matches(str(one))
    plain = [getattr(address, "ipv4_mapped", None) or address for address in (one, other)]
    assert parsed.matches(str(other)) == (plain[0] == plain[1])


def policy_with(**fields: object) -> dict[str, object]:
    return {"accounts": [{"accessKey": "service-1", "secretKey": SECRET, **fields}]}


@pytest.mark.parametrize(
    ("fields", "resource", "permission"),
    [
        ({}, "t", Permission.DENY),
        ({"defaultTopicPerm": "PUB"}, "t", Permission.PUB),
        ({"defaultTopicPerm": "PUB|SUB"}, "t", Permission.ANY),
        ({"defaultTopicPerm": "SUB|PUB"}, "%RETRY%g", Permission.DENY),
        ({"defaultGroupPerm": "SUB"}, "%RETRY%g", Permission.SUB),
        ({"defaultTopicPerm": "PUB|SUB", "topicPerms": ["t=DENY"]}, "t", Permission.DENY),
        # dead letters are the group's, and what brokers keep of other topics is for administrators
        ({"defaultTopicPerm": "PUB|SUB"}, "%DLQ%g", Permission.DENY),
        ({"defaultTopicPerm": "PUB|SUB", "groupPerms": ["g=SUB"]}, "%DLQ%g", Permission.ANY),
        (
            {"defaultTopicPerm": "PUB|SUB", "defaultGroupPerm": "SUB", "groupPerms": ["g=DENY"]},
            "%DLQ%g",
            Permission.DENY,
        ),
        ({"defaultGroupPerm": "SUB"}, "%DLQ%g", Permission.ANY),
        ({"topicPerms": ["%DLQ%g=SUB"]}, "%DLQ%g", Permission.SUB),
        *(({"defaultTopicPerm": "PUB|SUB"}, name, Permission.DENY) for name in INNER),
        *(({"admin": True, "topicPerms": ["t=SUB"]}, name, Permission.ANY) for name in INNER),
        ({"topicPerms": ["OFFSET_MOVED_EVENT=SUB"]}, "OFFSET_MOVED_EVENT", Permission.SUB),
        ({"defaultTopicPerm": "SUB"}, "BenchmarkTest", Permission.SUB),
        ({"topicPerms": [" t = SUB "]}, "t", Permission.SUB),
        ({"groupPerms": ["g=SUB"]}, "%RETRY%g", Permission.SUB),
        ({"groupPerms": ["g=SUB"]}, "g", Permission.DENY),
        ({"admin": True}, "t", Permission.ANY),
        ({"admin": True, "topicPerms": ["u=PUB"]}, "t", Permission.DENY),  # as Apache's: single permissions count
    ],
)
def test_permissions_are_apaches(fields: dict[str, object], resource: str, permission: Permission) -> None:
    account = read_policy(policy_with(**fields)).accounts["service-1"]
    for needed in (Permission.PUB, Permission.SUB):
        assert account.may(resource, needed) == bool(permission & needed)
    assert account.may(resource, Permission.ANY) == bool(permission)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("a text", "not a mapping"),
        ({"accounts": {"a": 1}}, "not a list"),
        ({"accounts": ["a"]}, "is a mapping with accessKey"),
        ({"accounts": [{"accessKey": "service"}]}, "needs secretKey"),
        ({"accounts": [{"accessKey": "short", "secretKey": SECRET}]}, "accessKey, of at least 7"),
        ({"accounts": [{"accessKey": "service", "secretKey": 1.5}]}, "in quotes"),
        (policy_with(defaultTopicPerm="PUB,SUB"), "allowed: DENY, PUB, SUB"),
        (policy_with(topicPerms=["t"]), "write name=PUB"),
        (policy_with(topicPerms="t=PUB"), "not a list"),
        (policy_with(admin="yes"), "write true or false"),
        (policy_with(whiteRemoteAddress="10.0.0"), "neither IPv4 nor IPv6"),
        ({"globalWhiteRemoteAddresses": ["10.0.0"]}, "neither IPv4 nor IPv6"),
        ({"accounts": [*policy_with()["accounts"], *policy_with()["accounts"]]}, "is repeated"),  # type: ignore[misc]
    ],
)
def test_mistakes_are_named_without_secrets(document: object, reason: str) -> None:
    with pytest.raises(AclError, match=reason) as caught:
        read_policy(document)
    assert SECRET not in str(caught.value)


def test_accounts_do_not_show_their_secrets() -> None:
    assert SECRET not in repr(read_policy(policy_with()))


FIELDS = ["accounts", "globalWhiteRemoteAddresses", "accessKey", "secretKey", "whiteRemoteAddress", "admin"]
FIELDS += ["defaultTopicPerm", "defaultGroupPerm", "topicPerms", "groupPerms", "dataVersion"]
SCALARS: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=3)
)
SCALARS |= st.dates() | st.datetimes() | st.sampled_from(["service-1", SECRET, "t=PUB", "10.0.0.*", "PUB|SUB"])


def _holding(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(FIELDS) | st.integers() | st.dates()
    return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=8) | st.tuples(inner) | st.just({1, "a"})


@given(st.recursive(SCALARS, _holding, max_leaves=30))
def test_whatever_yaml_may_hold_is_a_policy_or_a_mistake(document: object) -> None:
    for tried in (document, {"accounts": [document]}, policy_with(topicPerms=document, admin=document)):
        with contextlib.suppress(AclError):
            read_policy(tried)


# The file


@pytest.mark.parametrize(
    "text", ['!!int ""', '!!float ""', "!!bool x", "!!timestamp x", "2001-02-30", "[", "&a [*b]", "\x00"]
)
def test_what_yaml_cannot_read_is_a_mistake(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text(f"accounts: {text}\n")
    with pytest.raises(AclError, match="is not YAML"):
        AclFile(path)


TEXT = """
globalWhiteRemoteAddresses:
- 10.10.103.*
accounts:
- accessKey: RocketMQ
  secretKey: 12345678
  whiteRemoteAddress:
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  groupPerms:
  - groupA=DENY
- accessKey: rocketmq2
  secretKey: 12345678
  whiteRemoteAddress: 192.168.1.*
  admin: true
"""  # with the values of the file that Apache ships


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "plain_acl.yml"
    file.write_text(TEXT)
    file.chmod(0o600)
    return file


def test_a_file_with_the_values_that_apache_ships_is_read(path: Path) -> None:
    policy = AclFile(path).policy
    assert set(policy.accounts) == {"RocketMQ", "rocketmq2"}
    assert policy.is_white("10.10.103.7")
    assert policy.accounts["RocketMQ"].may("topicB", Permission.PUB)
    assert not policy.accounts["RocketMQ"].may("topicA", Permission.PUB)


def test_a_changed_file_is_taken_and_a_damaged_one_is_not(path: Path) -> None:
    file = AclFile(path)
    path.write_text(TEXT.replace("rocketmq2", "someone-else"))
    reload(file)
    assert "someone-else" in file.policy.accounts
    for damaged, reason in (
        ("accounts: [", "not YAML"),
        ("", "is empty"),
        (TEXT.replace("DENY", "NONE"), "allowed: DENY"),
        ("- a", "mapping"),
    ):
        path.write_text(damaged)
        with capture_logs() as logs:
            reload(file)
            reload(file)
        assert [entry["event"] for entry in logs] == ["acl_file_not_reloaded"]
        assert reason in logs[0]["reason"]
        assert "12345678" not in str(logs)
        assert "someone-else" in file.policy.accounts
    path.unlink()
    with capture_logs() as logs:
        reload(file)
    assert "cannot read" in logs[0]["reason"]
    path.write_text(TEXT)
    reload(file)
    assert "rocketmq2" in file.policy.accounts


def test_a_file_that_is_written_in_place_is_taken_when_it_is_whole(path: Path) -> None:
    """A prefix of YAML is YAML: fewer accounts, or one without the permission that denies."""
    file = AclFile(path)
    with path.open("w") as writing:
        for line in TEXT.replace("rocketmq2", "someone-else").splitlines(keepends=True):
            writing.write(line)
            writing.flush()
            assert not file.poll()
            file.load()
            assert set(file.policy.accounts) == {"RocketMQ", "rocketmq2"}
    assert file.poll()
    file.load()
    assert set(file.policy.accounts) == {"RocketMQ", "someone-else"}


def test_a_file_that_changes_while_it_is_read_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AclFile(path)
    read = yaml.safe_load

    def write_meanwhile(data: bytes) -> Any:
        path.write_text(TEXT.replace("rocketmq2", "someone-else"))
        return read(data)

    path.write_text("accounts: []")
    with monkeypatch.context() as writing, capture_logs() as logs:
        writing.setattr(yaml, "safe_load", write_meanwhile)
        reload(file)
    assert set(file.policy.accounts) == {"RocketMQ", "rocketmq2"}
    assert not logs
    reload(file)
    assert set(file.policy.accounts) == {"RocketMQ", "someone-else"}
    with monkeypatch.context() as writing, pytest.raises(AclError, match="is being written"):
        writing.setattr(yaml, "safe_load", write_meanwhile)
        AclFile(path)


def test_a_file_that_is_being_written_is_not_overwritten(path: Path) -> None:
    """Accounts that are still to be written would be gone for good."""
    file = AclFile(path)
    path.write_text("accounts: []")
    with pytest.raises(AclError, match="is being written"):
        file.put_account({"accessKey": "fresh-one", "secretKey": SECRET})
    assert path.read_text() == "accounts: []"
    file.poll()
    with pytest.raises(AclError, match="is being written"):
        file.delete_account("RocketMQ")
    path.write_text(TEXT)
    reload(file)
    file.put_account({"accessKey": "fresh-one", "secretKey": SECRET})
    assert set(AclFile(path).policy.accounts) == {"RocketMQ", "rocketmq2", "fresh-one"}


def test_a_change_that_fails_leaves_what_the_operator_wrote_in_force(path: Path) -> None:
    file = AclFile(path)
    path.write_text(TEXT.replace("rocketmq2", "someone-else"))
    file.poll()
    assert file.poll()
    with pytest.raises(AclError, match="no account"):
        file.delete_account("rocketmq2")
    assert set(file.policy.accounts) == {"RocketMQ", "someone-else"}


def test_a_file_that_cannot_be_used_is_refused_at_the_start(path: Path) -> None:
    with pytest.raises(AclError, match="cannot read"):
        AclFile(path.with_name("none.yml"))
    path.write_text("accounts:\n- secretKey: 'its-secret\n  b: [\n")
    with pytest.raises(AclError, match="not YAML: see line") as caught:
        AclFile(path)
    assert SECRET not in str(caught.value)
    path.write_text("#" * (MAX_ACL_FILE_BYTES + 1))
    with pytest.raises(AclError, match="maximum 1048576"):
        AclFile(path)
    path.write_text("#" * MAX_ACL_FILE_BYTES)
    assert not AclFile(path).policy.accounts


def test_what_is_no_regular_file_is_refused(path: Path) -> None:
    """From a pipe the broker would wait for ever."""
    file = AclFile(path)
    path.unlink()
    os.mkfifo(path)
    with capture_logs() as logs:
        reload(file)
    assert "not a regular file" in logs[0]["reason"]
    assert file.policy.accounts


def test_secrets_that_all_may_read_are_reported(path: Path) -> None:
    path.chmod(0o644)
    with capture_logs() as logs:
        AclFile(path)
    assert [entry["event"] for entry in logs] == ["acl_file_readable_by_all"]


def test_accounts_are_put_changed_and_deleted_in_the_file(path: Path) -> None:
    file = AclFile(path)
    file.put_account({"accessKey": "fresh-one", "secretKey": SECRET, "topicPerms": ["t=PUB"]})
    file.put_account({"accessKey": "RocketMQ", "secretKey": SECRET, "admin": True})
    file.delete_account("rocketmq2")
    file.put_white_addresses(["10.0.0.1", "10.0.0.2-9"])
    for policy in (file.policy, AclFile(path).policy):
        assert set(policy.accounts) == {"RocketMQ", "fresh-one"}
        assert policy.accounts["fresh-one"].may("t", Permission.PUB)
        assert policy.accounts["RocketMQ"].is_admin
        assert policy.accounts["RocketMQ"].may("topicB", Permission.SUB)  # other settings stay
        assert policy.is_white("10.0.0.5") and not policy.is_white("10.10.103.7")
    assert AclFile(path).version.counter == 4
    assert path.stat().st_mode & 0o777 == 0o600
    with capture_logs() as logs:
        reload(file)
    assert not logs  # its own change is no news


def test_changes_that_cannot_be_are_refused_and_change_nothing(path: Path) -> None:
    file = AclFile(path)
    before = path.read_bytes()
    for entry in ({"accessKey": "fresh-one", "secretKey": "short"}, {"accessKey": "RocketMQ", "defaultTopicPerm": "X"}):
        with pytest.raises(AclError):
            file.put_account(entry)
    with pytest.raises(AclError, match="no account"):
        file.delete_account("nobody-here")
    with pytest.raises(AclError):
        file.put_white_addresses(["10.0.0"])
    assert path.read_bytes() == before
    assert set(file.policy.accounts) == {"RocketMQ", "rocketmq2"}


def test_a_file_with_a_mistake_is_not_overwritten(path: Path) -> None:
    file = AclFile(path)
    path.write_text("accounts: [")
    file.poll()
    file.poll()
    with pytest.raises(AclError, match="not YAML"):
        file.put_account({"accessKey": "fresh-one", "secretKey": SECRET})
    assert path.read_text() == "accounts: ["


def test_a_change_meets_what_the_operator_wrote_meanwhile(path: Path) -> None:
    file = AclFile(path)
    path.write_text(TEXT.replace("rocketmq2", "someone-else"))
    os.utime(path, ns=(1, 1))
    file.poll()
    file.poll()
    file.put_account({"accessKey": "fresh-one", "secretKey": SECRET})
    assert set(AclFile(path).policy.accounts) == {"RocketMQ", "someone-else", "fresh-one"}


def test_a_change_that_the_disk_refuses_leaves_no_copy_of_the_secrets(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AclFile(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in ("fchmod", "fsync", "replace"):
        with monkeypatch.context() as failing, pytest.raises(AclError, match="No space left"):
            failing.setattr(f"rocketlet.broker.machine.os.{step}", full)
            file.put_account({"accessKey": "fresh-one", "secretKey": SECRET})
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        assert path.read_bytes() == before
    assert set(file.policy.accounts) == {"RocketMQ", "rocketmq2"}

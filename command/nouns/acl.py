"""`rocketlet acl`: the accounts of brokers that run with `--acl`, or of Apache's with `aclEnable`."""

from __future__ import annotations

import argparse
import getpass
import os
import sys

from ...client.admin.admin_client import AdminClient
from ...client.errors import BrokerRefused, ConfigError
from ...protocol.headers import PutAccount
from ..plumbing.administration import Commands, changing, confirmed, noun, verb
from ..plumbing.output import Output

_NEW_SECRET = "ROCKETLET_NEW_SECRET_KEY"
_FIELDS = {
    "white_address": "whiteRemoteAddress",
    "admin": "admin",
    "default_topics": "defaultTopicPerm",
    "default_groups": "defaultGroupPerm",
    "topics": "topicPerms",
    "groups": "groupPerms",
}


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    verbs = noun(commands, "acl", "list, change and delete accounts")
    verb(verbs, "list", "list each broker's accounts, without their secrets", _list)
    put = verb(verbs, "put", "create an account, or change the given settings of an account", _put)
    put.add_argument("account", help="its access key")
    put.add_argument(
        "--new-secret",
        action="store_true",
        help=f"set its secret, from ${_NEW_SECRET} or typed; needed for a new account",
    )
    put.add_argument(
        "--admin",
        action=argparse.BooleanOptionalAction,
        help="permission for everything, including administration; by default unchanged, and off for a new account",
    )
    put.add_argument("--topics", metavar="TOPIC=PERM[,...]", help="such as orders=PUB|SUB,secrets=DENY")
    put.add_argument("--groups", metavar="GROUP=PERM[,...]", help="such as shop=SUB")
    put.add_argument(
        "--default-topics", metavar="PERM", help="permission for all other topics: DENY, PUB, SUB or PUB|SUB"
    )
    put.add_argument("--default-groups", metavar="PERM", help="permission for all other groups: DENY or SUB")
    put.add_argument(
        "--from-address",
        metavar="PATTERN",
        help="addresses, such as 10.0.0.*, from which this account needs no signature and no permission",
    )
    changing(put)
    delete = verb(verbs, "delete", "delete an account", _delete)
    delete.add_argument("account", help="its access key")
    changing(delete)
    white = verb(verbs, "white", "set the addresses that need no account", _white)
    white.add_argument(
        "address", nargs="*", metavar="PATTERN", help="such as 10.0.0.*; none: every client needs an account"
    )
    changing(white)


async def _list(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    found = await admin.accounts()
    rows = [
        {"broker": broker, "account": entry["accessKey"]} | {name: entry.get(key) for name, key in _FIELDS.items()}
        for broker, known in found.items()
        for entry in known["plainAccessConfigs"]
    ]
    output.records(("broker", "account", *_FIELDS), rows)
    for broker, known in found.items():
        if output.as_json:
            output.json({"broker": broker, "white_addresses": known["globalWhiteAddrs"]})
        output.text(f"{broker}: no account is needed from {', '.join(known['globalWhiteAddrs']) or 'nowhere'}")
    return 0


async def _put(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    if not options.admin:
        administrators = await _administrators(admin)
        if options.admin is None and administrators is None:
            raise ConfigError("--admin: the brokers do not list their accounts; give --admin or --no-admin")
        options.admin = options.admin is None and options.account in (administrators or ())
        if not options.admin and not _may_lose(options, administrators):
            return 1
    account = PutAccount(
        access_key=options.account,
        secret_key=_secret() if options.new_secret else "",
        white_remote_address=options.from_address,
        admin=options.admin,
        default_topic_perm=options.default_topics,
        default_group_perm=options.default_groups,
        topic_perms=options.topics,
        group_perms=options.groups,
    )
    await admin.put_account(account)
    return _done(output, options.account, "put", f"the account {options.account} is set on every broker")


async def _delete(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    if not _may_lose(options, await _administrators(admin)):
        return 1
    if not confirmed(options, f"Delete the account {options.account}?"):
        return 1
    await admin.delete_account(options.account)
    return _done(output, options.account, "deleted", f"the account {options.account} is deleted")


async def _administrators(admin: AdminClient) -> set[str] | None:
    """Return the accounts that are administrators at any broker; None if the brokers do not list their accounts, as
    Apache's since 4.9.8."""
    try:
        found = await admin.accounts()
    except BrokerRefused:
        return None
    return {
        entry["accessKey"] for known in found.values() for entry in known["plainAccessConfigs"] if entry.get("admin")
    }


def _may_lose(options: argparse.Namespace, administrators: set[str] | None) -> bool:
    """Return True if the account may stop to be an administrator. Ask for confirmation if it is the only one."""
    if administrators != {options.account}:
        return True
    return confirmed(
        options,
        f"{options.account} is the only administrator, and nobody could administer the brokers after it. Continue?",
    )


async def _white(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    said = ", ".join(options.address) or "nowhere"
    if not confirmed(options, f"Require no account from {said}?"):
        return 1
    await admin.put_white_addresses(options.address)
    return _done(output, "", "white", f"no account is needed from {said}")


def _done(output: Output, account: str, change: str, text: str) -> int:
    if output.as_json:
        output.json({"account": account, "change": change})
    output.text(text)
    return 0


def _secret() -> str:
    secret = os.environ.get(_NEW_SECRET) or (getpass.getpass("Secret: ") if sys.stdin.isatty() else "")
    if not secret:
        raise ConfigError(f"--new-secret: set ${_NEW_SECRET}, or type it at a terminal")
    return secret

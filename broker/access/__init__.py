"""Accounts and their permissions: Apache's plain ACL.

acl        judges each request
accounts   the accounts of plain_acl.yml and their permissions
addresses  patterns of white addresses
file       the accounts' file, reloaded and rewritten
needs      the permissions that a request needs
"""

"""Who may do what: Apache's plain ACL.

acl        judges each request
accounts   the accounts of plain_acl.yml, and what each may do
addresses  patterns of white addresses
file       the accounts' file, reloaded and rewritten
needs      what a request needs permission for
"""

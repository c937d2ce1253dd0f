"""The broker's users and what each may do; `srl broker-acl` and `srl deploy` make an ACL file of them.

A server that keeps to it trusts actors, the cheap machines that come and go, with no more than they need. They may run
the scripts that a trainer or client has loaded, but load none: a script can hold up the whole server.
"""

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from srl.base.errors import ConfigError

Role = Literal["client", "trainer", "actor", "viewer"]
ROLES: tuple[Role, ...] = get_args(Role)

_WORKERS = "+ping +time +select +hget +hmget +zrange"
_ALL_KEYS = (
    f"~srl:* {_WORKERS} +evalsha +script|load +multi +exec +exists +hexists +hset +hsetnx +hincrby +hgetall +hlen +zadd"
)
RULES: Mapping[Role, str] = {
    "client": f"{_ALL_KEYS} +get +set +zrem +zcard +xadd +xread +xrange +del +expire",
    "trainer": f"{_ALL_KEYS} +zrem +zcard +xadd +xread +xlen +xrevrange +xtrim +hdel +del +expire +memory|usage",
    "viewer": f"%R~srl:* {_WORKERS} +get +hgetall +xread +xrange +multi +exec",
    # What is in parentheses holds for these keys alone.
    "actor": f"%R~srl:queue %R~srl:*:task {_WORKERS} "
    "(~srl:*:actors ~srl:*:workers ~srl:*:experience ~srl:*:events +evalsha) "
    "(~srl:*:actors ~srl:*:workers +hget +hmget +hgetall +hset +hdel) "
    "(~srl:*:experience ~srl:*:events +xadd +exists)",
}


def acl_file(passwords: Mapping[Role, str]) -> str:
    """Return a server's `aclfile`; it has hashes of the passwords (SHA-256), which should be long and random."""
    lines = [
        f"user {role} on #{hashlib.sha256(passwords[role].encode()).hexdigest()} resetchannels -@all {RULES[role]}"
        for role in ROLES
    ]
    return "\n".join(["user default off resetchannels -@all", *lines, ""])


def passwords_in(directory: Path) -> dict[Role, str]:
    """Return each role's password from the file of that name in a directory; a missing one is made, for its owner only.

    Raises `ConfigError` where a file is empty or has more than one line.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    passwords: dict[Role, str] = {}
    for role in ROLES:
        path = directory / role
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(new_password(), encoding="utf-8")  # no end of line: some make a secret of the whole file
        passwords[role] = path.read_text(encoding="utf-8").strip()
        if len(passwords[role].splitlines()) != 1:
            raise ConfigError(f"{path} should have one line, the {role}'s password")
    return passwords


def new_password() -> str:
    """Return a random password of 32 bytes."""
    return secrets.token_urlsafe(32)

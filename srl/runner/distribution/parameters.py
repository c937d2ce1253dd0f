"""Where the broker is and how to speak to it: `RedisParameters`.

Users make one for clients, actors and trainers; the broker layer connects with it; a parent hands it to its
workers through their environment.
"""

import ipaddress
import json
import logging
import math
import os
import threading
import time
import urllib.parse
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl.base.errors import BrokerError, BrokerUnreachableError, ConfigError

if TYPE_CHECKING:
    import redis

_logger = logging.getLogger(__name__)

URL_VARIABLE = "SRL_REDIS_URL"
PASSWORD_VARIABLE = "SRL_REDIS_PASSWORD"  # noqa: S105 - the name of a variable
PASSWORD_FILE_VARIABLE = "SRL_REDIS_PASSWORD_FILE"  # noqa: S105

SOCKET_TIMEOUT_S = 10.0
"""The longest silence of a broker within one call; blocking calls must ask for clearly less."""
SOCKET_CONNECT_TIMEOUT_S = 5.0

_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 6379
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_WANTS_CERTIFICATE = (
    "if it wants a certificate of this side, give one that its authority signed as ssl_certfile and ssl_keyfile"
)
_URL_OPTIONS = (*_TLS, "task_name", "connect_timeout_s", "allow_insecure", "kwargs")


@dataclass
class RedisParameters:
    """Address, credentials and options of a Redis or Valkey server (version 7.0 or later).

    Where neither a host, a URL nor a socket is given, the environment's `SRL_REDIS_URL` is used, and where no password
    is given `SRL_REDIS_PASSWORD`, or the file that `SRL_REDIS_PASSWORD_FILE` names; arguments go before the
    variables. A URL may carry every option after a `?`, as in `rediss://host:6379/0?ssl_ca_certs=/etc/srl/ca.pem`.

    Attributes:
        host, port, db: address of the server; 127.0.0.1:6379/0 where nothing is given.
        url: `redis://`, `rediss://` (TLS) or `unix://` address, in place of the above; its parts are then
            found in the other fields.
        username, password: credentials; the password is never shown.
        ssl: whether to use TLS. ssl_ca_certs: PEM file of the authority that signed the server's
            certificate (default: the system's). ssl_certfile, ssl_keyfile: PEM files of this side's certificate.
            ssl_cert_reqs: `required`, `optional` or `none`. ssl_check_hostname: whether the certificate
            must name the host.
        kwargs: further arguments of `redis.Redis`.
        task_name: the task to work for where a broker has several.
        connect_timeout_s: how long `wait_until_reachable` tries.
        allow_insecure: whether another machine's broker may be used without a password.
        unix_socket: path of a socket, in place of host and port.

    Raises `ConfigError` where what is given contradicts itself.
    """

    host: str = ""
    port: int = _DEFAULT_PORT
    url: InitVar[str | None] = None
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ssl: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    task_name: str = ""
    connect_timeout_s: float = 30.0
    allow_insecure: bool = False
    ssl_ca_certs: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_cert_reqs: str = "required"
    ssl_check_hostname: bool = True
    unix_socket: str = ""

    def __post_init__(self, url: str | None) -> None:
        given_host = self.host or self.unix_socket
        if url and given_host:
            raise ConfigError("give RedisParameters either a url or a host (or unix_socket), not both")
        if self.host and self.unix_socket:
            raise ConfigError("give RedisParameters either a host or a unix_socket, not both")
        from_environment = not url and not given_host and self.port == _DEFAULT_PORT
        if from_environment:
            url = os.environ.get(URL_VARIABLE)
        if url:
            self._read_url(url, arguments_win=from_environment)
        elif not given_host:
            self.host = _DEFAULT_HOST
        if self.password is None:
            self.password = os.environ.get(PASSWORD_VARIABLE) or None
        if self.password is None and (path := os.environ.get(PASSWORD_FILE_VARIABLE)):
            self.password = password_in(Path(path))
        self._check()

    def __repr__(self) -> str:
        shown = [repr(self.address)]
        for item in fields(self):
            if item.repr and item.name not in ("host", "port", "db", "ssl", "unix_socket"):
                value = getattr(self, item.name)
                if value != item.default:
                    shown.append(f"{item.name}={value!r}")
        return f"RedisParameters({', '.join(shown)}{', password=***' if self.password else ''})"

    @property
    def address(self) -> str:
        """The address for messages, without credentials: `redis://127.0.0.1:6379/0`."""
        if self.unix_socket:
            return f"unix://{self.unix_socket}" + (f"?db={self.db}" if self.db else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.ssl else 'redis'}://{host}:{self.port}/{self.db}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address (loopback or a unix socket)."""
        if self.unix_socket or self.host == "localhost" or self.host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def connect(self) -> "redis.Redis":
        """Return a client (bytes in and out, safe to share between threads); it connects with its first call.

        A call whose connection breaks is tried once more at once, so that a restart of the server between two
        calls does not show; such a call may have been done twice. One that fails again, or gets no answer for
        `SOCKET_TIMEOUT_S`, raises redis-py's error. Raises `BrokerError` for another machine's broker without a
        password.
        """
        return self._client(SOCKET_CONNECT_TIMEOUT_S, retries=1)

    def wait_until_reachable(self, stop: threading.Event | None = None, timeout_s: float | None = None) -> bool:
        """Wait until the broker answers.

        Args:
            stop: ends the wait early.
            timeout_s: in place of `connect_timeout_s`; `math.inf` waits for ever.

        Returns whether the broker answered (`False`: `stop` was set).

        Raises:
            BrokerUnreachableError: nobody answered in time.
            BrokerError: it answered that waiting will not help (wrong password, no TLS, not a Redis server).
        """
        stop = stop or threading.Event()
        timeout_s = self.connect_timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        wait_s, last_reason, tries = _FIRST_WAIT_S, "", 0
        while not stop.is_set():
            left_s = timeout_s - (time.monotonic() - start)
            reason = self._try(max(0.1, min(SOCKET_CONNECT_TIMEOUT_S, left_s)))
            tries += 1
            if not reason:
                if last_reason:
                    _logger.info("the broker at %s answers after %.0f s", self.address, time.monotonic() - start)
                return True
            left_s = timeout_s - (time.monotonic() - start)
            if left_s <= 0:
                raise BrokerUnreachableError(
                    f"no broker could be used at {self.address}: {reason} ({tries} tries in {timeout_s:g} s). "
                    f"Check the address ({URL_VARIABLE} or RedisParameters), or start a broker: redis-server, "
                    "valkey-server; runner.train_mp() and srl train without --redis-url bring their own"
                )
            if reason != last_reason:
                duration = "" if math.isinf(timeout_s) else f" for up to {timeout_s:g} s"
                _logger.warning("waiting%s for the broker at %s: %s", duration, self.address, reason)
                last_reason = reason
            stop.wait(min(wait_s, left_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return False

    def to_env(self) -> dict[str, str]:
        """Return environment variables that make `RedisParameters()` in a child process equal to this one.

        `kwargs` must be JSON data; `ConfigError` otherwise.
        """
        options: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _URL_OPTIONS and value != item.default and value != {}:
                options[item.name] = value
        if self.kwargs:
            try:
                options["kwargs"] = json.dumps(self.kwargs)
            except TypeError as error:
                raise ConfigError(f"RedisParameters.kwargs cannot be given to another process: {error}") from error
        if self.unix_socket:
            options["db"] = self.db
            base = f"unix://{urllib.parse.quote(self.unix_socket)}"
        else:
            base = self.address
        if self.username:
            base = base.replace("://", f"://{urllib.parse.quote(self.username, safe='')}@", 1)
        return {
            URL_VARIABLE: f"{base}?{urllib.parse.urlencode(options)}" if options else base,
            PASSWORD_VARIABLE: self.password or "",
        }

    def _read_url(self, url: str, arguments_win: bool) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError:
            # Python's message may repeat a piece of the password.
            raise ConfigError(
                "the broker's url cannot be read: its port is no number, or a password has '/' or '@' that must be "
                "written as %2F or %40"
            ) from None
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ConfigError(f"the broker's url must start with redis://, rediss:// or unix://, not {parts.scheme!r}")
        if parts.fragment:
            raise ConfigError("the broker's url has a '#'; write it as %23 where it belongs to the password")
        options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        found: dict[str, Any] = {name: _from_text(name, text) for name, text in options.items()}
        if parts.username:
            found["username"] = urllib.parse.unquote(parts.username)
        if parts.password:
            found["password"] = urllib.parse.unquote(parts.password)
        if parts.scheme == "unix":
            found["unix_socket"] = urllib.parse.unquote((parts.hostname or "") + parts.path)
            if not parts.path:
                raise ConfigError("the broker's url has no path after unix://")
        else:
            self.host = urllib.parse.unquote(parts.hostname or _DEFAULT_HOST)
            found["ssl"] = parts.scheme == "rediss" or self.ssl
            if port is not None:
                found["port"] = port
            if parts.path.strip("/"):
                found["db"] = _from_text("db", parts.path.strip("/"))
        for item in fields(self):
            if item.name in found:
                mine, theirs = getattr(self, item.name), found[item.name]
                if mine not in (theirs, item.default, {}) and item.name != "ssl":
                    if arguments_win:
                        continue
                    raise ConfigError(f"RedisParameters: {item.name} is given twice, in the url and as an argument")
                setattr(self, item.name, theirs)

    def _check(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 < self.port < 65536:
            raise ConfigError(f"RedisParameters.port must be a number from 1 to 65535, not {self.port!r}")
        if isinstance(self.db, bool) or not isinstance(self.db, int) or self.db < 0:
            raise ConfigError(f"RedisParameters.db must be 0 or a higher number, not {self.db!r}")
        if not self.connect_timeout_s >= 0:
            raise ConfigError(f"RedisParameters.connect_timeout_s must be at least 0, not {self.connect_timeout_s!r}")
        if "://" in self.host:
            raise ConfigError("RedisParameters.host is a url; give it as url=")
        if self.ssl_cert_reqs not in ("required", "optional", "none"):
            raise ConfigError(
                f"RedisParameters.ssl_cert_reqs must be required, optional or none, not {self.ssl_cert_reqs!r}"
            )
        plain = [item.name for item in fields(self) if item.name in _TLS and getattr(self, item.name) != item.default]
        if plain and not self.ssl:
            raise ConfigError(f"RedisParameters: {plain[0]} needs TLS; set ssl=True or write rediss:// in the url")
        if self.ssl and self.unix_socket:
            raise ConfigError("RedisParameters: a unix socket has no TLS; leave ssl out")
        own = {item.name for item in fields(self)} | {"unix_socket_path", "connection_pool", "decode_responses"}
        for name in self.kwargs:
            if name in own:
                raise ConfigError(f"RedisParameters: {name} cannot be in kwargs; use the argument where there is one")

    def _client(self, connect_timeout_s: float, retries: int) -> "redis.Redis":
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        if not (self.is_local or self.password or self.ssl_certfile or self.allow_insecure):
            raise BrokerError(
                f"the broker at {self.address} is used without a password, so that anybody who reaches it can change "
                f"the run; set a password in the server and in {PASSWORD_VARIABLE} (or RedisParameters), or say "
                "allow_insecure=True (in a url ?allow_insecure=true) where the network is yours alone"
            )
        options: dict[str, Any] = {
            "db": self.db,
            "username": self.username,
            "password": self.password,
            "protocol": 2,
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": connect_timeout_s,
            "retry": Retry(NoBackoff(), retries, (redis.ConnectionError,)),
        }
        if self.unix_socket:
            options["unix_socket_path"] = self.unix_socket
        else:
            options |= {"host": self.host, "port": self.port, "socket_keepalive": True, "ssl": self.ssl}
            if self.ssl:
                options |= {name: getattr(self, name) for name in _TLS}
                # A certificate that need not be valid need not name the host either; ssl refuses the pair.
                options["ssl_check_hostname"] = self.ssl_check_hostname and self.ssl_cert_reqs != "none"
        return redis.Redis(**options | self.kwargs)

    def _try(self, timeout_s: float) -> str:
        """Return why the broker cannot be used yet, or "" where it can; raise where waiting will not help."""
        import redis

        client = self._client(timeout_s, retries=0)
        try:
            client.ping()
        except redis.AuthenticationError as error:
            raise BrokerError(self._authentication_message(str(error))) from error
        except redis.BusyLoadingError:
            return "it is still loading its data"
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            self._check_tls(error)
            reason = str(error).rstrip(".") or type(error).__name__
            if self.ssl and "EOF" in reason:  # a server's refusal may be lost with the connection
                reason += f"; {_WANTS_CERTIFICATE}"
            return reason
        except redis.RedisError as error:
            if "without any password" in str(error):
                raise BrokerError(self._authentication_message(str(error))) from error
            raise BrokerError(f"the broker at {self.address} refused to be used: {error}") from error
        finally:
            client.close()
        return ""

    def _authentication_message(self, answer: str) -> str:
        if "without any password" in answer:
            change = f"it has no password, but one was given (RedisParameters or {PASSWORD_VARIABLE})"
        elif self.password is None:
            change = f"it wants a password; set {PASSWORD_VARIABLE} or RedisParameters(password=...)"
        else:
            change = f"wrong username or password; check {PASSWORD_VARIABLE} or RedisParameters"
        return f"the broker at {self.address} refused the log-in: {change}"

    def _check_tls(self, error: BaseException) -> None:
        import ssl

        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise BrokerError(
                    f"the certificate of the broker at {self.address} is not trusted ({cause.verify_message}); give "
                    "its authority's file as ssl_ca_certs, and use a host name that the certificate has"
                ) from error
            if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
                raise BrokerError(
                    f"the server at {self.address} does not speak TLS there; use redis:// or the port that has TLS"
                ) from error
            if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
                raise BrokerError(
                    f"the broker at {self.address} ended the TLS handshake ({cause.reason}); {_WANTS_CERTIFICATE}"
                ) from error
            cause = cause.__cause__ or cause.__context__


def password_in(path: Path) -> str:
    """Return the password that a file has. Raises `ConfigError` where there is none."""
    try:
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the password file {path} cannot be read: {error}") from error
    if not password:
        raise ConfigError(f"the password file {path} is empty")
    return password


def _from_text(name: str, text: str) -> Any:
    """Return the value of an option in a url; the text is not repeated in errors, as it may be a secret."""
    try:
        if name == "kwargs":
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError
            return value
        if name in ("ssl_check_hostname", "allow_insecure"):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if name == "connect_timeout_s":
            return float(text)
        if name == "db":
            return int(text)
    except (ValueError, KeyError):
        raise ConfigError(f"the broker's url has a wrong value for {name}") from None
    if name in ("username", "password") or name in _URL_OPTIONS:
        return text
    known = ", ".join(("db", "username", "password", *_URL_OPTIONS))
    raise ConfigError(f"the broker's url has an unknown option {name!r}; known are {known}")

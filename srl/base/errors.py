"""Errors a user can mend: each message says what is wrong and what to change.

Everything the product refuses on purpose is an `SrlError`; the command line prints its message
without a traceback. Any other exception is a bug in SRL or in the user's own code.
"""


class SrlError(Exception):
    """Base of every error that SRL raises on purpose."""


class ConfigError(SrlError, ValueError):
    """A setting has a wrong type or value, or settings contradict each other."""


class UnknownFieldError(ConfigError, AttributeError):
    """An attribute that the settings do not have; the message names the nearest one."""


class SpaceError(SrlError, ValueError):
    """An algorithm cannot take an env's observation or action space."""


class EnvError(SrlError):
    """An env could not be made, or returned something that cannot be learned from."""


class MissingExtraError(SrlError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class CheckpointError(SrlError):
    """A checkpoint or parameter file is missing, damaged, or belongs to something else."""


class BrokerError(SrlError):
    """The broker refused or broke what was asked."""


class BrokerUnreachableError(BrokerError, ConnectionError):
    """No broker answered at the address."""


class ProtocolError(BrokerError):
    """A message that this version cannot read."""


class WorkerError(SrlError):
    """A trainer or an actor failed; the message carries its traceback."""

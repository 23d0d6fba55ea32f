"""Every error that tpkernels raises on purpose, so that callers can catch by meaning.

All derive from :class:`TPKernelsError`. Messages name the parameter, what was given, what is
allowed and the fix.
"""


class TPKernelsError(RuntimeError):
    """Base of all errors raised by tpkernels."""


class ConfigError(TPKernelsError, ValueError):
    """An argument, size or environment variable that cannot work; raised before communication."""


class UnsupportedModuleError(ConfigError):
    """A module that cannot be split over ranks; the message names it, the reason and the fix."""


class CommunicationError(TPKernelsError):
    """A collective failed or timed out; the message names group, operation and missing ranks."""


class AgreementError(TPKernelsError):
    """Ranks of one group hold or were given different values where they must agree."""


class ShardedSaveError(TPKernelsError):
    """A rank's part of a sharded parameter was about to be saved as if it were the whole."""


class TPKernelsWarning(UserWarning):
    """Something works, but slower or otherwise than asked; shown once."""

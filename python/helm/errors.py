"""The exceptions of HELM. Knows nothing of what raises them.

Every message says the operation, what was observed, what was expected and the remedy. Each class
also derives from the built-in exception that a caller who does not know HELM would catch.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` as any stream in UTF-8 takes it: bytes of a file's name that are not UTF-8 escaped."""
    return text.encode(errors="backslashreplace").decode()


class HelmError(Exception):
    """Base of every error that HELM raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InvalidError(HelmError, ValueError):
    """An argument or a file is malformed."""


class OutOfMemoryError(HelmError, MemoryError):
    """A memory budget, or the machine, does not hold what was asked."""


class CapacityError(HelmError):
    """A sequence or batch exceeds a limit of the plan: context, pages, sequences."""


class CheckpointError(HelmError, OSError):
    """A model file is missing, unreadable or damaged, or a KV file cannot be read or written."""


class CompressionError(HelmError, ValueError):
    """Weights do not compress, see `helm.LLM`'s `weights`."""


class DeviceError(HelmError, RuntimeError):
    """A device cannot be had or has failed."""


class NoDeviceError(DeviceError):
    """There is no such kind of device: no driver for it, or no plugin in this build."""


class ConfigError(InvalidError):
    """config.json or generation_config.json is malformed."""


class UnsupportedModelError(InvalidError):
    """The model needs something that HELM does not implement."""


class TokenizerError(InvalidError):
    """Tokenizer files or a chat template are malformed, or text cannot be converted."""


class PlanError(InvalidError):
    """A plan is malformed, of an unknown version or inconsistent."""


class ProfileError(InvalidError):
    """A machine profile is malformed, of an unknown version or lacks a rate."""

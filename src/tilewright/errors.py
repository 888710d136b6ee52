"""Every error that tilewright raises on purpose.

A message says what was found, what was expected and what to do, with values.
`exit_code` is what the command line ends with: 2 for bad input, 1 for work that failed.
"""

from collections.abc import Iterable


class TilewrightError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class InvalidArgument(TilewrightError, ValueError, RuntimeError):
    """The caller passed something that no implementation could accept. PyTorch raises a
    RuntimeError for most of that."""

    exit_code = 2


class InvalidType(InvalidArgument, TypeError):
    """An argument is of a type that no implementation could accept, missing, unknown, one too many
    or given twice."""


class InvalidDim(InvalidArgument, IndexError):
    """A tensor has no such dim, or too many."""


class PluginError(TilewrightError):
    """A folder of plug-ins is not there, or a plug-in cannot be imported or raised."""

    exit_code = 2


class IndexOutOfRange(InvalidArgument, IndexError):
    """An index tensor names a place that is not there; nothing was written, or read."""


class SharedMemory(InvalidArgument):
    """What is written in place is read through another argument; nothing was written."""


class NoImplementation(TilewrightError):
    """No implementation supports this workload on this device; the message lists each reason."""


class CompileError(TilewrightError):
    """A compiler rejected generated or hand-written source; the message carries its log."""


class CompilerMissing(CompileError):
    """The compiler that an implementation needs is not on this machine."""


class CompileTimeout(CompileError):
    """A compiler did not finish within its time limit and was killed."""


class CacheError(TilewrightError):
    """Compiled code cannot be written to disk."""


class LaunchError(TilewrightError):
    """The driver refused a kernel, or a kernel failed while running."""


class OutOfMemory(LaunchError):
    """The driver found no memory on the GPU for a kernel's code, or a kernel on a CPU none for what
    its threads keep."""


class WorkerDied(LaunchError):
    """The measuring process ended or hung while it ran a candidate."""


class NoErrorRule(TilewrightError):
    """A reference uses an operation of which nobody has said how it carries rounding errors on, so
    that no result of it can be verified."""


class VerificationError(TilewrightError):
    """An implementation computed something other than the reference."""


class InvalidMeasurement(TilewrightError):
    """A time that physics rules out: faster than the hard limit of the device."""


class StoreError(TilewrightError):
    """The record store cannot be read or written."""


class InvalidStore(StoreError, InvalidArgument):
    """What names the record store is no SQLAlchemy URL, or one whose driver is not installed."""


MANY = 20
"""Names beyond which a message with all of them is no longer read."""


def known_names(name: str, names: Iterable[str], command: str = "") -> str:
    """How a message about an unknown name ends: what it may have been meant for, and all there
    are.

    Args:
        command: that lists them; it is named instead where they are MANY.
    """
    import difflib

    names = list(names)
    near = difflib.get_close_matches(name, names, cutoff=0.65)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    if command and len(names) > MANY:
        return f"{guess}`{command}` names them"
    return f"{guess}known: {', '.join(names) or 'none'}"

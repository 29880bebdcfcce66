"""What can go wrong before a result exists; each message names the value, the range, what to do."""

from __future__ import annotations


class TuneError(Exception):
    """Base of everything this package raises on purpose."""


class SettingError(TuneError, ValueError):
    """An environment variable or option holds a value outside its range."""


class SpaceError(TuneError, ValueError):
    """A space, scope or parameter that does not exist or cannot be built for this hardware."""


class RulesError(TuneError):
    """A rule file that cannot be used as it stands; names file and line."""


class SaveRefused(TuneError):
    """A result that must not become a rule: reduced sweep, incomplete sweep, no valid candidate."""


class LaunchError(TuneError):
    """The ranks could not be started, or were lost outside of any candidate's slot."""


class NoWinner(TuneError):
    """Every candidate failed; the report holds the cause of each."""


class Refused(TuneError):
    """Raised by `Session.make` for a candidate it declines; nothing was touched and the ranks go on."""


class WrongOutput(TuneError):
    """Raised by `Trial.check` when the output differs from the reference."""

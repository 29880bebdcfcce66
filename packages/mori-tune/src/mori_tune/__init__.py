"""Tuning that can be trusted to pick a winner, and rules that are really used.

For users: `mori-tune run`, `verify`, `show`, `explain`, `diff`. For ops: implement `Tunable` (tunable.py),
name it under the entry point group `mori_tune.tunables`, and call `lookup` where the geometry is chosen.
"""

from mori_tune.device import Device, host_device, torch_device
from mori_tune.errors import (
    LaunchError,
    NoWinner,
    Refused,
    RulesError,
    SaveRefused,
    SettingError,
    SpaceError,
    TuneError,
    WrongOutput,
)
from mori_tune.rules import (
    EP_COMBINE,
    EP_DISPATCH,
    GEMM_AR,
    Book,
    Decision,
    Format,
    Query,
    agree,
    agreed_book,
    book_for,
    lookup,
)
from mori_tune.spaces import Candidate, Constraint, Hardware, Parameter, Space, hardware_of, split_workers
from mori_tune.spaces.ep import ep_space
from mori_tune.spaces.gemm_ar import GemmArShape, gemm_ar_space
from mori_tune.tunable import ChecksOptions, ChecksRules, Place, Problem, SavedAs, Session, Trial, Tunable

__version__ = "0.1.0"

__all__ = [
    "EP_COMBINE",
    "EP_DISPATCH",
    "GEMM_AR",
    "Book",
    "Candidate",
    "ChecksOptions",
    "ChecksRules",
    "Constraint",
    "Decision",
    "Device",
    "Format",
    "GemmArShape",
    "Hardware",
    "LaunchError",
    "NoWinner",
    "Parameter",
    "Place",
    "Problem",
    "Query",
    "Refused",
    "RulesError",
    "SaveRefused",
    "SavedAs",
    "Session",
    "SettingError",
    "Space",
    "SpaceError",
    "Trial",
    "Tunable",
    "TuneError",
    "WrongOutput",
    "agree",
    "agreed_book",
    "book_for",
    "ep_space",
    "gemm_ar_space",
    "hardware_of",
    "host_device",
    "lookup",
    "split_workers",
    "torch_device",
]

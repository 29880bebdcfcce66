"""Spaces as data: named parameters with their candidates, and the constraints that make them valid."""

from mori_tune.spaces.hardware import Hardware, hardware_of, split_workers
from mori_tune.spaces.space import Candidate, Constraint, Parameter, Space, Value

__all__ = [
    "Candidate",
    "Constraint",
    "Hardware",
    "Parameter",
    "Space",
    "Value",
    "hardware_of",
    "split_workers",
]

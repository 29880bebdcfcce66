"""Slots: where candidates are tried. The ranks' processes, here or elsewhere, and their time limits."""

from mori_tune.slots.crew import Crew, CrewFailure
from mori_tune.slots.stations import AgentStation, LocalStation, Station, StationPlan

__all__ = ["AgentStation", "Crew", "CrewFailure", "LocalStation", "Station", "StationPlan"]

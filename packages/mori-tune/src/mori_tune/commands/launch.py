"""A crew for this run: ranks on this machine, under torchrun, or on several hosts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from mori_tune.commands.options import plain_values
from mori_tune.device import Device
from mori_tune.errors import LaunchError
from mori_tune.slots import Crew, CrewFailure, LocalStation, Station, StationPlan
from mori_tune.slots.children import Events
from mori_tune.slots.hosts import HERE, Host, environ_to_pass, stations_on
from mori_tune.slots.torchrun import gather_agents, is_under_torchrun
from mori_tune.tunable import ChecksOptions, Tunable

DEFAULT_WORLD_SIZE = 2
BACKENDS = ("host", "cuda", "rocm")  # that ranks may find, unless one is named


def show(command: str) -> None:
    print(f"+ {command}", file=sys.stderr, flush=True)


def world_size_of(options: argparse.Namespace) -> int:
    """From torchrun, the hosts, or the option; two of them that differ are an error."""
    asked = options.world_size
    if is_under_torchrun(os.environ):
        found, source = int(os.environ["WORLD_SIZE"]), "torchrun's WORLD_SIZE"
    elif getattr(options, "hosts", None):
        found = len(options.hosts.split(",")) * ranks_per_host(options)
        source = "--hosts and --ranks-per-host"
    else:
        return asked or DEFAULT_WORLD_SIZE
    if asked not in (None, found):
        raise LaunchError(f"--world-size {asked}, but {source} make {found}")
    return found


def prepare(tunable: Tunable, options: argparse.Namespace) -> None:
    """Before any rank is started: refuse what cannot be. From here on the options say how many ranks there
    are."""
    refuse_idle_options(options)
    options.world_size = world_size_of(options)
    refuse_impossible(tunable, options, BACKENDS if options.backend == "auto" else (options.backend,))


def refuse_impossible(tunable: Tunable, options: argparse.Namespace, backends: Sequence[str]) -> None:
    """SpaceError for problems that are impossible on all of these backends."""
    if isinstance(tunable, ChecksOptions):
        tunable.check_options(options, backends)


def ranks_per_host(options: argparse.Namespace) -> int:
    return int(options.ranks_per_host or 8)


def refuse_idle_options(options: argparse.Namespace) -> None:
    """An option that would have no effect is a misunderstanding."""
    names = ("ranks_per_host", "master_addr", "container", "local_container", "python", "workdir", "env")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    if given and not options.hosts:
        raise LaunchError(f"{', '.join(given)}: of no effect without --hosts")
    if options.hosts and is_under_torchrun(os.environ):
        raise LaunchError(
            "--hosts under torchrun: torchrun has started the ranks already; leave --hosts away"
        )
    here = [name in HERE for name in (options.hosts or "").split(",")]
    if options.container and all(here):
        raise LaunchError(
            "--container: of no effect, since --hosts names no other machine; --local-container?"
        )
    if options.local_container and not any(here):
        raise LaunchError(
            "--local-container: of no effect, since --hosts does not name this machine (localhost)"
        )


def hosts_of(options: argparse.Namespace, environ: Mapping[str, str]) -> list[Host]:
    names = options.hosts.split(",")
    if len(set(names)) != len(names) or not all(name and not name.startswith("-") for name in names):
        raise LaunchError(f"--hosts {options.hosts}: wanted the names of hosts, once each")
    found = []
    for name in names:
        here = name in HERE
        container = options.local_container if here else options.container
        python = sys.executable if here and container is None else options.python or "python3"
        found.append(
            Host(name, container, python, None if here and container is None else options.workdir, environ)
        )
    return found


def stations_for(options: argparse.Namespace, events: Events) -> tuple[list[Station], str, dict[str, str]]:
    world_size = world_size_of(options)
    plan = StationPlan(
        options.op,
        tuple(range(world_size)),
        world_size,
        options.backend,
        options.seed,
        plain_values(options),
        show_output=options.show_output,
    )
    if options.hosts:
        environ = environ_to_pass(os.environ, options.env)
        hosts = hosts_of(options, environ)
        address = options.master_addr or (
            os.uname().nodename if hosts[0].is_here else hosts[0].name.split("@")[-1]
        )
        return stations_on(hosts, ranks_per_host(options), plan, events, show), address, environ
    if is_under_torchrun(os.environ):
        return gather_agents(plan, events, os.environ), os.environ["MASTER_ADDR"], {}
    return [LocalStation(plan, events)], "127.0.0.1", {}


@contextmanager
def crew_for(options: argparse.Namespace) -> Iterator[Crew]:
    """The ranks of this run, not yet started; ended when the block is left, however that happens."""
    events: Events = SimpleQueue()
    stations, address, environ = stations_for(options, events)
    crew = Crew(stations, events, master_addr=address, environ=environ)
    try:
        yield crew
    finally:
        crew.close()


def describe(crew: Crew) -> tuple[Device, dict[str, str]]:
    """The device and versions that all ranks report; ranks that differ are named."""
    crew.start()
    try:
        answers = crew.ask({"do": "describe"}, crew.start_limit_s)
    except CrewFailure as failure:
        raise LaunchError(f"the ranks cannot start: {failure}\n{failure.tail}".rstrip()) from failure
    for field in ("device", "versions"):
        differing = [rank for rank, answer in enumerate(answers) if answer[field] != answers[0][field]]
        if differing:
            rank = differing[0]
            mine, theirs = answers[0][field], answers[rank][field]
            raise LaunchError(f"ranks differ in their {field}: rank 0 has {mine}, rank {rank} has {theirs}")
    return Device.from_dict(answers[0]["device"]), dict(answers[0]["versions"])

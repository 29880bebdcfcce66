"""Ranks on several hosts: the commands that start an agent on each, and nothing that anybody else started.

    host a (here)        LocalStation, or an agent in a container:  docker exec -i ... python -m ...
    host b               ssh b  env NAME=VALUE ... python -m mori_tune.slots.agent
    host b, container    ssh b  docker exec -i -e NAME=VALUE ... CONTAINER python -m ...

Every command is shown before it runs. The environment travels in the command, since neither ssh nor docker
passes the caller's on. An agent ends its own ranks when its input closes, so cleaning up is closing a pipe:
no process is ever looked for by name. Whether docker needs sudo is tried out, never assumed.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mori_tune.errors import LaunchError
from mori_tune.slots.children import Events
from mori_tune.slots.stations import AgentStation, LocalStation, Station, StationPlan

PASSED_ON = ("MORI_", "NCCL_", "GLOO_")  # by prefix, besides what --env names
HERE = ("localhost", "local", "127.0.0.1")
PROBE_LIMIT_S = 30.0
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")


@dataclass(frozen=True)
class Host:
    """One machine of a run, as the command line describes it."""

    name: str
    container: str | None = None
    python: str = "python3"
    workdir: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_here(self) -> bool:
        return self.name in HERE


def environ_to_pass(environ: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """What the ranks of other hosts get: variables by prefix, and `NAME` or `NAME=VALUE` given outright."""
    passed = {name: value for name, value in environ.items() if name.startswith(PASSED_ON)}
    for entry in named:
        name, equals, value = entry.partition("=")
        if not name.isidentifier():
            raise LaunchError(f"--env {entry!r}: wanted NAME or NAME=VALUE")
        if not equals and name not in environ:
            raise LaunchError(f"--env {name}: not set here; give it as {name}=VALUE")
        passed[name] = value if equals else environ[name]
    return passed


def agent_command(host: Host, docker: Sequence[str] = ("docker",)) -> list[str]:
    """What starts the agent on this host, as one argument vector of this machine."""
    python = [host.python, "-m", "mori_tune.slots.agent"]
    settings = [f"{name}={value}" for name, value in sorted(host.environ.items())]
    if host.container is not None:
        flags = [flag for setting in settings for flag in ("-e", setting)]
        where = ["-w", host.workdir] if host.workdir else []
        command = [*docker, "exec", "-i", *flags, *where, host.container, *python]
    else:
        command = ["env", *settings, *python] if settings else python
    if host.is_here:
        return command
    remote = shlex.join(command)
    if host.workdir and host.container is None:
        remote = f"cd {shlex.quote(host.workdir)} && exec {remote}"
    return [*SSH, host.name, remote]


def probe_command(host: Host, docker: Sequence[str]) -> list[str]:
    assert host.container is not None
    command = [*docker, "exec", host.container, "true"]
    return command if host.is_here else [*SSH, host.name, shlex.join(command)]


def docker_for(host: Host, show: Callable[[str], None]) -> tuple[str, ...]:
    """`docker`, or `sudo -n docker` where only that works; never a question for a password."""
    said = []
    for docker in (("docker",), ("sudo", "-n", "docker")):
        command = probe_command(host, docker)
        show(shlex.join(command))
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said.append(f"{shlex.join(docker)}: {error}")
            continue
        if done.returncode == 0:
            return docker
        said.append(f"{shlex.join(docker)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    raise LaunchError(f"container {host.container} on {host.name} cannot be entered: {'; '.join(said)}")


def start_agent(
    host: Host, plan: StationPlan, events: Events, show: Callable[[str], None], index: int = 0
) -> AgentStation:
    docker = ("docker",) if host.container is None else docker_for(host, show)
    command = agent_command(host, docker)
    show(shlex.join(command))
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    name = host.name + (f" container {host.container}" if host.container else "")
    return AgentStation(
        plan, events, process.stdout, process.stdin, name=f"the agent on {name}", index=index, process=process
    )


def stations_on(
    hosts: Sequence[Host],
    ranks_per_host: int,
    plan: StationPlan,
    events: Events,
    show: Callable[[str], None],
) -> list[Station]:
    """A station on each host, ranks in the order of the hosts; on failure those started are closed."""
    stations: list[Station] = []
    try:
        for index, host in enumerate(hosts):
            first = index * ranks_per_host
            ranks = tuple(range(first, first + ranks_per_host))
            own = StationPlan(**{**plan.__dict__, "ranks": ranks, "world_size": ranks_per_host * len(hosts)})
            if host.is_here and host.container is None:
                stations.append(LocalStation(own, events))
            else:
                stations.append(start_agent(host, own, events, show, index))
    except BaseException:
        for station in stations:
            station.close()
        raise
    return stations

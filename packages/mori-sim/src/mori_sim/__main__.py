"""The `mori-sim` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mori_sim.settings import VARIABLES


def settings_help() -> str:
    shown = [(v, f"{v.allowed}; default {v.default or 'none'}") for v in VARIABLES]
    rows = [f"  {v.name:28s} {v.meaning} ({allowed})" for v, allowed in shown]
    return "environment variables that the node reads:\n" + "\n".join(rows)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="mori-sim",
        description="A software MI355X node.",
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a program on the simulated node")
    run.add_argument("--devices", type=int, choices=range(1, 9), default=1, metavar="1..8")
    run.add_argument("--coherence", choices=["off", "strict"], default="off")
    run.add_argument("--schedule", choices=["rr", "random", "delay-rank"], default="rr")
    run.add_argument(
        "--delay-rank", type=int, default=0, metavar="RANK", help="the rank that delay-rank holds back"
    )
    run.add_argument("--seed", type=int, default=0)
    run.add_argument(
        "--report", type=Path, metavar="FILE", help="keep the JSON lines that the processes write"
    )
    run.add_argument("--counters", action="store_true", help="print what each kernel did at the end")
    run.add_argument(
        "--save-code", type=Path, metavar="DIR", help="keep a copy of every code object that is loaded"
    )
    run.add_argument(
        "--host-memory",
        choices=["lend", "refuse"],
        default="lend",
        help="refuse: a kernel that touches ordinary process memory faults",
    )
    run.add_argument(
        "--torch-cuda", action="store_true", help='let "cuda" of a CPU torch be the simulated node'
    )
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="-- CMD ...")
    info = commands.add_parser(
        "info", help="registers, LDS, spills, arguments and instruction mix of a code object"
    )
    info.add_argument("file", type=Path, nargs="?")
    info.add_argument("--json", action="store_true")
    info.add_argument(
        "--unknowns", action="store_true", help="list what is assumed where the hardware is not documented"
    )
    disasm = commands.add_parser("disasm", help="the instructions of a code object")
    disasm.add_argument("file", type=Path)
    disasm.add_argument("--kernel", metavar="NAME")
    show = commands.add_parser("report", help="tell again what a report file of `run --report` holds")
    show.add_argument("file", type=Path)
    bench = commands.add_parser(
        "bench", help="wave instructions a second, and a GEMM workgroup, with and without strict mode"
    )
    bench.add_argument("--json", action="store_true")
    return top


def run_command(arguments: argparse.Namespace) -> int:
    from mori_sim.run import run

    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command:
        print("mori-sim run: a command is needed: mori-sim run -- python program.py", file=sys.stderr)
        return 2
    settings = {
        "MORI_SIM_DEVICES": str(arguments.devices),
        "MORI_SIM_COHERENCE": arguments.coherence,
        "MORI_SIM_SCHEDULE": arguments.schedule,
        "MORI_SIM_DELAY_RANK": str(arguments.delay_rank),
        "MORI_SIM_SEED": str(arguments.seed),
        "MORI_SIM_HOST_MEMORY": arguments.host_memory,
    }
    if arguments.torch_cuda:
        settings["MORI_SIM_TORCH_CUDA"] = "1"
    if arguments.save_code is not None:
        arguments.save_code.mkdir(parents=True, exist_ok=True)
        settings["MORI_SIM_SAVE_CODE"] = str(arguments.save_code.resolve())
    return run(command, settings, arguments.report, show_counters=arguments.counters)


def info_command(arguments: argparse.Namespace) -> int:
    from mori_sim import _core, inspect_code

    if arguments.unknowns:
        print("\n".join(_core.unknown_behaviours()))
    if arguments.file is not None:
        print(inspect_code.info(arguments.file, as_json=arguments.json))
    return 0


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        if arguments.command == "run":
            return run_command(arguments)
        if arguments.command == "info":
            return info_command(arguments)
        if arguments.command == "disasm":
            from mori_sim.inspect_code import disassembly

            print(disassembly(arguments.file, arguments.kernel))
        if arguments.command == "report":
            from mori_sim import report

            found = report.read(arguments.file)
            print("\n\n".join(part for part in (report.findings(found), report.cost_sheet(found)) if part))
            return 0 if found.clean else 3
        if arguments.command == "bench":
            from mori_sim.bench import main as bench

            return bench(as_json=arguments.json)
    except (ValueError, OSError) as error:
        print(f"mori-sim: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

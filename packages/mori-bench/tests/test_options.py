"""The options that every bench has."""

from __future__ import annotations

import argparse

import pytest
from mori_bench import add_common_options, launched, seed_for, world_size_of

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bench")
    add_common_options(parser, reps=7)
    return parser


def test_defaults(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args([])
    assert vars(args) == {
        "backend": "auto",
        "world_size": None,
        "reps": 7,
        "warmup": 2,
        "seed": 0,
        "json": None,
        "trace": None,
        "fault": None,
    }


def test_all_of_them_can_be_given(parser: argparse.ArgumentParser) -> None:
    text = "--backend host --world-size 3 --reps 1 --warmup 0 --seed 9 --json j --trace t --break one_nan"
    args = parser.parse_args(text.split())
    assert (args.backend, args.world_size, args.reps, args.warmup, args.seed) == ("host", 3, 1, 0, 9)
    assert (args.json, args.trace, args.fault) == ("j", "t", "one_nan")


@pytest.mark.parametrize(
    "text", ["--backend gpu", "--world-size 0", "--reps x", "--reps 0", "--warmup -1", "--break nothing"]
)
def test_bad_values_are_refused(
    parser: argparse.ArgumentParser, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(text.split())
    assert text.split()[0] in capsys.readouterr().err


def test_the_test_hook_is_not_in_the_help(parser: argparse.ArgumentParser) -> None:
    assert "--break" not in parser.format_help()
    assert "--json FILE" in parser.format_help()


def test_world_size_is_the_launchers_else_the_option_else_the_default(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world_size_of(parser.parse_args([]), default=8) == 8
    assert world_size_of(parser.parse_args(["--world-size", "3"]), default=8) == 3
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert world_size_of(parser.parse_args([]), default=8) == 4
    with pytest.raises(ValueError, match="--world-size 3, but the launcher started 4"):
        world_size_of(parser.parse_args(["--world-size", "3"]), default=8)


def test_launched_reads_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched() is None
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(ValueError, match="WORLD_SIZE=None"):
        launched()
    monkeypatch.setenv("WORLD_SIZE", "8")
    place = launched()
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank) == (5, 8, 5)
    monkeypatch.setenv("LOCAL_RANK", "1")
    place = launched()
    assert place is not None
    assert place.local_rank == 1
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(ValueError, match="RANK=5 is not below WORLD_SIZE=5"):
        launched()


def test_seeds_depend_on_seed_and_purpose_only() -> None:
    assert seed_for(0, "a", 1) == seed_for(0, "a", 1) == 3805457466603685491
    assert len({seed_for(0, "a", 1), seed_for(1, "a", 1), seed_for(0, "b", 1), seed_for(0, "a", 2)}) == 4
    assert 0 <= seed_for(7, "x") < 2**63

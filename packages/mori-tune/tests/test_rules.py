"""Rules: which one a call gets, what is said about it, and which files are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mori_tune import EP_COMBINE, EP_DISPATCH, Query, RulesError, agree
from mori_tune.device import Device
from mori_tune.rules import book as book_module
from mori_tune.rules.book import Book, Decision, agreed_book, say
from mori_tune.rules.files import read_tables
from mori_tune.settings import Settings

DEVICE = Device("rocm", "gfx942", "mi300x", 304)
FORMATS = {(f.op, f.phase): f for f in (EP_DISPATCH, EP_COMBINE)}
HEADER = {"kernel_type": "IntraNode", "ep_size": 8}
TABLE = {"version": "2.0", "op": "ep", "gpu_arch": "gfx942", "gpu_model": "mi300x", **HEADER}
GEOMETRY = {"block_num": 64, "rdma_block_num": 0, "warp_per_block": 8}


def rule(**fields: Any) -> dict[str, Any]:
    values = {"dtype": "fp8", "hidden_dim": 6144, "topk": 8, "num_tokens": 128, **GEOMETRY, **fields}
    return {name: value for name, value in values.items() if value is not None}


def write(path: Path, *rules: dict[str, Any], **header: Any) -> Path:
    body = ",\n".join("    " + json.dumps(r) for r in rules)
    head = json.dumps({**TABLE, "phase": "dispatch", **header})[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n  "rules": [\n{body}\n]}}\n')
    return path


def query(**fields: Any) -> Query:
    key = {"dtype": "fp8", "hidden_dim": 6144, "topk": 8, "num_tokens": 128}
    header = {name: fields.pop(name, value) for name, value in HEADER.items()}
    device = fields.pop("device", DEVICE)
    return Query(EP_DISPATCH, device, header, {**key, **fields})


@pytest.fixture
def book(tmp_path: Path) -> Callable[..., Book]:
    """A book over the user's folder of this test, with these environment variables."""

    def make(package: str | None = None, **environ: str) -> Book:
        using = Settings({"MORI_TUNE_DIR": str(tmp_path / "user"), **environ})
        return Book("ep", (EP_DISPATCH, EP_COMBINE), package, using)

    return make


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return tmp_path / "user"


def test_TU_6_the_same_key_is_a_match(book: Callable[..., Book], user: Path) -> None:
    file = write(user / "any-name.json", rule(num_tokens=64), rule())
    decision = book().decide(query())
    assert decision.is_match
    assert decision.params == GEOMETRY
    assert f"MATCH block_num=64 rdma_block_num=0 warp_per_block=8 from {file}:4" in decision.line


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "bf16"}, "dtype asked bf16, rule has fp8"),
        ({"hidden_dim": 7168}, "hidden_dim asked 7168, rule has 6144"),
        ({"num_tokens": 64}, "num_tokens asked 64, rule has 128"),
        ({"topk": 6}, "topk asked 6, rule has 8"),
        ({"ep_size": 4}, "ep_size asked 4, rule has 8"),
        ({"kernel_type": "AsyncLL"}, "kernel_type asked AsyncLL, rule has IntraNode"),
        ({"device": replace(DEVICE, model="mi308x")}, "gpu_model asked mi308x, rule has mi300x"),
        ({"device": replace(DEVICE, arch="gfx950")}, "gpu_arch asked gfx950, rule has gfx942"),
    ],
)
def test_TU_6_any_other_key_field_is_no_match_and_the_default(
    book: Callable[..., Book], user: Path, changed: dict[str, Any], said: str
) -> None:
    file = write(user / "a.json", rule())
    decision = book(MORI_TUNE_LOOKUP="exact").decide(query(**changed))
    assert decision.outcome == "NO MATCH"
    assert decision.params is None
    assert said in decision.line
    assert f"{file}:3" in decision.line
    assert "built-in default" in decision.line
    assert not book().decide(query(**changed)).is_match, "a near rule is never called a match"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"num_tokens": 100}, 1),  # the smallest at or above
        ({"num_tokens": 129}, 3),
        ({"num_tokens": 5000}, 3),  # else the largest
        ({"num_tokens": 32, "hidden_dim": 7168}, 2),  # hidden is kept before topk is
        ({"hidden_dim": 5120, "topk": 6}, 4),  # topk alone
        ({"hidden_dim": 5120, "topk": 3, "num_tokens": 60}, 0),  # anything
        ({"hidden_dim": 7168, "topk": None, "num_tokens": 1}, 2),
    ],
)
def test_lookup_passes_in_their_order(
    book: Callable[..., Book], user: Path, asked: dict[str, Any], expected: int
) -> None:
    rules = [
        rule(num_tokens=64, block_num=100),
        rule(num_tokens=128, block_num=101),
        rule(num_tokens=64, hidden_dim=7168, block_num=102),
        rule(num_tokens=512, block_num=103),
        rule(num_tokens=2048, hidden_dim=4096, topk=6, block_num=104),
    ]
    write(user / "a.json", *rules)
    decision = book().decide(query(**asked))
    assert decision.used == "nearest" or decision.is_match
    assert decision.params is not None
    assert decision.params["block_num"] == 100 + expected


def test_a_rule_without_topk_serves_any_and_yields_to_one_with_it(
    book: Callable[..., Book], user: Path
) -> None:
    write(user / "a.json", rule(topk=None, block_num=1), rule(topk=8, block_num=2))
    assert book().decide(query(topk=8)).params == {**GEOMETRY, "block_num": 2}
    other = book().decide(query(topk=6))
    assert other.is_match
    assert other.params == {**GEOMETRY, "block_num": 1}


def test_another_model_stands_in_only_when_asked_by_name(book: Callable[..., Book], user: Path) -> None:
    write(user / "a.json", rule(), gpu_model="mi308x")
    assert book().decide(query()).params is None
    decision = book(MORI_TUNE_LOOKUP="any-model").decide(query())
    assert decision.outcome == "NO MATCH"
    assert decision.params == GEOMETRY
    assert "gpu_model asked mi300x, rule has mi308x" in decision.line
    other_arch = replace(DEVICE, arch="gfx950", model="mi355x")
    assert book(MORI_TUNE_LOOKUP="any-model").decide(query(device=other_arch)).params is None


def test_F3_each_phase_is_looked_up_with_its_own_dtype(book: Callable[..., Book], user: Path) -> None:
    write(user / "d.json", rule())
    write(user / "c.json", rule(dtype="bf16", zero_copy=False, quant_type="none"), phase="combine")
    key = {"dtype": "bf16", "zero_copy": False, "quant_type": "none", "hidden_dim": 6144, "topk": 8}
    combine = Query(EP_COMBINE, DEVICE, HEADER, {**key, "num_tokens": 128})
    assert book().decide(query(dtype="fp8")).is_match
    assert book().decide(combine).is_match
    assert not book().decide(query(dtype="bf16")).is_match
    with pytest.raises(RulesError, match="zero_copy"):
        Query(EP_COMBINE, DEVICE, HEADER, {"dtype": "bf16", "hidden_dim": 1, "num_tokens": 1})


def test_places_are_searched_in_order_and_an_explicit_one_alone(
    book: Callable[..., Book], user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "my_op"
    write(package / "tuned" / "shipped.json", rule(block_num=3), rule(num_tokens=9, block_num=4))
    (package / "__init__.py").write_text("raise RuntimeError('never imported by a lookup')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    write(user / "mine.json", rule(block_num=2))
    explicit = write(tmp_path / "one.json", rule(block_num=1))
    assert book("my_op").decide(query()).params["block_num"] == 2
    assert book("my_op").decide(query(num_tokens=9)).params["block_num"] == 4, "an exact rule wins anywhere"
    only = book("my_op", MORI_EP_TUNING_CONFIG=str(explicit))
    assert only.decide(query()).params["block_num"] == 1
    assert only.decide(query(num_tokens=9), "exact").params is None, "nothing else is looked at"


def test_manual_mode_ignores_rules_and_says_by_what(book: Callable[..., Book], user: Path) -> None:
    write(user / "a.json", rule())
    decision = book(MORI_EP_LAUNCH_CONFIG_MODE="MANUAL").decide(query())
    assert (decision.outcome, decision.params) == ("MANUAL", None)
    assert "MORI_EP_LAUNCH_CONFIG_MODE=MANUAL" in decision.line


def test_F2_no_decision_is_silent_and_none_is_said_twice(
    book: Callable[..., Book],
    user: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(book_module, "_said", set())
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    file = write(user / "a.json", rule())
    hit, miss = book().decide(query()), book().decide(query(dtype="bf16"))
    for _ in range(3):
        say(hit, "line")
        say(miss, "line")
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [r.getMessage() for r in warnings] == [miss.line]
    assert capsys.readouterr().err.splitlines().count(f"mori-tune: {hit.line}") == 1
    assert str(file) in hit.line
    monkeypatch.setattr(book_module, "_said", set())
    say(hit, "full")
    assert "policy nearest" in capsys.readouterr().err
    monkeypatch.setattr(book_module, "_said", set())
    monkeypatch.setenv("LOCAL_RANK", "3")
    say(miss, "line")
    assert len(caplog.records) == len(warnings), "one rank of a machine speaks"


def test_no_rules_at_all_names_the_places(book: Callable[..., Book], user: Path) -> None:
    line = book("no_such_package").decide(query()).line
    assert str(user) in line
    assert "no rules for this phase" in line


def test_published_rules_say_that_they_are(book: Callable[..., Book], user: Path) -> None:
    write(user / "a.json", rule(provenance={"origin": "published", "source": "a table"}))
    assert "starting point from published numbers" in book().decide(query()).line


def test_TU_6_the_last_format_version_still_loads(book: Callable[..., Book], user: Path) -> None:
    old = {"version": "1.0", "gpu_arch": "gfx942", "gpu_model": "mi300x", **HEADER, "phase": "dispatch"}
    user.mkdir()
    old_rule = rule(avg_latency_us=40.7, topk=None)
    (user / "old.json").write_text(json.dumps({**old, "rules": [old_rule]}))
    decision = book().decide(query())
    assert decision.is_match
    assert decision.params == GEOMETRY


def test_an_unknown_version_gives_no_rules_and_a_warning(
    book: Callable[..., Book], user: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(user / "a.json", rule(), version="9.7")
    assert book().decide(query()).params is None
    assert "9.7" in caplog.text


def test_TU_6_two_rules_for_one_key_name_file_and_lines(
    book: Callable[..., Book], user: Path, tmp_path: Path
) -> None:
    file = write(user / "a.json", rule(), rule(num_tokens=4), rule(block_num=9))
    with pytest.raises(RulesError) as caught:
        book()
    assert f"{file}:3" in str(caught.value)
    assert f"{file}:5" in str(caught.value)
    write(file, rule())
    other = write(user / "b.json", rule())
    with pytest.raises(RulesError) as caught:
        book()
    assert f"{file}:3" in str(caught.value)
    assert f"{other}:3" in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"block_num": "many", "warp_per_block": -1}, "warp_per_block is -1"),
        ({"num_tokens": "128"}, "num_tokens is '128'"),
        ({"block_num": None}, "lacks block_num"),
        ({"dtype": ["fp8"]}, "dtype is ['fp8']"),
        ({"block_num": True}, "block_num is True"),
        ({"warp_per_block": 2.5}, "warp_per_block is 2.5"),
    ],
)
def test_a_bad_rule_is_left_out_with_a_warning(
    user: Path, caplog: pytest.LogCaptureFixture, bad: dict[str, Any], said: str
) -> None:
    file = write(user / "a.json", rule(**bad), rule(num_tokens=4))
    (table,) = read_tables(file, FORMATS)
    assert [r.values["num_tokens"] for r in table.rules] == [4]
    assert said in caplog.text
    assert f"{file}:3" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"version": "2.0",\n"rules": [}', ":2: not valid JSON"),
        ("[]", ":1: a rule file is an object"),
        ('{"version": "2.0", "phase": "dispatch", "rules": []}', "lacks gpu_arch"),
        ('{"version": "2.0", "rules": 3}', '"rules" must be a list'),
        ('{"version": "2.0", "tables": {}}', '"tables" must be a list'),
        ('{"version": "2.0", "version": "2.0"}', "'version' stands twice"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not a rule file"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(RulesError) as caught:
        read_tables(file, FORMATS)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_lines_are_those_of_the_file_however_it_is_laid_out(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    nested = {"rules": [{"not": "a rule"}], "text": '{"rules": [{'}
    document = {**TABLE, "phase": "dispatch", "rules": [rule(provenance=nested), rule(num_tokens=4)]}
    file.write_text(json.dumps(document, indent=2))
    (table,) = read_tables(file, FORMATS)
    lines = file.read_text().splitlines()
    assert [lines[r.line - 1].strip() for r in table.rules] == ["{", "{"]
    assert [r.line for r in table.rules] == sorted({r.line for r in table.rules})
    assert '"num_tokens": 4' in "".join(lines[table.rules[1].line - 1 : table.rules[1].line + 6])


def test_TU_2_ranks_that_see_different_rules_use_one(
    book: Callable[..., Book], user: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 has nothing, ranks 1 and 2 have different rules: all take rank 1's, and it is said."""
    empty = book().decide(query())
    write(user / "a.json", rule())
    first = book().decide(query())
    write(user / "a.json", rule(block_num=7))
    second = book().decide(query())
    decisions = [empty, first, second]
    gathered = [(d.outcome, d.used, d.params, d.line) for d in decisions]
    agreed: list[Decision] = [agree(d, lambda mine: gathered) for d in decisions]
    assert [a.params for a in agreed] == [GEOMETRY] * 3
    assert "rank 1" in caplog.text
    assert agree(first, lambda mine: [mine, mine]) is first


def test_TU_2_a_book_that_knows_the_device_goes_before_lower_ranks_that_do_not(
    book: Callable[..., Book], user: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 sees rules for another architecture alone, rank 1 was told to ignore its rules, rank 2 has some:
    all use rank 2's, and it is said."""
    write(user / "a.json", rule(), gpu_arch="gfx950")
    elsewhere = book()
    write(user / "a.json", rule())
    by_hand, knows = book(MORI_EP_LAUNCH_CONFIG_MODE="MANUAL"), book()
    books = [elsewhere, by_hand, knows]
    for mine in books:
        answers = iter([[b.content() for b in books], [b.without_memory() for b in books]])
        agreed = agreed_book(mine, DEVICE, lambda _, answers=answers: next(answers))  # type: ignore[misc]
        assert agreed.decide(query()).params == GEOMETRY
    assert "ranks [0, 1] see other rules than rank 2, whose are used" in caplog.text
    assert agreed_book(knows, DEVICE, lambda mine: [mine, mine]) is knows


def test_lookups_are_cheap_when_repeated(book: Callable[..., Book], user: Path) -> None:
    write(user / "a.json", rule())
    one = book()
    asked = query()
    assert one.decide(asked) is one.decide(query())


def test_a_run_over_many_sizes_says_each_rule_and_reason_once(
    book: Callable[..., Book], user: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server meets every batch size: two rules and a default are three lines, not four thousand."""
    monkeypatch.setattr(book_module, "_said", set())
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    write(user / "a.json", rule(num_tokens=128), rule(num_tokens=512))
    near, exact = book(), book(MORI_TUNE_LOOKUP="exact")
    for num_tokens in [n for n in range(1, 4096, 7) if n not in (128, 512)]:
        say(near.decide(query(num_tokens=num_tokens)), "line")
        say(exact.decide(query(num_tokens=num_tokens)), "line")
    assert len(caplog.records) == 3


def test_file_names_cannot_lead_out_of_the_folder() -> None:
    name = EP_DISPATCH.file_name(DEVICE, {"kernel_type": "../../etc/x y", "ep_size": 8})
    assert "/" not in name
    assert " " not in name

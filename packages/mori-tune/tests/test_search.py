"""The search on recorded timings: who wins, by which number, and what is said about it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from mori_tune import NoWinner, TuneError
from mori_tune.search import Failure, Search, Times
from mori_tune.search.samples import gather_times

TimesOf = Callable[..., Times]
SearchWith = Callable[..., Search]


def test_TU_1_a_small_gain_wins_where_bandwidths_are_small(
    times_of: TimesOf, search_with: SearchWith
) -> None:
    """3.9, 4.6 and 4.2 GB/s: an absolute margin of 1 GB/s would keep the first."""
    latencies = [1000 / gbps for gbps in (3.9, 4.6, 4.2)]
    search = search_with([times_of(us) for us in latencies], default=0)
    assert search.verdict("run").winner.index == 1


def test_T2_4_3_beats_3_9(times_of: TimesOf, search_with: SearchWith) -> None:
    search = search_with([times_of(1000 / 3.9), times_of(1000 / 4.3)], default=0)
    assert search.verdict("run").winner.index == 1


@pytest.mark.parametrize(("margin", "winner"), [(0.0, 1), (0.009, 1), (0.05, 0)])
def test_TU_1_margin_is_relative_and_zero_lets_any_gain_win(
    times_of: TimesOf, search_with: SearchWith, margin: float, winner: int
) -> None:
    search = search_with([times_of(100.0), times_of(99.0)], default=0, margin=margin)
    verdict = search.verdict("run")
    assert verdict.winner.index == winner
    assert verdict.kept_by_margin == (winner == 0)
    assert verdict.fastest.index == 1


def test_TU_1_the_winner_is_the_best_of_the_column_that_is_shown(
    times_of: TimesOf, search_with: SearchWith
) -> None:
    """A chain of greedy steps at margin 5 % would stop at 94: 90 is less than 5 % below it."""
    search = search_with([times_of(us) for us in (100.0, 94.0, 90.0, 97.0)], default=0, margin=0.05)
    rows = search.standings("run")
    assert [row.index for row in rows] == [2, 1, 3, 0]
    assert search.verdict("run").winner == rows[0]


def test_T3_the_grand_mean_selects_not_the_slowest_rank(times_of: TimesOf, search_with: SearchWith) -> None:
    """By the slowest rank the first would win, 100 against 110; by the mean the second, 90 against 100."""
    search = search_with([times_of(100.0, 100.0), times_of(70.0, 110.0)])
    verdict = search.verdict("run")
    assert verdict.winner.index == 1
    assert verdict.winner.average_us == pytest.approx(90.0)
    assert verdict.winner.worst_rank_us == pytest.approx(110.0)


def test_TU_2_one_decision_from_all_ranks_times(times_of: TimesOf, search_with: SearchWith) -> None:
    """Rank 0 alone would take B (99 against 100); rank 1 sees 130 there. All use A."""
    search = search_with([times_of(100.0, 100.0), times_of(99.0, 130.0)])
    assert search.verdict("run").winner.index == 0


def test_each_phase_keeps_its_own_winner_of_one_sweep() -> None:
    answers = [
        Times({"dispatch": [[10.0]] * 3, "combine": [[50.0]] * 3}, {}),
        Times({"dispatch": [[12.0]] * 3, "combine": [[40.0]] * 3}, {}),
    ]
    search = Search(2, ("dispatch", "combine"))
    while (request := search.next()) is not None:
        search.feed(request.index, answers[request.index])
    assert search.verdict("dispatch").winner.index == 0
    assert search.verdict("combine").winner.index == 1


def test_a_tie_goes_to_the_smaller_grid_and_is_called_one(search_with: SearchWith) -> None:
    random_ = random.Random(3)

    def noisy(centre: float) -> Callable[[], Times]:
        return lambda: Times({"run": [[centre * random_.gauss(1, 0.02)] for _ in range(9)]}, {})

    grid = {0: (304,), 1: (64,), 2: (16,)}
    search = search_with(
        [noisy(100.0), noisy(100.05), noisy(140.0)], smaller_first=lambda i: grid[i], max_visits=60
    )
    verdict = search.verdict("run")
    assert verdict.winner.index == 1
    assert {verdict.fastest.index, *verdict.ties} == {0, 1}
    assert search.standing(0, "run").num_kept > 1, "a tie is declared from repeated visits"


def test_equal_figures_tie_even_without_noise(times_of: TimesOf, search_with: SearchWith) -> None:
    search = search_with([times_of(100.0)] * 2, smaller_first=lambda i: (2 - i,))
    assert search.verdict("run").winner.index == 1
    assert search.verdict("run").ties == (0,)


def test_the_default_is_not_left_for_a_tie_that_is_slower(times_of: TimesOf, search_with: SearchWith) -> None:
    random_ = random.Random(1)
    noisy = lambda: times_of(100.2 + random_.gauss(0, 1.0))  # noqa: E731
    search = search_with([times_of(100.0), noisy], default=0, smaller_first=lambda i: (9 - i,))
    verdict = search.verdict("run")
    assert verdict.winner.average_us <= search.standing(0, "run").average_us


def test_a_slow_visit_is_repeated_and_set_aside(times_of: TimesOf, search_with: SearchWith) -> None:
    """The best candidate's only sweep visit is in slow mode, 1.5 times its time: it still wins."""
    visits = iter([150.0])
    best = lambda: times_of(next(visits, 100.0))  # noqa: E731
    others = [times_of(us) for us in (104.0, 120.0, 135.0, 149.0, 152.0, 160.0)]
    search = search_with([*others, best])
    verdict = search.verdict("run")
    assert verdict.winner.index == len(others)
    assert verdict.winner.average_us == pytest.approx(100.0)
    assert verdict.winner.num_slow == 1


def test_a_noisy_machine_does_not_crown_one_lucky_visit(search_with: SearchWith) -> None:
    """Visits that scatter by a factor of 3: the winner's average must not be its single fastest visit."""
    for seed in range(10):
        random_ = random.Random(seed)
        noisy = lambda r=random_: Times({"run": [[100.0 * r.uniform(1, 3)]] * 9}, {})  # noqa: E731
        search = search_with([noisy] * 30)
        winner = search.verdict("run").winner
        assert winner.num_kept >= winner.num_slow
        assert winner.num_kept >= 2


def test_one_disturbed_round_does_not_cost_a_candidate_its_win(
    times_of: TimesOf, search_with: SearchWith
) -> None:
    """Eight rounds of 100 us and one of 5000: the visit's mean is 6 times the true one, and is repeated."""
    visits = iter([Times({"run": [[100.0]] * 8 + [[5000.0]]}, {})])
    best = lambda: next(visits, times_of(100.0))  # noqa: E731
    search = search_with([*(times_of(us) for us in (110.0, 120.0, 130.0, 150.0)), best])
    verdict = search.verdict("run")
    assert verdict.winner.index == 4
    assert verdict.winner.average_us == pytest.approx(100.0)


def test_greedy_chains_in_noise_are_not_followed(search_with: SearchWith) -> None:
    """Eleven equal candidates and a better one: the luckiest single measurement is often another's."""
    right, greedy = 0, 0
    for seed in range(20):
        random_ = random.Random(seed)
        seen: dict[int, float] = {}

        def answer(i: int, r: random.Random = random_, s: dict[int, float] = seen) -> Callable[[], Times]:
            def visit() -> Times:
                us = (93.0 if i == 7 else 100.0) * r.uniform(0.93, 1.07)
                s.setdefault(i, us)
                return Times({"run": [[us]] * 9}, {})

            return visit

        search = search_with([answer(i) for i in range(12)])
        right += search.verdict("run").winner.index == 7
        greedy += min(seen, key=lambda i: seen[i]) == 7
    assert right >= 18
    assert right > greedy


def test_TU_2_a_candidate_that_fails_on_one_rank_is_out(times_of: TimesOf, search_with: SearchWith) -> None:
    failure = Failure("raised", 1, "ValueError: x")
    search = search_with([times_of(100.0), failure, times_of(90.0)])
    assert search.verdict("run").winner.index == 2
    assert search.failures() == {1: failure}


def test_a_candidate_that_fails_when_repeated_is_out(times_of: TimesOf, search_with: SearchWith) -> None:
    answers = iter([times_of(50.0)])
    flaky = lambda: next(answers, Failure("wrong", 0, "differs"))  # noqa: E731
    search = search_with([times_of(100.0), flaky])
    assert search.verdict("run").winner.index == 0
    assert search.failures()[1].kind == "wrong"


def test_nobody_wins_if_all_fail(search_with: SearchWith) -> None:
    search = search_with([Failure("hung", 0, "timed out")] * 3)
    with pytest.raises(NoWinner, match="all 3"):
        search.verdict("run")


def test_the_budget_is_three_visits_each_unless_more_is_asked(times_of: TimesOf) -> None:
    random_ = random.Random(0)
    for max_visits in (None, 25):
        search = Search(10, ("run",), max_visits=max_visits)
        while (request := search.next()) is not None:
            search.feed(request.index, times_of(random_.uniform(95, 105)))
        assert search.num_visits <= (max_visits or 30)


def test_quiet_machines_are_not_measured_for_nothing(times_of: TimesOf) -> None:
    """Without noise the search ends by itself, well below its budget."""
    search = Search(50, ("run",))
    while (request := search.next()) is not None:
        search.feed(request.index, times_of(100.0 + 10 * request.index))
    assert search.num_visits < 90
    assert search.verdict("run").winner.index == 0


def test_the_same_results_give_the_same_decisions(times_of: TimesOf) -> None:
    """So a journal that is fed again brings a search to where it was."""

    def requests(upto: int) -> list[int]:
        random_ = random.Random(5)
        search, made = Search(12, ("run",)), []
        while (request := search.next()) is not None and len(made) < upto:
            made.append(request.index)
            search.feed(request.index, times_of(random_.uniform(90, 120)))
        return made

    assert requests(20) == requests(99)[:20]


def test_T8_round_zero_is_dropped_and_ranks_must_agree() -> None:
    rounds = [{"run": 900.0}, {"run": 10.0}, {"run": 12.0}]
    times = gather_times([rounds, rounds], ["run"], warmup=1)
    assert times.average("run") == pytest.approx(11.0)
    with pytest.raises(TuneError, match="different numbers of rounds"):
        gather_times([rounds, rounds[:2]], ["run"], warmup=1)
    with pytest.raises(TuneError, match="leave nothing"):
        gather_times([rounds[:1]], ["run"], warmup=1)
    for bad in (float("nan"), 0.0, -1.0, float("inf")):
        with pytest.raises(TuneError, match="rank 1"):
            gather_times([rounds, [{"run": 1.0}, {"run": bad}, {"run": 1.0}]], ["run"], warmup=1)
    with pytest.raises(TuneError, match="combine"):
        gather_times([rounds], ["run", "combine"], warmup=1)


def test_the_default_stays_where_the_best_is_not_told_apart_from_it(
    times_of: TimesOf, search_with: SearchWith
) -> None:
    """2x H200: 568.32 us won over the default's 568.35 by a smaller grid, and lost 0.4 % in turns."""
    noise = random.Random(4)

    def around(us: float) -> Callable[[], Times]:
        return lambda: times_of(us * (1 + noise.gauss(0, 0.004)))

    sizes = lambda i: (9 - i,)  # noqa: E731
    search = search_with([around(568.4), around(566.9)], default=0, smaller_first=sizes)
    verdict = search.verdict("run")
    assert (verdict.winner.index, verdict.fastest.index) == (0, 1)
    assert not verdict.kept_by_margin, "it is a tie, and is called one"
    far = search_with([around(568.4), around(520.0)], default=0, smaller_first=sizes)
    assert far.verdict("run").winner.index == 1
    nobody = search_with([around(568.4), around(568.2)], smaller_first=sizes)
    assert nobody.verdict("run").winner.index == 1, "without a default the smaller grid is taken"


def test_visits_that_are_set_aside_are_repeated_and_not_paid_for(times_of: TimesOf) -> None:
    """Processes in slow mode have measured everything once: the search begins anew, with its whole budget."""
    search = Search(4, ("run",), max_visits=6)
    for index in range(4):
        search.feed(index, times_of(150.0 + index), group=1)
    assert search.set_aside(1) == 4
    assert search.num_visits == 0
    asked = []
    while (request := search.next()) is not None:
        asked.append(request.index)
        search.feed(request.index, times_of(100.0 + 0.1 * request.index), group=2)
    assert asked[:4] == [0, 1, 2, 3]
    assert search.verdict("run").winner.average_us < 101


def test_what_the_budget_did_not_tell_apart_is_called_unresolved(search_with: SearchWith) -> None:
    """5 % behind is no tie, and with one visit each in noise of 10 % it is not known to be slower."""
    near = Times({"run": [[95.0], [105.0], [115.0], [105.0], [105.0 - 20], [125.0]]}, {})
    best = Times({"run": [[90.0], [100.0], [110.0], [100.0], [80.0], [120.0]]}, {})
    far = Times({"run": [[180.0], [200.0], [220.0]]}, {})
    verdict = search_with([best, near, far], max_visits=3).verdict("run")
    assert (verdict.winner.index, verdict.ties, verdict.unresolved) == (0, (), (1,))

"""Eight processes, a device each, exchange through VMM windows: by copy engines and by kernels."""

RANKS = 8
IMPATIENT = "import exchange, sys; exchange.DEADLINE_S = 2; sys.exit(exchange.main())"


def all_ranks(outcome):
    return outcome.code == 0 and outcome.output.count("ok rank") == RANKS


def test_copy_engines_carry_every_block_between_eight_processes(program):
    outcome = program("exchange.py", "sdma", RANKS, 10, options=("--devices", str(RANKS)))
    assert all_ranks(outcome), outcome.output


def test_late_and_reordered_copies_still_land_before_their_signal(program):
    outcome = program(
        "exchange.py",
        "sdma",
        RANKS,
        3,
        options=("--devices", str(RANKS), "--seed", "5"),
        MORI_SIM_LAZY_COPIES="1",
        MORI_SIM_COPY_DELAY_US="1500",
    )
    assert all_ranks(outcome), outcome.output


def test_a_signal_before_its_data_is_caught(program):
    settings = {"MORI_SIM_LAZY_COPIES": "1", "MORI_SIM_COPY_DELAY_US": "1500"}
    outcome = program("exchange.py", "early", 2, 3, options=("--devices", "2"), **settings)
    assert outcome.code != 0
    assert "wrong bytes from rank" in outcome.output


def test_kernels_push_into_the_windows_of_eight_processes(program, examples):
    code = examples.code_object("push_rows", holding="global_atomic_add")
    outcome = program("exchange.py", "kernel", RANKS, 3, code, options=("--devices", str(RANKS)))
    assert all_ranks(outcome), outcome.output


def test_the_push_kernel_publishes_what_it_signals(program, examples):
    code = examples.code_object("push_rows", holding="global_atomic_add")
    options = ("--devices", str(RANKS), "--coherence", "strict", "--schedule", "random", "--seed", "3")
    outcome = program("exchange.py", "kernel", RANKS, 2, code, options=options)
    assert all_ranks(outcome), outcome.output


def test_a_rank_that_is_held_back_is_waited_for(program, examples):
    code = examples.code_object("push_rows", holding="global_atomic_add")
    options = ("--devices", str(RANKS), "--schedule", "delay-rank", "--delay-rank", "2")
    outcome = program("exchange.py", "kernel", RANKS, 2, code, options=options)
    assert all_ranks(outcome), outcome.output


def test_an_engine_that_never_runs_is_noticed_by_the_receiver(program):
    outcome = program(
        "-c", IMPATIENT, "sdma", 2, 1, options=("--devices", "2"), MORI_SIM_MISSING_ENGINES="0xffff"
    )
    assert outcome.code != 0
    assert "no signal 1 from ranks" in outcome.output

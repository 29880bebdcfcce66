"""A program that says "cuda" and knows nothing of the simulator."""


def test_an_unmodified_program_runs_with_the_cpu_torch(program, examples):
    outcome = program("plain_torch.py", options=("--devices", "2", "--torch-cuda", "--host-memory", "refuse"))
    assert outcome.code == 0, outcome.output
    assert outcome.ok() == {"plain_torch"}


def test_without_the_option_torch_is_left_alone(program):
    code = "import torch; assert not torch.cuda.is_available(); print('ok alone')"
    assert program("-c", code).ok() == {"alone"}

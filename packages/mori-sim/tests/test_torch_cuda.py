"""A program that says "cuda" and knows nothing of the simulator."""


def test_an_unmodified_program_runs_with_the_cpu_torch(program, examples):
    outcome = program("plain_torch.py", options=("--devices", "2", "--torch-cuda", "--host-memory", "refuse"))
    assert outcome.code == 0, outcome.output
    assert outcome.ok() == {"plain_torch"}

"""Progress where there is no terminal."""

from medusa_jax import progress
from medusa_jax.progress import ProgressBar


def test_lines_where_there_is_no_terminal(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with ProgressBar("timing trees", 10, "run") as bar:
        bar.update()
        assert not capsys.readouterr().err  # too soon
        clock[0] = 11.0
        bar.update()
        assert (
            capsys.readouterr().err
            == "timing trees: 2 of 10 runs, 5.5 s each, 44 seconds left\n"
        )
        clock[0] = 300.0
        bar.update(3)
        assert (
            capsys.readouterr().err
            == "timing trees: 5 of 10 runs, 60.0 s each, 5 minutes left\n"
        )

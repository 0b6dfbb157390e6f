"""`docs/one_step.md` is what the command prints today."""

from pathlib import Path

from medusa_jax.research.walk import main

PAGE = Path(__file__).parents[2] / "docs" / "one_step.md"


def test_the_page_is_the_commands_output(capsys):
    assert main(["--dtype", "float64"]) == 0
    assert capsys.readouterr().out == PAGE.read_text()


def test_pictures_are_drawn_beside_it(tmp_path, capsys):
    assert main(["--tree", "cartesian:2,1", "--pictures", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "mask.svg",
        "step.svg",
        "tree.svg",
    ]
    assert "kept" in capsys.readouterr().out


def test_bad_input_is_one_line(capsys):
    for flags, words in (
        (["--step", "0"], "--step is at least 1, not 0"),
        (["--drafter", "none"], "give --drafter"),
    ):
        assert main(flags) == 2
        assert words in capsys.readouterr().err

"""What a path is, said in one sentence where it is not what was asked for."""

import json

import pytest

from medusa_jax.errors import UserError
from medusa_jax.interop.hub import resolve_heads


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(content))
    return folder


def test_a_directory_with_our_heads_is_itself(tmp_path):
    assert resolve_heads(str(write(tmp_path, heads__json={}))) == str(tmp_path)


PUBLISHED = {
    "Medusa heads": {"config__json": {"medusa_num_heads": 2}, "medusa_lm_head__pt": 0},
    "Hydra heads": {"config__json": {"hydra_num_heads": 4}, "hydra_lm_head__pt": 0},
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_heads_are_called_by_name(kind, tmp_path):
    """The directory and the file inside it alike."""
    files = PUBLISHED[kind]
    folder = write(tmp_path, **files)
    weights = next(iter(files.keys() - {"config__json"})).replace("__", ".")
    for path in (folder, folder / weights):
        with pytest.raises(
            UserError, match=f"{path} holds {kind} in the layout.*heads.json"
        ):
            resolve_heads(str(path))
    (folder / "config.json").unlink()  # the name of the file is enough
    with pytest.raises(UserError, match=f"holds {kind}"):
        resolve_heads(str(folder))


def test_other_things_are_no_heads(tmp_path):
    model = write(tmp_path / "model", config__json={"model_type": "llama"})
    with pytest.raises(
        UserError, match="holds a model, not draft heads: give it to --model"
    ):
        resolve_heads(str(model))
    inside = write(model / "heads", heads__json={})
    with pytest.raises(UserError, match=f"a model with its heads: give --drafter {inside}"):
        resolve_heads(str(model))
    with pytest.raises(
        UserError, match=f"is a file: give --drafter its directory, {inside}"
    ):
        resolve_heads(str(inside / "heads.json"))
    empty = write(tmp_path / "empty")
    with pytest.raises(
        UserError, match="holds no draft heads: --drafter takes heads trained"
    ):
        resolve_heads(str(empty))

"""Estimated accepted length: the hand-written row's ranks, and tuples counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_losses import heads_problem

from medusa_jax.heads.drafter import TextRows
from medusa_jax.heads.ranks import label_ranks
from medusa_jax.training import estimate
from medusa_jax.training.losses.pairs import pair_mask, text_of
from medusa_jax.training.losses.terms import Guesses
from medusa_jax.tree.growth import MISS


@pytest.mark.parametrize("chunk", [4, 5, 64])
def test_ranks_are_those_of_the_labels(chunk):
    _, backbone, drafter, params, batch = heads_problem(K=2, T=13)

    @jax.jit
    def both(params, batch):
        rows = text_of(batch)
        hidden = backbone.forward(*rows)
        features = drafter.features(params, backbone, TextRows(hidden, *rows))
        plain = [drafter.head_logits(params, backbone, k, features[k]) for k in range(2)]
        ranks = estimate.head_ranks(params, drafter, backbone, hidden, batch, chunk)
        return ranks, jnp.stack(plain)

    found, logits_KBTV = (np.asarray(x) for x in both(params, batch))
    mask_of = jax.jit(pair_mask, static_argnums=2)
    whole = np.asarray(mask_of(batch["counted"], batch["segment_ids"], 3))
    assert found.shape == (2, 13, 2) and 5 < whole.sum() < 22
    for b, t in np.ndindex(2, 13):
        for k in range(2):
            if not whole[b, t]:
                assert found[b, t, k] == -1
                continue
            logits = logits_KBTV[k, b, t]
            label = int(batch["tokens"][b, t + k + 2])
            assert found[b, t, k] == min((logits > logits[label]).sum(), MISS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_heads_do_not_look_perfect(value):
    """Logits that are NaN or infinite count as wrong guesses, in the loss's accuracies and in the estimate."""
    _, backbone, drafter, params, batch = heads_problem(K=1, T=13)
    rows = text_of(batch)
    features = drafter.features(params, backbone, TextRows(backbone.forward(*rows), *rows))
    given = (drafter, params, backbone, features, batch["tokens"], 64)
    ranks = label_ranks(*given, lambda k, logits, _: jnp.full_like(logits, value))
    assert (np.asarray(ranks) == MISS).all()
    for logits in ([value, 0, 0], [value] * 3, [0, np.nan, -1]):
        guesses = Guesses(jnp.array([[logits]], float), jnp.zeros((1, 1), int), None, None)
        assert guesses.rank_BT > 0


def test_counted_by_hand():
    ranks = np.array([[[0, 0], [0, 3], [-1, -1]], [[1, 0], [0, 0], [-1, -1]]])
    found = estimate.accepted_lengths(ranks)
    assert found["accepted_length_chain"] == pytest.approx(1 + (0 + 2) / 2)
    # The first row gives the tree [0] [0 0] [0 3]; the second walks it to 0 and 2 drafts.
    assert found["accepted_length_tree"] == pytest.approx(1 + (0 + 2) / 2)
    assert estimate.accepted_lengths(np.full((3, 2), -1)) == {}
    always = estimate.accepted_lengths(np.zeros((50, 4), int))
    assert always == {"accepted_length_chain": 5, "accepted_length_tree": 5}
    never = estimate.accepted_lengths(np.full((50, 4), MISS))
    assert never == {"accepted_length_chain": 1, "accepted_length_tree": 1}


def test_a_tree_is_counted_on_rows_it_was_not_grown_from():
    """Each row repeats a different pattern: what fits its positions fits no other row."""
    rows = np.arange(8)[:, None, None] + np.zeros((8, 50, 3), int)
    assert estimate.accepted_lengths(rows)["accepted_length_tree"] == 1

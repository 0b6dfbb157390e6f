"""The n-gram model that the demo's backbone must beat, on the same tokens, in bits per byte.

    python -m research ngrams work/demo

fits this 5-gram model to `train/` and measures it on `heldout/` of a folder made by `demo_corpus`.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.whole_files import read_array


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """A cross-entropy in nats per token as bits per byte of UTF-8 text.

    2.0 nats at 4.0 bytes per token: 2.0 / ln 2 / 4.0 = 0.721 bits.
    """
    return nats_per_token / math.log(2) / bytes_per_token


# --------------------------------------------------------------------------------------
# Interpolated modified Kneser-Ney
# --------------------------------------------------------------------------------------


@dataclass
class _Order:
    """The n-grams of one length n.

    keys: sorted; key = (index of the first n-1 tokens in order n-1) * V + last token.
    count: occurrences for the highest order; below it the number of distinct tokens seen
    before the n-gram, plus its occurrences at the start of a document.
    total, kinds [*, 3]: per context (n-1 tokens, by its index): sum of `count`, and the numbers of
    distinct next tokens with a count of 1, 2, 3 or more.
    """

    keys: np.ndarray
    count: np.ndarray
    total: np.ndarray
    kinds: np.ndarray


@dataclass
class NgramModel:
    """Interpolated modified Kneser-Ney n-gram model over token ids.

    Chen and Goodman, "An empirical study of smoothing techniques for language modeling"
    (1998), section 3 and appendix on modified Kneser-Ney. For context h, token w, and h'
    which is h without its first token:

        p_n(w | h) = max(c(hw) - D_n(c(hw)), 0) / C(h) + g(h) p_{n-1}(w | h')
        g(h) = (D_n(1) N1(h) + D_n(2) N2(h) + D_n(3+) N3+(h)) / C(h)

    and p_0 = 1 / V, so every distribution sums to one and no token has probability zero. Create one
    with `fit`; `tune` improves the discounts.
    """

    vocab_size: int
    order: int
    orders: list[_Order]
    # Discounts [order, 3] for counts of 1, 2 and 3 or more; row 0 belongs to single tokens.
    discounts: np.ndarray

    @classmethod
    def fit(
        cls,
        tokens: np.ndarray,
        vocab_size: int,
        doc_starts: np.ndarray | None = None,
        order: int = 5,
    ) -> "NgramModel":
        """Count the n-grams of `tokens` [T]; none crosses a document's start."""
        tokens = np.asarray(tokens, np.int64)
        if order < 1 or len(tokens) < order:
            raise UserError(f"{len(tokens)} tokens are too few for {order}-grams.")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise UserError(
                f"token {tokens.max()} is outside a vocabulary of {vocab_size}."
            )
        document = _document_of(len(tokens), doc_starts)
        at_start = np.diff(document, prepend=-1) > 0
        # gram[i]: index of the n-gram that starts at position i.
        gram = np.zeros(len(tokens), np.int64)
        keys, grams = [], []
        for n in range(1, order + 1):
            here = len(tokens) - n + 1
            inside = document[:here] == document[n - 1 :]
            unique, index = np.unique(
                gram[:here][inside] * vocab_size + tokens[n - 1 :][inside],
                return_inverse=True,
            )
            gram = np.full(here, -1)
            gram[inside] = index
            keys.append(unique)
            grams.append(gram)
        orders = []
        for n in range(1, order + 1):
            size = len(keys[n - 1])
            if n == order:
                used = grams[n - 1]
                count = np.bincount(used[used >= 0], minlength=size)
            else:
                # Each distinct longer n-gram adds one to the n-gram it ends with.
                longer = grams[n]
                ends = np.zeros(len(keys[n]), np.int64)
                ends[longer[longer >= 0]] = grams[n - 1][1:][longer >= 0]
                count = np.bincount(ends, minlength=size)
                first = grams[n - 1][at_start[: len(grams[n - 1])]]
                count += np.bincount(first[first >= 0], minlength=size)
            context = keys[n - 1] // vocab_size
            n_contexts = 1 if n == 1 else len(keys[n - 2])
            total = np.bincount(context, weights=count, minlength=n_contexts)
            kinds = np.stack(
                [
                    np.bincount(context[which], minlength=n_contexts)
                    for which in (count == 1, count == 2, count >= 3)
                ],
                axis=1,
            )
            orders.append(_Order(keys[n - 1], count, total, kinds))
        discounts = np.stack([_discounts(o.count) for o in orders])
        return cls(vocab_size, order, orders, discounts)

    def tune(
        self, tokens: np.ndarray, doc_starts: np.ndarray | None = None, sweeps: int = 3
    ) -> float:
        """Fit the discounts to text that was not counted; returns its nats per token.

        Coordinate descent on the 3 x order numbers, each kept between 0 and its count.
        """
        facts = self._facts(tokens, doc_starts)
        best = -np.mean(np.log(self._mix(facts, self.discounts)))
        limits = np.array([1.0, 2.0, 3.0])
        for sweep in range(sweeps):
            step = 0.2 / 2**sweep
            for n in range(self.order):
                for kind in range(3):
                    for move in (step, -step):
                        while True:
                            trial = self.discounts.copy()
                            trial[n, kind] += move * limits[kind]
                            if not 0.0 < trial[n, kind] < limits[kind]:
                                break
                            loss = -np.mean(np.log(self._mix(facts, trial)))
                            if loss >= best:
                                break
                            best, self.discounts = loss, trial
        return float(best)

    def log_probs(
        self, tokens: np.ndarray, doc_starts: np.ndarray | None = None
    ) -> np.ndarray:
        """Natural log of each token's probability given up to n - 1 tokens before it.

        tokens [T] -> [T - documents]: the first token of each document is context only.
        """
        return np.log(self._mix(self._facts(tokens, doc_starts), self.discounts))

    def next_probs(self, context: Sequence[int]) -> np.ndarray:
        """Distribution [V] of the token after `context` (its last n - 1 tokens count)."""
        context = list(context)[-(self.order - 1) :] if self.order > 1 else []
        rows = np.empty((self.vocab_size, len(context) + 1), np.int64)
        rows[:, :-1] = context
        rows[:, -1] = np.arange(self.vocab_size)
        facts = [self._lookup(rows[:, -n:], n) for n in range(1, rows.shape[1] + 1)]
        return self._mix(facts, self.discounts)

    def _lookup(self, rows: np.ndarray, n: int):
        """rows [R, n] of ids -> (count, total [R], kinds [R, 3]) of order n; 0 = unseen."""
        context = np.zeros(len(rows), np.int64)
        for j in range(n):
            keys = self.orders[j].keys
            key = np.where(context < 0, -1, context * self.vocab_size + rows[:, j])
            at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
            if j < n - 1:
                context = np.where(keys[at] == key, at, -1)
        table = self.orders[n - 1]
        count = np.where(keys[at] == key, table.count[at], 0)
        known = context >= 0
        return (
            count,
            np.where(known, table.total[context], 0.0),
            np.where(known[:, None], table.kinds[context], 0),
        )

    def _facts(self, tokens, doc_starts):
        """Inputs of `_mix` per order for every scored position; zeros for short contexts."""
        tokens = np.asarray(tokens, np.int64)
        document = _document_of(len(tokens), doc_starts)
        starts = np.diff(document, prepend=-1) > 0
        scored = np.flatnonzero(~starts)
        facts = []
        for n in range(1, self.order + 1):
            first = scored - n + 1
            fits = (first >= 0) & (document[np.maximum(first, 0)] == document[scored])
            rows = tokens[first[fits][:, None] + np.arange(n)]
            count, total, kinds = self._lookup(rows, n)
            full = [np.zeros((len(scored), *a.shape[1:])) for a in (count, total, kinds)]
            for array, part in zip(full, (count, total, kinds), strict=True):
                array[fits] = part
            facts.append(tuple(full))
        return facts

    def _mix(self, facts, discounts: np.ndarray) -> np.ndarray:
        """Probabilities [R] from the facts of orders 1, 2, ... (see the class docstring)."""
        p = np.full(len(facts[0][0]), 1.0 / self.vocab_size)
        for (count, total, kinds), discount in zip(facts, discounts, strict=False):
            by_count = np.concatenate([[0.0], discount])[np.minimum(count, 3).astype(int)]
            safe = np.maximum(total, 1.0)
            seen = (count - by_count) / safe + (kinds @ discount) / safe * p
            p = np.where(total > 0, seen, p)
        return p


def _document_of(length: int, doc_starts: np.ndarray | None) -> np.ndarray:
    """Index of the document of each position [length]: starts [0, 3], 5 -> 0 0 0 1 1."""
    mark = np.zeros(length, np.int64)
    if doc_starts is not None:
        mark[np.asarray(doc_starts, np.int64)] = 1
    mark[:1] = 0
    return np.cumsum(mark)


def _discounts(count: np.ndarray) -> np.ndarray:
    """Chen and Goodman's closed-form discounts for counts of 1, 2 and 3 or more."""
    n1, n2, n3, n4 = (max(int((count == i).sum()), 1) for i in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    raw = np.array([1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    return np.clip(raw, 0.05, [0.95, 1.95, 2.95])


# --------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------


def _read_stream(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        return read_array(folder / "tokens.npy"), read_array(folder / "doc_starts.npy")
    except UserError as error:
        raise UserError(f"{folder} holds no token stream ({error}).") from None


def ngram_baseline(folder: Path, order: int = 5) -> dict:
    """Fit and tune a model on folder/train, measure it on folder/heldout.

    Discounts are tuned on the last 5% of the training documents with counts of the others; then all
    documents are counted. Bits per byte are per byte of text; the end token of each document is
    predicted too and has zero bytes.
    """
    tokens, starts = _read_stream(folder / "train")
    held, held_starts = _read_stream(folder / "heldout")
    about = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    vocab = about["settings"]["vocab"]
    cut = int(starts[int(len(starts) * 0.95)])
    dev_starts = starts[starts >= cut] - cut
    model = NgramModel.fit(tokens[:cut], vocab, starts[starts < cut], order)
    dev = model.tune(tokens[cut:], dev_starts)
    discounts = model.discounts
    model = NgramModel.fit(tokens, vocab, starts, order)
    closed_form = -model.log_probs(held, held_starts)
    model.discounts = discounts
    nats = -model.log_probs(held, held_starts)
    n_bytes = about["splits"]["heldout"]["bytes"]
    return {
        "order": order,
        "train_tokens": len(tokens),
        "heldout_tokens": len(nats),
        "tuning_nats_per_token": dev,
        "nats_per_token": float(nats.mean()),
        "bits_per_token": float(nats.mean() / math.log(2)),
        "bits_per_byte": bits_per_byte(float(nats.mean()), n_bytes / len(nats)),
        "bits_per_byte_untuned": bits_per_byte(
            float(closed_form.mean()), n_bytes / len(nats)
        ),
        "discounts": np.round(discounts, 3).tolist(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m research ngrams",
        description="An n-gram model of a corpus folder: the baseline a backbone must beat.",
    )
    parser.add_argument("folder", type=Path, help="made by demo_corpus")
    parser.add_argument("--order", type=int, default=5, help="tokens per n-gram")
    args = parser.parse_args(argv)
    try:
        print(json.dumps(ngram_baseline(args.folder, args.order), indent=1))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

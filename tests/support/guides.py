"""Options that change the text, by their definitions: bars, penalties, and a constraint without a grammar."""

import numpy as np

from medusa_jax.decoding.token_sets import words

V, EOS = 41, 7


def barred_tokens(text, n, vocab):
    """Tokens that would complete an n-gram of the text."""
    tail = tuple(text[len(text) - n + 1 :])
    old = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
    return [token for token in range(vocab) if (*tail, token) in old]


def penalised(logits, prompt, text, asked):
    """Token by token, as OpenAI's reference and transformers' documentation say."""
    scores = np.array(logits, np.float64)
    for token, bias in asked.bias:
        scores[token] += bias
    for token in {*prompt, *text}:
        z, r = scores[token], asked.repetition
        scores[token] = z * r if z < 0 else z / r
    for token in set(text):
        scores[token] -= text.count(token) * asked.frequency + asked.presence
    if len(text) < asked.least:
        scores[list(asked.ends)] = -np.inf
    return scores


class Rule:
    """Which tokens may follow depends on the last two; now and then one alone may, or none."""

    def __init__(self, seed, dead=False, forcing=0.3):
        self.seed, self.dead, self.forcing = seed, dead, forcing
        self.text, self.consumed = [], 0
        self.first_W = np.zeros(words(V), np.uint32)
        self.fill(self.first_W)

    def tokens(self, text):
        """The tokens that may follow."""
        rng = np.random.default_rng([self.seed, *text[-2:], len(text) % 3])
        kind = rng.random()
        if self.dead and text and kind > 0.93:
            return []
        if kind < self.forcing:
            return [int(rng.integers(8, V))]
        found = rng.choice(V, 12, replace=False).tolist()
        return found if len(text) > 9 else [t for t in found if t != EOS] or [9]

    def bits(self, text, into_W):
        allowed = np.zeros(32 * words(V), np.uint8)
        allowed[self.tokens(text)] = 1
        into_W[:] = np.packbits(allowed, bitorder="little").view(np.uint32)
        return bool(into_W.any())

    def fill(self, into_W):
        return self.bits(self.text, into_W)

    def advance(self, tokens):
        self.text += tokens
        self.consumed += len(tokens)

    def fill_chain(self, nodes_M, chain_C):
        text, forced = list(self.text), []
        while len(forced) < len(chain_C) and len(self.tokens(text + forced)) == 1:
            forced += self.tokens(text + forced)
        nodes_M[chain_C[: len(forced)]] = forced
        return len(forced)

    def fill_tree(self, nodes_M, children, guesses_MK, into_MW):
        def visit(node, text):
            allowed = self.tokens(text)
            forced = allowed if len(allowed) == 1 else []
            for child in children[node]:
                if nodes_M[child] not in allowed and guesses_MK is not None:
                    there = set(nodes_M[children[node]].tolist())
                    others = (t for t in [*forced, *guesses_MK[node]] if t in allowed)
                    nodes_M[child] = next((t for t in others if t not in there), 0)
                after = [*text, int(nodes_M[child])]
                if after[-1] in allowed:
                    if self.bits(after, into_MW[child]):
                        visit(child, after)
                    else:
                        nodes_M[child] = next(t for t in range(V) if t not in allowed)

        visit(0, self.text)

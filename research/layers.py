"""Figures of a deep model from two shallow ones: layers are identical and unrolled."""

from collections.abc import Callable

from medusa_jax.whole_files import Json


def extrapolated(
    measure: Callable[[int], Json], n_layers: int, few: tuple[int, int] | None
) -> Json:
    """Figures of `n_layers` layers from those of few[0] and few[1], on the line through both.

    Numbers, and dictionaries of numbers, are extrapolated; anything else is that of few[1] layers.
    With `few` None all layers are measured.
    """
    if few is None:
        return measure(n_layers)
    share = (n_layers - few[0]) / (few[1] - few[0])

    def line(a: object, b: object) -> object:
        if isinstance(a, dict) and isinstance(b, dict):
            return {k: line(a.get(k, 0), b.get(k, 0)) for k in a | b}
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            return a + share * (b - a)
        return b

    first, second = (measure(n) for n in few)
    return {k: line(first.get(k, 0), second.get(k, 0)) for k in first | second}

"""Hidden states that another program has written: speculators' `hs_{i}.safetensors`, a sample each.

    hidden_states   [T, 1 + A, D] float32, bfloat16 or float16: the streams that enter the tapped layers, in
                    the order of `Drafter.taps`, then the stream that leaves the last layer, before the norm
    token_ids       [T] whole numbers (or `input_ids`)
    loss_mask       [T], 1 where the token is counted; if it is missing, the column `loss_mask` of the dataset
                    (`Dataset.save_to_disk`) in the same directory or the one above, row i for file i

A directory of them, or one with a directory `hidden_states` of them, is a `data.source`: its tokens become a
token directory like any text, and rows take their states from the files, as if they were cached in the files'
type (`data.cache_features`). Nothing is copied. The files do not identify their model and their layers.
"""

import dataclasses
import os
from typing import Any

import ml_dtypes
import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.tensor import Tensors, whole
from medusa_jax.training.data.rows import Rows, TokenRows

HIDDEN, TOKENS, MASK = "hidden_states", ("token_ids", "input_ids"), "loss_mask"
# Type in the files -> `data.cache_features`.
KINDS = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


def stored_type(sources: dict[str, dict[int, str]], asked: str) -> str:
    """`data.cache_features` for hidden states of these sources, as they are stored.

    Args:
      sources: the files of each source by their numbers; {} if it holds none.
      asked: the configured type, "" for any.

    Raises:
      UserError: some source holds none, their types differ, or another one is asked for.
    """
    for source, files in sources.items():
        if not files:
            raise UserError(
                "hidden states are given for all of data.source and data.eval_source or for none; "
                f"{source} has no hs_*.safetensors"
            )
    firsts = [next(iter(files.values())) for files in sources.values()]
    kinds = {path: KINDS[Sample.open(path).hidden.dtype] for path in firsts}
    kind = kinds[firsts[0]]
    if len(set(kinds.values())) > 1 or asked not in ("", kind):
        raise UserError(
            f"hidden states are read as they are stored: {kinds}; leave data.cache_features empty"
        )
    return kind


@dataclasses.dataclass(frozen=True)
class Sample:
    """An open file.

    Attributes:
      hidden: the tensor [T, 1 + A, D], read on demand.
      tokens_T: token ids.
      mask_T: which are counted; None if the file does not say it.
    """

    path: str
    hidden: Any
    tokens_T: np.ndarray
    mask_T: np.ndarray | None

    @classmethod
    def open(cls, path: str) -> "Sample":
        """Open a file and check everything but the states themselves.

        Raises:
          UserError: names the file and the key.
        """
        tensors: Tensors = tensor_files.open_safetensors(path)
        names = [name for name in TOKENS if name in tensors]
        for key in sorted(tensors.keys() - {HIDDEN, MASK, *names}):
            raise UserError(f"{path} has a key that is not known: {key!r}")
        if HIDDEN not in tensors or len(names) != 1:
            raise UserError(
                f"{path} should have the keys {HIDDEN} and one of {' and '.join(TOKENS)}, not "
                f"{', '.join(sorted(tensors))}"
            )
        hidden, tokens_T = tensors[HIDDEN], whole(tensors[names[0]])
        mask_T = whole(tensors[MASK]) if MASK in tensors else None
        T = tokens_T.shape[0] if tokens_T.ndim == 1 else -1
        if tokens_T.dtype.kind not in "iu" or T < 1:
            raise UserError(
                f"key {names[0]!r} in {path} is {tokens_T.dtype}{list(tokens_T.shape)}, not [T] "
                "whole numbers"
            )
        if len(hidden.shape) != 3 or hidden.shape[0] != T or hidden.dtype not in KINDS:
            raise UserError(
                f"key {HIDDEN!r} in {path} is {hidden.dtype}{list(hidden.shape)}, not [{T}, n, D] "
                f"{' or '.join(KINDS)}"
            )
        return cls(path, hidden, tokens_T, _mask(path, mask_T, T))


def _mask(source: str, mask_T: np.ndarray | None, T: int) -> np.ndarray | None:
    if mask_T is not None and (mask_T.shape != (T,) or not np.isin(mask_T, (0, 1)).all()):
        raise UserError(
            f"{MASK} in {source} is {mask_T.dtype}{list(mask_T.shape)}, not [{T}] of 1 and 0"
        )
    return None if mask_T is None else mask_T.astype(bool)


def texts_in(
    source: str, files: dict[int, str]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The tokens of every file and which of them are counted.

    Raises:
      UserError: a file that is not as described, or no loss mask.
    """
    dataset, tokens, counted = None, [], []
    for i, path in files.items():
        sample = Sample.open(path)
        mask_T = sample.mask_T
        if mask_T is None:
            dataset = _dataset(source, path) if dataset is None else dataset
            mask_T = _mask_of_row(dataset, i, sample)
        tokens.append(sample.tokens_T.astype(np.int32))
        counted.append(mask_T)
    return tokens, counted


def _dataset(source: str, path: str) -> Any:
    import datasets

    for directory in (source, os.path.dirname(os.path.abspath(source))):
        if os.path.isfile(os.path.join(directory, "dataset_info.json")):
            try:
                return datasets.load_from_disk(directory)
            except Exception as error:  # the library raises many types
                raise UserError(f"{directory} cannot be read: {error}") from error
    raise UserError(
        f"{path} has no {MASK}, and neither {source} nor the directory above holds the dataset "
        "that has it"
    )


def _mask_of_row(dataset: Any, i: int, sample: Sample) -> np.ndarray:
    columns = {"input_ids", MASK}
    if i >= len(dataset) or not columns <= set(dataset.column_names):
        raise UserError(f"the dataset of {sample.path} has no row {i} of {sorted(columns)}")
    row = dataset[i]
    if not np.array_equal(row["input_ids"], sample.tokens_T):
        raise UserError(f"{sample.path} and row {i} of its dataset have different tokens")
    mask_T = _mask(f"row {i} of the dataset", np.asarray(row[MASK]), len(sample.tokens_T))
    assert mask_T is not None
    return mask_T


class GivenRows(Rows):
    """`TokenRows` whose batches also hold `hidden` [B, T, E], read from the files.

    Args:
      norm_D, eps: the backbone's last norm, which the last stream of a file has not passed.
      width: E, as the heads of the run read it.
    """

    def __init__(self, source: TokenRows, norm_D: np.ndarray, eps: float, width: int):
        super().__init__(source.cfg, source.shuffle)
        self.source, self.rows, self.crc = source, source.rows, source.crc
        norm_D = norm_D.astype(np.float32)
        self.norm_D, self.eps, self.width = norm_D, eps, width
        kind = source.cfg.cache_features
        self.dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(np.float32)
        n, D = width // norm_D.size, norm_D.size
        for path in source.states:
            if (found := Sample.open(path).hidden.shape[1:]) != (n, D):
                raise UserError(
                    f"{path} has {found[0]} hidden states of size {found[1]} a token, the model and "
                    f"these heads need {n} of {D}: {n - 1} tapped layers and the last"
                )

    def counts(self, vocab_size: int) -> np.ndarray:
        return self.source.counts(vocab_size)

    def row(self, number: int, epoch: int = 0) -> dict[str, np.ndarray]:
        """`TokenRows.row` with the row's hidden states; 0 in padding."""
        hidden_TE, filled = np.zeros((self.cfg.seq_len, self.width), self.dtype), 0
        for document in self.source.packed[number]:
            n = int(self.source.lengths[document])
            hidden_TE[filled : filled + n] = self._states(self.source.states[document], n)
            filled += n
        return self.source.row(number, epoch) | {"hidden": hidden_TE}

    def _states(self, path: str, n: int) -> np.ndarray:
        """The first n positions of a file [n, E]: the normed last stream, then the others."""
        tensor = Sample.open(path).hidden
        given = tensor.read((slice(0, n), *(slice(0, size) for size in tensor.shape[1:])))
        last = given[:, -1].astype(np.float32)
        if not np.isfinite(given.astype(np.float32)).all():
            raise UserError(f"{path} has hidden states that are not finite")
        scale = 1 / np.sqrt(np.mean(last**2, axis=-1, keepdims=True) + self.eps)
        taps = given[:, :-1].reshape(n, -1).astype(self.dtype)
        return np.concatenate([(last * scale * self.norm_D).astype(self.dtype), taps], -1)

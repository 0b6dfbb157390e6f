"""Open a drafter before the backbone is read; read its parameters after it."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from medusa_jax.api.bundles import bundled_draft_model, find_heads
from medusa_jax.api.form import Form
from medusa_jax.arch import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts.heads_io import check_base, load_heads
from medusa_jax.files.layouts.stored_heads import StoredHeads
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import Drafter
from medusa_jax.heads.names import split_drafter
from medusa_jax.heads.registry import is_baseline, make_drafter, no_drafter
from medusa_jax.mapped import made_once
from medusa_jax.model.convert import place_head
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import Params, param_shardings
from medusa_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from medusa_jax.api.baselines import Baseline


@dataclass(frozen=True)
class LoadedDrafter:
    """The drafter of a model, with its parameters if they have been read.

    Attributes:
      params: its parameters in decoding form; {} before `with_params` and for drafters without any.
      files: of trained heads, from which they can be read in another form; None for other drafters.
    """

    drafter: Drafter
    params: Params = field(default_factory=dict)
    files: "HeadsFiles | None" = None

    def with_params(self, n_heads: int | None) -> "LoadedDrafter":
        """This drafter with parameters; only the first `n_heads` heads unless None."""
        if self.files is None:
            return self
        files = replace(self.files, n_heads=n_heads)
        heads, params = files.read(files.form.storage.of_drafts)
        drafter = make_drafter(heads, files.base.config)
        return LoadedDrafter(drafter, params, files)


@dataclass(frozen=True)
class HeadsFiles:
    """Files of trained heads.

    Attributes:
      base: the backbone's files.
      n_heads: heads that are read, from the first; None: all.
    """

    stored: StoredHeads
    base: BaseFiles
    form: Form
    mesh: Mesh
    n_heads: int | None = None

    def read(self, storage: Storage) -> tuple[HeadsConfig, Params]:
        """Read the heads with kernels stored as `storage`.

        With a draft vocabulary and a shared LM head, also read its columns.
        """
        packed = partial(self._packed, storage)
        if not storage.panel:
            return packed()
        files = {tensor.file for tensor in self.stored.tensors.values()} | self.base.files
        marks = (
            self.stored.heads,
            self.base.config,
            self.n_heads,
            self.form,
            storage,
            self.form.kernels.mark,
        )
        return made_once("draft heads", files, marks, packed)

    def _packed(self, storage: Storage) -> tuple[HeadsConfig, Params]:
        heads, params, _ = load_heads(
            self.stored,
            self.base.config,
            self.mesh,
            self.n_heads,
            self.form.dtype.name,
            convert=partial(place_head, storage=storage, kernels=self.form.kernels),
        )
        if vocabulary.GROUP in params and self.stored.heads.lm_head == "shared":
            columns = self.lm_head(storage)
            params[vocabulary.GROUP] = params[vocabulary.GROUP] | columns
        return heads, params

    def lm_head(self, storage: Storage) -> Params:
        """The backbone's LM head for the tokens that the heads score."""
        ids = self.stored.ids
        if ids is None:
            ids = np.arange(self.base.config.vocab_size)
        kernel_DO = self.base.lm_head_columns(ids).astype(self.form.read_as)
        part = {"lm_head": {"kernel": kernel_DO}}
        part = jax.device_put(part, param_shardings(self.mesh, part))
        return place_head(part, storage, self.form.kernels)


def find_drafter(model: str | None, name: str) -> "Baseline | StoredHeads | None":
    """Find what `--drafter` names: a drafter without heads, files of heads, or None.

    Raises:
      UserError: there is no such drafter.
    """
    if is_baseline(split_drafter(name)[0]):
        from medusa_jax.api.baselines import find_baseline

        return find_baseline(name, bundled_draft_model(model))
    return find_heads(model, name)


def open_drafter(
    source: "Baseline | StoredHeads | None",
    base: BaseFiles,
    tokenizer: Tokenizer,
    form: Form,
    mesh: Mesh,
    expected: str | None,
) -> LoadedDrafter:
    """Open the drafter of `source`.

    Args:
      expected: fingerprint of the backbone that heads must have been trained on; None: any of the same sizes.

    Raises:
      UserError: the heads were made for another model, or a type is asked for without heads.
    """
    if not isinstance(source, StoredHeads) and form.storage.draft_weights:
        raise UserError("draft_weights is the type of draft heads, and no heads are loaded")
    if source is None:
        return LoadedDrafter(no_drafter(base.config))
    if isinstance(source, StoredHeads):
        source = source.fitted(base)
        check_base(source, base.config, expected)
        drafter = make_drafter(source.heads, base.config)
        files = HeadsFiles(source, base, form, mesh)
        return LoadedDrafter(drafter, files=files)
    from medusa_jax.api.baselines import load_baseline

    heads, params = load_baseline(source, tokenizer, form, mesh)
    return LoadedDrafter(make_drafter(heads, base.config), params)

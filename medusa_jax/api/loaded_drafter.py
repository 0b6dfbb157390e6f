"""Open a drafter before the backbone is read; read its parameters after it."""

from collections.abc import Callable
from dataclasses import dataclass, field
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
from medusa_jax.heads.registry import is_baseline, make_drafter
from medusa_jax.mapped import kept
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
      drafter: the drafter, for plain decoding one without drafts.
      params: its parameters in decoding form; {} before `read` and for drafters without any.
      directory: where its tree file may be; "" if there are no files.
      read_wide: reads the parameters again, for rules whose text depends on the drafts, if they are stored
        narrower than the weights.
      read_plain: reads what learning needs of trained heads: their parameters, kernels as arrays; the LM head
        of the tokens that they score; their files.
    """

    drafter: Drafter
    params: Params = field(default_factory=dict)
    directory: str = ""
    read_wide: Callable[[], Params] | None = None
    read_plain: Callable[[], tuple[Params, Params, StoredHeads]] | None = None

    @property
    def can_draft(self) -> bool:
        """False for plain decoding."""
        return bool(self.directory or self.params) or not self.drafter.trained

    def read(self, n_heads: int | None) -> "LoadedDrafter":
        """Return this drafter with parameters; only the first `n_heads` heads unless None."""
        return self


@dataclass(frozen=True)
class LoadedHeads(LoadedDrafter):
    """Trained heads in files.

    Attributes:
      stored: their files.
      base: the backbone's files.
    """

    stored: StoredHeads = field(kw_only=True)
    base: BaseFiles = field(kw_only=True)
    form: Form = field(kw_only=True)
    mesh: Mesh = field(kw_only=True)

    def read(self, n_heads: int | None) -> LoadedDrafter:
        of_drafts = self.form.storage.of_drafts
        heads, params = self._read(n_heads, of_drafts)
        wide, read_wide = self.form.storage.of_deciding_drafts, None
        if wide != of_drafts:
            read_wide = partial(self._params, n_heads, wide)
        drafter = make_drafter(heads, self.base.config)

        def read_plain() -> tuple[Params, Params, StoredHeads]:
            plain = Storage()
            return self._params(n_heads, plain), self._lm_head(plain), self.stored

        return LoadedDrafter(drafter, params, self.directory, read_wide, read_plain)

    def _params(self, n_heads: int | None, storage: Storage) -> Params:
        return self._read(n_heads, storage)[1]

    def _read(self, n_heads: int | None, storage: Storage) -> tuple[HeadsConfig, Params]:
        """The heads with kernels in the form of `storage`, and the LM head that they share."""
        packed = partial(self._packed, n_heads, storage)
        if not storage.panel:
            return packed()
        files = {tensor.file for tensor in self.stored.tensors.values()} | self.base.files
        marks = (
            self.stored.heads,
            self.base.config,
            n_heads,
            self.form,
            storage,
            self.form.kernels.mark,
        )
        return kept("draft heads", files, marks, packed)

    def _packed(self, n_heads: int | None, storage: Storage) -> tuple[HeadsConfig, Params]:
        heads, params, _ = load_heads(
            self.stored,
            self.base.config,
            self.mesh,
            n_heads,
            self.form.dtype.name,
            convert=partial(place_head, storage=storage, kernels=self.form.kernels),
            allow_other_base=True,  # `open_drafter` has checked it
        )
        if vocabulary.GROUP in params and self.stored.heads.lm_head == "shared":
            columns = self._lm_head(storage)
            params[vocabulary.GROUP] = params[vocabulary.GROUP] | columns
        return heads, params

    def _lm_head(self, storage: Storage) -> Params:
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
        return LoadedDrafter(
            make_drafter(HeadsConfig(n_heads=1, lm_head="shared"), base.config)
        )
    if isinstance(source, StoredHeads):
        source = source.fitted(base)
        check_base(source, base.config, expected, allow_other=expected is None)
        drafter = make_drafter(source.heads, base.config)
        return LoadedHeads(
            drafter,
            directory=source.directory,
            stored=source,
            base=base,
            form=form,
            mesh=mesh,
        )
    from medusa_jax.api.baselines import load_baseline

    heads, params = load_baseline(
        source, tokenizer, form.dtype, mesh, form.storage, form.kernels
    )
    return LoadedDrafter(make_drafter(heads, base.config), params)

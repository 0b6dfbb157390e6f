"""This project's format (`native_heads.py`) as a layout that heads are converted to."""

from flax.traverse_util import unflatten_dict

from medusa_jax.arch import HeadsConfig
from medusa_jax.files.copies import copy_inside
from medusa_jax.files.layouts.layout import Export, Layout
from medusa_jax.files.layouts.native_heads import NATIVE, base_record, save_heads
from medusa_jax.heads import vocabulary
from medusa_jax.heads.names import drafter_at


class NativeFiles(Layout):
    """`heads.safetensors` and `heads.json`, which `open_heads` recognises by their names."""

    name = NATIVE
    drafters, draft_vocab = ("*",), True
    loading = "`medusa serve --model {base} --drafter {out}`"

    def how_to_load(self, heads: HeadsConfig, base: str, out: str) -> str:
        """A class of another module is named."""
        return super().how_to_load(heads, base, drafter_at(heads.drafter, out))

    def write(self, export: Export, out: str) -> None:
        """Write them with the backbone's fingerprint and the tree, if any."""
        stored = export.stored
        base = base_record(export.base.config, export.base.fingerprint())
        recipe = stored.meta.get("recipe")
        if not isinstance(recipe, dict):
            recipe = {"converted_from": stored.layout, "config": stored.meta}
        params = unflatten_dict(export.params, sep="/")
        if stored.ids is not None:
            params[vocabulary.GROUP] = {"ids": stored.ids}
        dtype = export.dtype or None
        save_heads(out, stored.heads, params, base=base, recipe=recipe, dtype=dtype)
        copy_inside(stored.directory, "tree.json", out)

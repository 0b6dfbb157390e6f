"""Reading compiled programs: small excerpts by hand, and those of this process's own device."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from medusa_jax.hlo.program import read_instruction
from research.compiled import warnings
from research.compiled.costs import kernels, kernels_of, of_all_layers, step_costs
from research.compiled.readers import read_program

# A loop of a layer, its LM head, and a sampler of which one branch counts to 40.
LAYER = "jit(decode_loop)/while/body/backbone/jit(_run_layer)/DecoderLayer"
TOP_P = "jit(decode_loop)/while/body/accept/sampling/top_p/cond"
TEXT = f"""HloModule jit_decode_loop, is_scheduled=true

%fused.1 (p.0: bf16[64,256], p.1: bf16[256,512]) -> f32[64,512] {{
  %p.0 = bf16[64,256]{{1,0}} parameter(0)
  %p.1 = bf16[256,512]{{1,0}} parameter(1)
  ROOT %conv.1 = f32[64,512]{{1,0:T(8,128)}} convolution(%p.0, %p.1), dim_labels=bf_io->bf
}}

%round.1 (c.0: (s32[], f32[64,1])) -> (s32[], f32[64,1]) {{
  %c.0 = (s32[], f32[64,1]{{1,0}}) parameter(0)
  ROOT %halve.1 = (s32[], f32[64,1]{{1,0}}) fusion(%c.0), kind=kLoop, calls=%fused.1, metadata={{op_name="{TOP_P}/while/body/reduce_sum"}}, backend_config={{"estimated_cycles":"100"}}
}}

%bound.1 (c.1: (s32[], f32[64,1])) -> pred[] {{
  %c.1 = (s32[], f32[64,1]{{1,0}}) parameter(0)
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%c.1), index=0
  %forty = s32[]{{:T(128)}} constant(40)
  ROOT %lt.1 = pred[]{{:T(512)}} compare(%i.1, %forty), direction=LT
}}

%cut.1 (b.0: f32[64,512]) -> f32[64,1] {{
  %b.0 = f32[64,512]{{1,0}} parameter(0)
  ROOT %while.2 = (s32[], f32[64,1]{{1,0}}) while(%b.0), condition=%bound.1, body=%round.1, metadata={{op_name="{TOP_P}/while"}}
}}

%keep.1 (b.1: f32[64,512]) -> f32[64,1] {{
  ROOT %b.1 = f32[64,1]{{1,0}} parameter(0)
}}

%body.1 (s.0: (s32[], bf16[256,512])) -> (s32[], bf16[256,512]) {{
  %s.0 = (s32[], bf16[256,512]{{1,0}}) parameter(0)
  %w.1 = bf16[256,512]{{1,0}} get-tuple-element(%s.0), index=1
  %slice-start.1 = ((bf16[256,512]{{1,0:T(8,128)(2,1)}}), bf16[128,512]{{1,0:T(8,128)(2,1)S(1)}}, s32[]{{:S(2)}}) slice-start(%w.1), slice={{[0:128], [0:512]}}
  %slice-done.1 = bf16[128,512]{{1,0:T(8,128)(2,1)S(1)}} slice-done(%slice-start.1)
  %joined.1 = bf16[256,512]{{1,0:S(1)}} custom-call(%slice-done.1, %w.1), custom_call_target="ConcatBitcast"
  %product.1 = f32[64,512]{{1,0:T(8,128)}} fusion(%w.1, %joined.1), kind=kOutput, calls=%fused.1, metadata={{op_name="{LAYER}/mlp/down_proj/dot_general"}}, backend_config={{"window_config":{{"estimated_cycles":"3000"}}}}
  %score.1 = f32[64,512]{{1,0}} fusion(%product.1), kind=kOutput, calls=%fused.1, metadata={{op_name="{LAYER}/self_attn/attention/dot_general"}}, backend_config={{"estimated_cycles":"500"}}
  %logits.1 = f32[64,512]{{1,0}} fusion(%score.1), kind=kOutput, calls=%fused.1, metadata={{op_name="jit(decode_loop)/while/body/lm_head/Llama.lm_head/lm_head/dot_general"}}, backend_config={{"estimated_cycles":"70"}}
  %cond.1 = f32[64,1]{{1,0}} conditional(%logits.1, %logits.1, %logits.1), branch_computations={{%keep.1, %cut.1}}, metadata={{op_name="{TOP_P}"}}
  ROOT %out.1 = (s32[], bf16[256,512]{{1,0}}) tuple(%cond.1, %w.1)
}}

%more.1 (s.1: (s32[], bf16[256,512])) -> pred[] {{
  %s.1 = (s32[], bf16[256,512]{{1,0}}) parameter(0)
  ROOT %p.9 = pred[] constant(true)
}}

ENTRY %main.1 (a.0: bf16[256,512]) -> (s32[], bf16[256,512]) {{
  %a.0 = bf16[256,512]{{1,0}} parameter(0)
  %t.1 = (s32[], bf16[256,512]{{1,0}}) tuple(%a.0, %a.0)
  ROOT %while.1 = (s32[], bf16[256,512]{{1,0}}) while(%t.1), condition=%more.1, body=%body.1, metadata={{op_name="jit(decode_loop)/while"}}
}}
"""


def test_an_instruction_is_read_with_layouts_and_tuples():
    x = read_instruction(
        "  ROOT %copy-start.4 = (bf16[1,32,512,128]{3,1,2,0:T(8,128)(2,1)S(1)}, "
        "f8e4m3fn[7,2]{1,0}, /*index=2*/u32[]{:S(2)}) copy-start(%copy-done.3), "
        'metadata={op_name="a/b"}, backend_config={"estimated_cycles":"12"}'
    )
    assert (x.name, x.opcode) == ("copy-start.4", "copy-start")
    assert x.operands == ("copy-done.3",)
    assert (x.label, x.cycles) == ("a/b", 12)
    assert [a.sizes for a in x.results] == [(1, 32, 512, 128), (7, 2), ()]
    assert [a.space for a in x.results] == [1, 0, 2]
    assert [a.bytes for a in x.results] == [2 * 32 * 512 * 128, 14, 4]


@pytest.mark.parametrize("filters, sampling", [((), 0), (("top_p",), 40 * 100)])
def test_cycles_count_loops_the_branch_and_what_is_loaded_ahead(filters, sampling):
    costs = step_costs(read_program(TEXT), bytes_per_cycle=64.0, filters=filters)
    stages = of_all_layers(costs, compiled=1, n_layers=3)
    ahead = 128 * 512 * 2 / 64  # read by the product
    expected = {"backbone": 3 * (3000 + ahead), "attention": 3 * 500, "lm_head": 70}
    assert stages == expected | ({"sampling": sampling} if sampling else {})
    # Of a layer: the load, the bitcast that joins its parts, two products.
    assert kernels(costs, 1, 3) == 3 * 4 + 1 + (40 * 2 if sampling else 0)


def found_in(*lines, computations="", vocab_size=512, cache_numbers=4096, large=1024, platform="tpu"):  # fmt: skip
    """Names of the warnings about a step of these instructions."""
    root = "  ROOT %out.1"
    text = TEXT.replace(root, "".join(f"  {x}\n" for x in lines) + root)
    program = read_program(text.replace("\n%body.1", f"\n{computations}\n%body.1"))
    costs = step_costs(program, 64.0, filters=("top_p",))
    found = warnings.warnings_of(program, costs, vocab_size, cache_numbers, platform, large)
    return [line.partition(":")[0] for line in found]


CACHE = "%copy.1 = bf16[8,4,128,64]{3,2,1,0:T(8,128)(2,1)} copy(%w.1)"
DEFECTS = {
    "%sort.1 = (f32[1,6,512]{2,1,0}, s32[1,6,512]{2,1,0}) sort(%logits.1), dimensions={2}": warnings.SORT,
    "%send.1 = (f32[8]{0}, u32[], token[]) send(%w.1)": warnings.HOST,
    "%x.1 = f32[64,512]{1,0} convolution(%logits.1, %score.1), dim_labels=bf_io->bf": warnings.FLOAT32,
    "%while.5 = (s32[], f32[64,1]{1,0}) while(%w.1), condition=%more.1, body=%keep.1": warnings.LOOP,
}


def test_each_defect_is_named():
    for line, warning in DEFECTS.items():
        assert found_in(line) == [warning]
    assert found_in(CACHE, cache_numbers=8 * 4 * 128 * 64) == [warnings.COPY]
    assert found_in(CACHE, cache_numbers=10**6) == []


@pytest.mark.parametrize("n_layers", [1, 4])
def test_kernels_of_a_compiled_program_with_what_they_read(n_layers):
    """By definition: the loop's product reads its kernel and its row once a step."""

    @jax.jit
    def loop(w, x, n):
        return lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)

    w, x = jnp.ones((256, 256)), jnp.ones((1, 256))
    found, read = kernels_of(loop.lower(w, x, 5).compile(), n_layers)
    assert 1 <= found <= 5
    assert w.nbytes + x.nbytes <= read < 1.1 * w.nbytes

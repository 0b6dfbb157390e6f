"""What is read from the text of a compiled program."""

import pytest

from medusa_jax.hlo.collectives import collectives, sent_by_kind

PROGRAM = """HloModule jit_f, entry_computation_layout={...}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %g = f32[4,8]{1,0} all-gather(%x), channel_id=2, replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}
}

%outer (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %w = (s32[], f32[4,8]{1,0}) while(%t), condition=%c, body=%inner
  %s = bf16[2,8]{1,0} reduce-scatter(%w), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}

%fused (p: f32[4]) -> f32[4] {
  %moved = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main.1 (p: f32[4,8]) -> f32[4,8] {
  %r = (f32[4,8]{1,0}, s32[]) all-reduce(%p, %q), replica_groups=mesh['a'=2,'b'=4] {'a','b'}, to_apply=%add
  %turned = f32[2]{0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'b'}
  %part = pred[8]{0} all-to-all(%p), replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}
  %v = (s32[], f32[4,8]{1,0}) while(%t), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %f = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
}
"""


def test_kinds_sizes_groups_and_loops():
    *all_found, turned = sorted(
        collectives(PROGRAM), key=lambda c: c.bytes == 8 and c.kind == "all-reduce"
    )
    assert (turned.bytes, turned.group) == (8, 4)
    found = {c.kind: c for c in all_found}
    assert {kind: (c.bytes, c.group, c.trips) for kind, c in found.items()} == {
        "all-reduce": (4 * 8 * 4 + 4, 8, ()),
        "all-to-all": (8, 2, ()),
        "all-gather": (4 * 8 * 4, 2, (3, 0)),
        "reduce-scatter": (2 * 8 * 2, 4, (3,)),
        "collective-permute": (16, 2, ()),
    }
    assert [a.sizes for a in found["all-reduce"].arrays] == [(4, 8), ()]


def test_bytes_that_a_device_sends():
    """A ring of n: a sum passes twice (n - 1) / n of it, what is gathered once."""
    assert sent_by_kind(collectives(PROGRAM), unknown=5) == pytest.approx(
        {
            "all-reduce": 2 * 7 / 8 * 132 + 2 * 3 / 4 * 8,
            "all-to-all": 8 / 2,
            "all-gather": 15 * 128 / 2,
            "reduce-scatter": 3 * 3 * 32,
            "collective-permute": 16,
        }
    )
    assert sent_by_kind(collectives("")) == {}
    with pytest.raises(ValueError, match="unknown form of device groups"):
        collectives(PROGRAM.replace("replica_groups=[4,2]", "replica_groups=new[4,2]"))


def test_asynchronous_forms_of_accelerators_count_what_arrives():
    text = """HloModule jit_f

ENTRY %main.1 (p: bf16[4,8]) -> bf16[16,8] {
  %g = (bf16[4,8]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)S(1)}) all-gather-start(%p), replica_groups=[1,4]<=[4], dimensions={0}
  %gathered = bf16[16,8]{1,0} all-gather-done(%g)
  %m = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %s = f32[8]{0} all-reduce-start(%p), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""
    found = {c.kind: c.bytes for c in collectives(text)}
    assert found == {"all-gather": 256, "collective-permute": 32, "all-reduce": 32}

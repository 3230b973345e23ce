"""Readers of the HLO that XLA writes for TPU, GPU and CPU."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compiled.hlo import ArrayShape, Module, take_census

LEAF = 64 * 4 * 128 * 2  # bytes of bf16[64,4,128]

# As XLA:TPU writes it: a leaf is prefetched, another is copied, a third is updated in
# place; an extent goes to the host.
TPU = """\
HloModule jit_program, is_scheduled=true, entry_computation_layout={(bf16[64,4,128])}

%fused_computation (param_0.1: bf16[64,4,128], param_1.2: s32[8]) -> bf16[8,4,128] {
  %param_0.1 = bf16[64,4,128]{2,1,0:T(4,128)(2,1)} parameter(0)
  %param_1.2 = s32[8]{0:T(128)S(1)} parameter(1)
  %custom-call.8 = s32[8]{0:T(128)} custom-call(%param_1.2), custom_call_target="AssumeGatherIndicesInBound"
  ROOT %gather.1 = bf16[8,4,128]{2,1,0:T(4,128)(2,1)} gather(%param_0.1, %custom-call.8), offset_dims={1,2}
}

%fused_scatter (param_0.2: bf16[64,4,128], param_1.3: bf16[8,4,128]) -> bf16[64,4,128] {
  %param_0.2 = bf16[64,4,128]{2,1,0:T(4,128)(2,1)} parameter(0)
  %param_1.3 = bf16[8,4,128]{2,1,0:T(4,128)(2,1)} parameter(1)
  ROOT %scatter.1 = bf16[64,4,128]{2,1,0:T(4,128)(2,1)} scatter(%param_0.2, %param_1.3)
}

ENTRY %main.2 (leaf.1: bf16[64,4,128], other.1: bf16[64,4,128], plan.1: s32[8]) -> (bf16[8,4,128], bf16[64,4,128]) {
  %leaf.1 = bf16[64,4,128]{2,1,0:T(4,128)(2,1)} parameter(0)
  %other.1 = bf16[64,4,128]{2,1,0:T(4,128)(2,1)} parameter(1)
  %plan.1 = s32[8]{0:T(128)} parameter(2)
  %copy-start = (bf16[64,4,128]{2,1,0:T(4,128)(2,1)S(1)}, bf16[64,4,128]{2,1,0:T(4,128)(2,1)}, u32[]{:S(2)}) copy-start(%leaf.1), cross_program_prefetch_index=0
  %copy-done = bf16[64,4,128]{2,1,0:T(4,128)(2,1)S(1)} copy-done(%copy-start)
  %copy.3 = s32[]{:T(128)} copy(%plan.1)
  %copy.4 = bf16[64,128,4]{1,2,0:T(4,128)(2,1)} copy(%other.1), backend_config={"flag_configs":[],"aliasing_operands":{"lists":[]}}
  %gather_fusion = bf16[8,4,128]{2,1,0:T(4,128)(2,1)S(1)} fusion(%copy-done, /*index=1*/%plan.1), kind=kCustom, calls=%fused_computation, backend_config={"flag_configs":[],"aliasing_operands":{"lists":[]}}
  %scatter_fusion.7 = bf16[64,4,128]{2,1,0:T(4,128)(2,1)} fusion(%other.1, %gather_fusion), kind=kCustom, calls=%fused_scatter, backend_config={"flag_configs":[],"aliasing_operands":{"lists":[{"indices":["0","3"]}]}}
  %pallas = bf16[64,4,128]{2,1,0:T(4,128)(2,1)} custom-call(%scatter_fusion.7), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (0, {})}
  %copy-start.1 = (bf16[8,4,128]{2,1,0:T(4,128)(2,1)S(5)}, bf16[8,4,128]{2,1,0:T(4,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(%gather_fusion)
  %copy-done.1 = bf16[8,4,128]{2,1,0:T(4,128)(2,1)S(5)} copy-done(%copy-start.1)
  ROOT %tuple.1 = (bf16[8,4,128]{2,1,0:T(4,128)(2,1)S(5)}, bf16[64,4,128]{2,1,0:T(4,128)(2,1)}) tuple(%copy-done.1, %pallas)
}
"""  # noqa: E501

# As XLA:GPU writes it: two loops, one of four turns, one of who knows how many; each
# turn copies a row to the host.
GPU = """\
HloModule jit_program, is_scheduled=true

%body (p.1: (s32[], bf16[8,4,128])) -> (s32[], bf16[8,4,128]) {
  %p.1 = (s32[], bf16[8,4,128]{2,1,0:S(5)}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %host.1 = bf16[8,4,128]{2,1,0:S(5)} get-tuple-element(%p.1), index=1
  %row.1 = bf16[1,4,128]{2,1,0} fusion(%i.1), kind=kLoop, calls=%fused_row
  %dynamic-update-slice.1 = bf16[8,4,128]{2,1,0:S(5)} dynamic-update-slice(%host.1, %row.1, %i.1)
  ROOT %tuple.2 = (s32[], bf16[8,4,128]{2,1,0:S(5)}) tuple(%i.1, %dynamic-update-slice.1)
}

%condition (p.2: (s32[], bf16[8,4,128])) -> pred[] {
  %p.2 = (s32[], bf16[8,4,128]{2,1,0:S(5)}) parameter(0)
  ROOT %constant.1 = pred[] constant(true)
}

ENTRY %main.3 (a.1: (s32[], bf16[8,4,128])) -> (s32[], bf16[8,4,128]) {
  %a.1 = (s32[], bf16[8,4,128]{2,1,0:S(5)}) parameter(0)
  %while.1 = (s32[], bf16[8,4,128]{2,1,0:S(5)}) while(%a.1), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %while.2 = (s32[], bf16[8,4,128]{2,1,0:S(5)}) while(%while.1), condition=%condition, body=%body
  %all-gather-start.1 = (f32[4]{0}, f32[16]{0}) all-gather-start(%b.1), replica_groups={}
  ROOT %tuple.3 = (s32[], bf16[8,4,128]{2,1,0:S(5)}) tuple(%while.2)
}
"""  # noqa: E501


def test_a_tpu_program_is_counted():
    census = take_census(TPU, {LEAF})
    # A gather, a scatter, a Pallas kernel, and the copy that turns a leaf around. Not
    # what names and orders, the scalar, nor the copies between memories.
    assert census.kernels == 4
    assert (census.host_copies, census.host_bytes) == (1, 8 * 4 * 128 * 2)
    assert census.whole_leaf == ("copy", "prefetch")
    assert (census.collectives, census.loops) == ((), 0)


def test_an_extent_of_as_many_bytes_as_a_leaf_is_no_leaf():
    assert take_census(TPU, {8 * 4 * 128 * 2}).whole_leaf != ()
    census = take_census(TPU, {8 * 4 * 128 * 2}, [(4, 8, 128, 1)])
    assert census.whole_leaf == ()


def test_loops_are_counted_and_known_ones_multiplied():
    census = take_census(GPU, {LEAF})
    assert (census.loops, census.unknown_loops) == (2, 1)
    row = 4 * 128 * 2
    assert census.host_bytes == 4 * row + row
    assert census.host_copies == 2
    # The row of each loop, and the collective.
    assert census.kernels == 3
    assert census.collectives == ("all-gather",)


def test_what_is_inside_a_fusion_is_not_executed_by_itself():
    module = Module.parse(TPU)
    by_name = {operation.name: operation for operation, _ in module.executed()}
    assert by_name["gather_fusion"].operands == ("copy-done", "plan.1")
    assert "gather.1" not in by_name
    sizes = {"bf16": 20, "f8e4m3fn": 10, "s32": 40, "pred": 10, "token": 0}
    for dtype, num_bytes in sizes.items():
        assert ArrayShape(dtype, (10,), 0).num_bytes == num_bytes


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="has no entry computation"):
        take_census("HloModule nothing", {LEAF})


def compile_scatter(donate):
    def scatter(leaf, ids, rows):
        return leaf.at[ids].set(rows, mode="drop", unique_indices=True)

    leaf = jax.ShapeDtypeStruct((64, 4, 128), jnp.float32)
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows = jax.ShapeDtypeStruct((8, 4, 128), jnp.float32)
    jitted = jax.jit(scatter, donate_argnums=0 if donate else ())
    return jitted.lower(leaf, ids, rows).compile().as_text()


def test_a_compiled_scatter_is_in_place_only_if_it_may_be():
    """Compiled for the CPU, where a copy goes before what must not overwrite."""
    leaf = 64 * 4 * 128 * 4
    assert take_census(compile_scatter(True), {leaf}).whole_leaf == ()
    assert take_census(compile_scatter(False), {leaf}).whole_leaf != ()


def test_a_compiled_loop_has_the_trip_count_that_it_was_given():
    def spin(x, turns):
        return jax.lax.fori_loop(0, turns, lambda _, y: jnp.sin(y) @ y, x)

    x = jnp.ones((8, 8))
    constant = jax.jit(lambda x: spin(x, 7)).lower(x).compile().as_text()
    dynamic = jax.jit(spin).lower(x, 7).compile().as_text()
    assert take_census(constant, set()).unknown_loops == 0
    census = take_census(dynamic, set())
    assert (census.loops, census.unknown_loops) == (1, 1)
    assert census.kernels > 0

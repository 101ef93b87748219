"""Context parallelism without processes: what a rank has, sees and needs, and the attention put together from parts."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from shardline.config.check import check, notes, refuse_pending
from shardline.config.load import load_config
from shardline.data.batch import Batch
from shardline.errors import ConfigError
from shardline.models import partial_attention as attention_parts
from shardline.models.attention import make_mask
from shardline.models.flavors import resolve
from shardline.models.partial_attention import merge_, part, part_backward
from shardline.parallel.context.context import (
    ContextParallel,
    attention_words,
    check_context_parallel,
    context_plan,
    describe,
    document_table,
    slices_line,
)
from shardline.parallel.context.ring import Attending, Differentiating, PairMask, pack, together, widths
from shardline.parallel.context.slices import (
    CAUSAL,
    FULL,
    MASKED,
    AttentionPlan,
    Slices,
    causal_plan,
    make_plan,
)
from shardline.parallel.tensor.async_tp import run_shapes
from shardline.parallel.tensor.tensor import TensorParallel

SOME = settings(max_examples=40, deadline=None)


# ---- who has what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4, 64])
def test_every_slice_has_one_owner_and_ranks_have_them_in_order(ranks, each):
    slices = Slices(ranks, each)
    owned = [slices.of(rank) for rank in range(ranks)]
    assert sorted(number for some in owned for number in some) == list(range(slices.total))
    assert all(list(some) == sorted(some) for some in owned)


def test_headtail_deals_out_an_early_and_a_late_slice():
    assert [Slices(4, 2).of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


def test_a_batch_is_cut_to_tokens_labels_and_positions_that_belong_together():
    tokens = torch.arange(48).view(2, 24)
    batch = Batch(tokens, tokens + 100, tokens + 200, torch.tensor([5, 6]))
    parts = [ContextParallel(Slices(3, 2), rank, "ring") for rank in range(3)]
    assert parts[1].positions(24, torch.device("cpu")).tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    seen = []
    for one in parts:
        cut, places = one.cut(batch), one.positions(24, torch.device("cpu"))
        assert torch.equal(cut.tokens, tokens[:, places])
        assert torch.equal(cut.labels, cut.tokens + 100)
        assert cut.documents is batch.documents
        assert cut.sample_ids is batch.sample_ids
        seen += places.tolist()
    assert sorted(seen) == list(range(24))


def test_a_batch_that_cannot_be_cut_is_no_silent_mistake():
    tokens = torch.zeros(1, 10, dtype=torch.int64)
    with pytest.raises(ValueError, match="10 tokens cannot be cut into 4 slices"):
        ContextParallel(Slices(2, 2), 0, "ring").cut(Batch(tokens, tokens, None, torch.zeros(1)))


# ---- who computes what -----------------------------------------------------------------------------------------------


def work(plan: AttentionPlan) -> int:
    """The number of pairs of a query and a key that a rank computes."""
    sizes = [(len(c.queries) * plan.length, len(c.keys) * plan.length, c.kind) for calls in plan.calls for c in calls]
    return sum(queries * (queries + 1) // 2 if kind == CAUSAL else queries * keys for queries, keys, kind in sizes)


@SOME
@given(ranks=st.integers(2, 32), length=st.integers(1, 40))
def test_causal_work_is_half_of_the_square_and_the_same_for_every_rank(ranks, length):
    shares = [work(causal_plan(Slices(ranks, 2), rank, length, 0)) for rank in range(ranks)]
    tokens = 2 * ranks * length
    assert sum(shares) == tokens * (tokens + 1) // 2
    assert max(shares) <= 1.05 * min(shares)


@SOME
@given(ranks=st.integers(2, 32), length=st.integers(1, 40), window=st.integers(1, 600))
def test_windows_keep_the_work_below_that_of_the_whole_context(ranks, length, window):
    """A mask costs its whole rectangle: at most the pairs of two more slices per slice than the window has."""
    plans = [causal_plan(Slices(ranks, 2), rank, length, window) for rank in range(ranks)]
    tokens = 2 * ranks * length
    assert sum(map(work, plans)) <= min(tokens * tokens, tokens * (window + 2 * length))


def test_contiguous_slices_leave_the_last_rank_most_of_the_work():
    """What headtail is for."""
    shares = [work(causal_plan(Slices(4, 1), rank, 16, 0)) for rank in range(4)]
    assert shares[3] > 6 * shares[0]
    assert sum(shares) == 64 * 65 // 2


def test_pairs_of_slices_are_computed_once_in_few_calls():
    """4 ranks: 36 of the 64 pairs of slices see each other; a rank runs a kernel once per rank."""
    plans = [causal_plan(Slices(4, 2), rank, 8, 0) for rank in range(4)]
    calls = [call for plan in plans for some in plan.calls for call in some]
    assert len(calls) == 16
    causal = [call for call in calls if call.kind == CAUSAL]
    assert len(causal) == 4
    assert all(call.queries == call.keys == range(2) for call in causal)
    assert sum(len(call.queries) * len(call.keys) for call in calls if call.kind == FULL) == 36 - 4 * 3


def test_only_slices_that_are_seen_are_sent():
    """To later ranks the early slice alone, to earlier ones both: three quarters of what a plain ring sends."""
    plans = [causal_plan(Slices(4, 2), rank, 8, 0) for rank in range(4)]
    assert [plan.sent(backward=False) for plan in plans] == [3, 4, 5, 6]
    assert [plan.sent(backward=True) for plan in plans] == [9, 9, 9, 9]
    contiguous = [causal_plan(Slices(4, 1), rank, 8, 0) for rank in range(4)]
    assert [plan.sent(backward=False) for plan in contiguous] == [3, 2, 1, 0]


@st.composite
def layouts(draw, most_tokens=48):
    """(slices, length of a slice, window, documents (B, S) or None)."""
    ranks, each = draw(st.integers(2, 4)), draw(st.sampled_from((1, 2)))
    slices = Slices(ranks, each)
    length = draw(st.integers(1, max(1, most_tokens // slices.total)))
    tokens = slices.total * length
    window = draw(st.sampled_from((0, 0, 1, 2, length, length + 1, 2 * length + 1)))
    if draw(st.booleans()):
        return slices, length, 0 if window >= tokens else window, None
    batch = draw(st.integers(1, 2))
    starts = [[draw(st.integers(0, 7)) == 0 for _ in range(tokens)] for _ in range(batch)]
    return slices, length, 0 if window >= tokens else window, torch.tensor(starts).cumsum(1).to(torch.int32)


def visible(tokens: int, window: int, documents: Tensor | None) -> Tensor:
    """(B or 1, S, S), written down without slices."""
    places = torch.arange(tokens)
    seen = places[:, None] >= places[None, :]
    if window:
        seen = seen & (places[:, None] - places[None, :] < window)
    if documents is None:
        return seen[None]
    return seen & (documents[:, :, None] == documents[:, None, :])


def plans_of(slices: Slices, length: int, window: int, documents: Tensor | None) -> list[AttentionPlan]:
    if documents is None:
        return [causal_plan(slices, rank, length, window) for rank in range(slices.ranks)]
    table = document_table(documents, slices.total, window).tolist()
    return [make_plan(table, slices, rank, length) for rank in range(slices.ranks)]


@SOME
@given(layouts())
def test_calls_cover_what_is_visible_once_and_nothing_needless(layout):
    slices, length, window, documents = layout
    tokens = slices.total * length
    wanted = visible(tokens, window, documents)
    covered = torch.zeros(tokens, tokens, dtype=torch.int64)
    for plan in plans_of(*layout):
        mine = slices.of(plan.rank)
        for source, calls in enumerate(plan.calls):
            theirs = slices.of(source)
            for call in calls:
                assert set(call.keys) <= set(plan.wanted[source])
                rows = torch.cat([torch.arange(length) + i * length for i in (mine[at] for at in call.queries)])
                columns = torch.cat([torch.arange(length) + j * length for j in (theirs[at] for at in call.keys)])
                region = wanted[:, rows[:, None], columns[None, :]]
                seen = rows[:, None] >= columns[None, :] if call.kind == CAUSAL else torch.ones(region.shape[1:]).bool()
                if call.kind == MASKED:
                    assert region.any(), "an empty rectangle is not computed"
                    assert not region.all(), "a full one needs no mask"
                    pair = PairMask(documents, window, length, cap=None).allowed(
                        mine[call.queries.start], theirs[call.keys.start], torch.device("cpu")
                    )
                    assert torch.equal(pair[:, 0], region)
                else:
                    assert all(torch.equal(row, seen) for row in region)
                covered[rows[:, None], columns[None, :]] += seen
    assert covered.max() <= 1
    assert not (wanted & (covered == 0)).any()


@SOME
@given(layouts())
def test_own_work_in_two_is_the_same_work(layout):
    """Backward begins and ends with own keys; each of the two is worth something where there is anything to split."""
    slices, length = layout[:2]
    for plan in plans_of(*layout):
        first, last = plan.own_in_two()
        covered = torch.zeros(slices.each * length, slices.each * length, dtype=torch.int64)
        for call, sign in [*((call, -1) for call in plan.calls[plan.rank]), *((call, 1) for call in first + last)]:
            rows, columns = (slice(span.start * length, span.stop * length) for span in (call.queries, call.keys))
            region = covered[rows, columns]
            region += sign * (torch.ones_like(region).tril() if call.kind == CAUSAL else torch.ones_like(region))
        assert not covered.any()
        assert first
        assert last or slices.each == 1


@SOME
@given(layouts())
def test_what_a_rank_wants_is_what_the_other_gives(layout):
    plans = plans_of(*layout)
    for plan in plans:
        for other in plans:
            assert plan.wanted[other.rank] == other.given[plan.rank]
    there = sum(plan.sent(backward=False) for plan in plans)
    assert sum(plan.sent(backward=True) for plan in plans) == 2 * there


# ---- attention from parts --------------------------------------------------------------------------------------------


def drawn(*shape: int, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def whole_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, cap: float | None = None) -> Tensor:
    """PyTorch's own over (B, S, H, D); with a cap of the scores, the formula."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if cap is not None:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = cap * torch.tanh(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 / cap)
        return (scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ v).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True).transpose(1, 2)


@SOME
@given(
    layouts(),
    st.sampled_from(((4, 4), (4, 2), (3, 1))),
    st.sampled_from((8, 6)),
    st.sampled_from((None, 0.7)),
    st.integers(0, 100),
)
def test_ranks_together_compute_what_one_computes(layout, heads, v_dim, cap, seed):
    """All ranks' plans, run one after the other: outputs and gradients of PyTorch's attention over whole sequences."""
    slices, length, window, documents = layout
    tokens, batch = slices.total * length, 2 if documents is None else documents.shape[0]
    sizes = ((heads[0], 8), (heads[1], 8), (heads[1], v_dim))
    q, k, v = (drawn(batch, tokens, *size, seed=seed + i).requires_grad_() for i, size in enumerate(sizes))
    gradient = drawn(batch, tokens, heads[0], v_dim, seed=seed + 9)
    expected = whole_attention(q, k, v, visible(tokens, window, documents), cap)
    expected.backward(gradient)
    where = [
        ContextParallel(slices, rank, "ring").positions(tokens, torch.device("cpu")) for rank in range(slices.ranks)
    ]
    q_, k_, v_ = (x.detach() for x in (q, k, v))
    blocks = [pack(k_[:, places], v_[:, places], slices.each) for places in where]
    added = torch.zeros(slices.ranks, *blocks[0].shape, dtype=torch.float64)
    seen = PairMask(documents, window, length, cap)
    for plan, places in zip(plans_of(*layout), where, strict=True):
        attending = Attending(q_[:, places], widths(k_, v_), plan, seen)
        spans = [(source, span) for source, span in enumerate(plan.wanted) if span is not None]
        for source, span in spans:
            attending.add(source, span, blocks[source][span.start : span.stop])
        out, lse = attending.result(torch.float64)
        torch.testing.assert_close(out, expected[:, places])
        differentiating = Differentiating(gradient[:, places], q_[:, places], out, lse, widths(k_, v_), plan, seen)
        for source, span in spans:
            added[source, span.start : span.stop] += differentiating.add(
                source, span, blocks[source][span.start : span.stop], plan.calls[source]
            )
        torch.testing.assert_close(differentiating.dq.transpose(1, 2), q.grad[:, places])
    for rank, places in enumerate(where):
        dk, dv = together(added[rank], widths(k_, v_))
        torch.testing.assert_close(dk, k.grad[:, places])
        torch.testing.assert_close(dv, v.grad[:, places])


@SOME
@given(st.data())
def test_parts_merge_in_any_order_whatever_rows_see(data):
    """Rows that see nothing of a part, of several parts or of all of them."""
    keys = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    allowed = torch.tensor([[data.draw(st.booleans()) for _ in range(sum(keys))] for _ in range(5)])[None, None]
    q, k, v = drawn(1, 2, 5, 8, seed=1), drawn(1, 2, sum(keys), 8, seed=2), drawn(1, 2, sum(keys), 8, seed=3)
    parts = list(zip(k.split(keys, 2), v.split(keys, 2), allowed.split(keys, 3), strict=True))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=q.dtype)
    for some_k, some_v, some in data.draw(st.permutations(parts)):
        merge_(out, lse, *part(q, some_k, some_v, allowed=some))
    scores = (q @ k.transpose(-2, -1) * 8**-0.5).masked_fill(~allowed, float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1).nan_to_num(0.0) @ v)  # of a row that sees nothing: 0


@pytest.mark.parametrize("mask", ["none", "causal", "some"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("v_dim", [8, 6])
def test_the_definition_and_the_kernel_agree(mask, heads, v_dim):
    """`math` serves where no kernel does; cut into blocks of a few rows it is the same."""
    q, k = drawn(2, heads[0], 12, 8, seed=1), drawn(2, heads[1], 12, 8, seed=2)
    v, gradient = drawn(2, heads[1], 12, v_dim, seed=3), drawn(2, heads[0], 12, v_dim, seed=4)
    allowed = drawn(2, 1, 12, 12, seed=5) > 0 if mask == "some" else None
    if allowed is not None:
        allowed[0, 0, 3] = False
    options = (mask == "causal", allowed)
    out, lse = part(q, k, v, *options)
    finite = lse.masked_fill(lse == float("-inf"), 0)
    expected = [out, lse, *part_backward(gradient, q, k, v, out, finite, *options)]
    with (
        patch.object(attention_parts, "_kernel", lambda *_: "math"),
        patch.object(attention_parts, "MOST_SCORES", 2 * heads[0] * 12 * 5),
    ):
        out, lse = part(q, k, v, *options)
        found = [out, lse, *part_backward(gradient, q, k, v, out, finite, *options)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_kernel_that_is_wrong_or_missing_is_not_used(caplog):
    def wrong(q, k, v, causal, allowed):
        out, lse = attention_parts._math(q, k, v, causal, allowed)
        return out, lse + 0.5

    device = torch.device("cpu")
    with patch.dict(attention_parts.KERNELS, {"flash": attention_parts.Kernel(wrong, attention_parts._math_backward)}):
        assert not attention_parts._agrees("flash", device, torch.float32, 16, False)
    assert "the flash kernel cannot be used here" in caplog.text
    assert attention_parts._agrees("cpu", device, torch.float32, 16, False)
    assert attention_parts._agrees("cpu", device, torch.float32, 16, True)
    assert attention_parts._agrees("cpu", device, torch.float32, 16, True, v_dim=8)
    assert not attention_parts._agrees("cudnn", device, torch.bfloat16, 16, False)


def test_documents_are_masked_like_those_of_whole_sequences():
    """The table's `visible` above against the mask that one process uses."""
    arch = resolve(load_config(overrides={"model.flavor": "debugmodel"}).model)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 2, 2, 2, 2, 3]])
    mask = make_mask(arch, documents, torch.float32, 3, documents)
    assert torch.equal(mask.allowed[:, 0], visible(8, 3, documents))


# ---- what a config asks for ------------------------------------------------------------------------------------------


def config_of(cp: int = 4, tp: int = 1, length: int = 64, overrides=None, **settings):
    values = {f"parallelism.{key}": value for key, value in settings.items()}
    return load_config(
        overrides={
            "parallelism.context_parallel_degree": cp,
            "parallelism.tensor_parallel_degree": tp,
            "training.seq_len": length,
            "model.flavor": "debugmodel",
            "model.overrides": {"n_heads": 8, "n_kv_heads": 4, **(overrides or {})},
            **values,
        }
    )


def refused(config, tp: int = 1) -> str:
    cp = config.parallelism.context_parallel_degree
    with pytest.raises(ConfigError) as caught:
        check_context_parallel(context_plan(config, cp, 0), config, resolve(config.model), tp)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tp", "length", "settings", "message"),
    [
        (
            1,
            60,
            {},
            "training.seq_len = 60 is not a multiple of 2 x context_parallel_degree 4 = 8; nearest lengths: 56 and 64",
        ),
        (2, 72, {}, r"2 x context_parallel_degree 4 x tensor_parallel_degree 2 = 16; nearest lengths: 64 and 80"),
        (1, 3, {}, "nearest lengths: 8$"),
        (
            1,
            62,
            {"context_parallel_load_balancer": None},
            "not a multiple of context_parallel_degree 4; nearest .*: 60 and 64",
        ),
        (1, 62, {"context_parallel_rotate_method": "ulysses"}, "not a multiple of context_parallel_degree 4; nearest"),
    ],
)
def test_lengths_that_cannot_be_cut(tp, length, settings, message):
    assert re.search(message, refused(config_of(tp=tp, length=length, **settings), tp))


def test_without_sequence_parallel_lengths_need_not_divide_by_tp():
    config = config_of(tp=2, length=72, enable_sequence_parallel=False)
    check_context_parallel(context_plan(config, 4, 0), config, resolve(config.model), 2)


def test_validation_has_its_own_length():
    config = config_of().replace({"validation.enable": True, "validation.seq_len": 36})
    assert "validation.seq_len = 36" in refused(config)


@pytest.mark.parametrize(
    ("cp", "tp", "overrides", "message"),
    [
        (3, 1, {"n_heads": 8, "n_kv_heads": 4}, "8 heads and 4 KV heads cannot be shared by 3 .* that fit: 1, 2, 4, 8"),
        (16, 1, {"n_heads": 8, "n_kv_heads": 4}, r'or set it to "ring"'),
        (4, 4, {"n_heads": 8, "n_kv_heads": 4}, "2 heads and 1 KV heads of each of 4 tensor-parallel ranks"),
    ],
)
def test_heads_that_ulysses_cannot_share(cp, tp, overrides, message):
    config = config_of(cp, tp, 960, overrides, context_parallel_rotate_method="ulysses")
    assert re.search(message, refused(config, tp))


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_ulysses_takes_fewer_kv_heads_than_ranks(kv_heads):
    config = config_of(8, 1, 64, {"n_heads": 8, "n_kv_heads": kv_heads}, context_parallel_rotate_method="ulysses")
    check_context_parallel(context_plan(config, 8, 0), config, resolve(config.model), 1)


@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_kernels_that_cannot_work_in_parts(backend):
    assert "set it to 'auto'" in refused(config_of(overrides={"attn_backend": backend}))
    config = config_of(overrides={"attn_backend": backend}, context_parallel_rotate_method="ulysses")
    check_context_parallel(context_plan(config, 4, 0), config, resolve(config.model), 1)


def test_other_load_balancers_are_refused_with_what_to_use():
    with pytest.raises(
        ConfigError, match=r"expected 'headtail' or 'none', got 'tail'; 'headtail' balances causal masks$"
    ):
        check(config_of(context_parallel_load_balancer="tail"))
    with pytest.raises(ConfigError, match=r"'ptrr' is not built yet .load balancing by ptrr."):
        refuse_pending(config_of(context_parallel_load_balancer="ptrr"))
    check(config_of(context_parallel_load_balancer=None))
    check(config_of(cp=1, context_parallel_load_balancer="ptrr"))


def test_keys_without_effect_are_said():
    assert any(
        "context_parallel_degree is 1" in line for line in notes(config_of(1, context_parallel_rotate_method="ring"))
    )
    config = config_of(context_parallel_rotate_method="ulysses", context_parallel_load_balancer=None)
    assert any("all tokens of its heads" in line for line in notes(config))
    assert not any("context" in line for line in notes(config_of(context_parallel_rotate_method="ring")))


def test_alltoall_is_ring_and_ulysses_needs_no_balance():
    assert context_plan(config_of(context_parallel_rotate_method="alltoall"), 4, 1).method == "ring"
    assert context_plan(config_of(), 4, 1) == ContextParallel(Slices(4, 2), 1, "allgather")
    assert context_plan(config_of(context_parallel_rotate_method="ulysses"), 4, 1).slices.each == 1


def test_products_are_measured_with_a_ranks_tokens():
    config = config_of(cp=4, tp=2).replace(
        {"training.local_batch_size": 2, "validation.enable": True, "validation.seq_len": 128}
    )
    shapes = run_shapes(config, resolve(config.model), TensorParallel(2, True, True, True), torch.float32)
    assert {shape.product.rows for shape in shapes} == {2 * 64 // 4, 8 * 128 // 4}


def test_the_log_says_which_kernels_compute_the_parts():
    def words(overrides=None, **settings):
        config = config_of(overrides=overrides, **settings)
        return attention_words(config, resolve(config.model), torch.device("cpu"), torch.float32, otherwise="sdpa")

    assert words() == "cpu, in parts"
    assert words({"attn_mask_type": "block_causal"}) == "cpu, in parts"
    assert words(context_parallel_rotate_method="ulysses") == "sdpa"
    assert words(cp=1) == "sdpa"


def test_the_log_says_who_has_what():
    plan = context_plan(config_of(context_parallel_rotate_method="ring"), 4, 0)
    assert describe(plan, 4096) == (
        "context parallel over 4 ranks, 2 slices of 512 tokens each, keys and values passed point to point"
    )
    assert slices_line(plan, 64) == (
        "context of 64 tokens in 8 slices of 8: cp 0 has 0 and 7, cp 1 has 1 and 6, cp 2 has 2 and 5, cp 3 has 3 and 4"
    )
    assert slices_line(context_plan(config_of(64), 64, 0), 1280).endswith(
        "cp 2 has 2 and 125, ..., cp 63 has 63 and 64"
    )


@pytest.mark.parametrize(
    ("kernel", "masked"), [("flash", False), ("cudnn", False), ("efficient", False), ("efficient", True)]
)
def test_ops_of_a_gpu_have_the_signatures_we_call(kernel, masked):
    """On meta tensors, of other lengths than the kernels would like."""
    q = torch.empty(1, 100, 4, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    k = torch.empty(1, 50, 2, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    allowed = torch.ones(1, 1, 100, 50, dtype=torch.bool, device="meta") if masked else None
    forward, backward = attention_parts.KERNELS[kernel]
    out, lse = forward(q, k, k, False, allowed)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [x.shape for x in backward(out, q, k, k, out, lse, False, allowed)] == [q.shape, k.shape, k.shape]

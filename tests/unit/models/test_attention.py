"""Masks, kernel choice, and the agreement of all kernels with the plain definition."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.models import partial_attention
from shardline.models.attention import (
    AttentionMask,
    attention,
    check_attention,
    choose_kernel,
    load_varlen,
    make_mask,
    make_masks,
    windows,
)
from shardline.training.setup import set_determinism

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def architecture(**changes: object) -> Architecture:
    fields = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 50, **changes}
    return Architecture(**fields)


def packed_documents(batch: int, length: int, lengths: list[int]) -> Tensor:
    """Documents of the given lengths, over and over; each row starts at another place of the pattern."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    numbers = numbers.repeat(-(-(batch + 1) * length // len(numbers)) + 1)
    rows = [numbers[row * 3 : row * 3 + length] for row in range(batch)]
    changes = torch.stack([torch.cat((torch.zeros(1), (row[1:] != row[:-1]).float())) for row in rows])
    return changes.cumsum(1).int()


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    documents: Tensor | None,
    sink: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Query by query, in loops: nothing shared with the code under test."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            seen = [j for j in range(i + 1) if not window or i - j < window]
            if documents is not None:
                seen = [j for j in seen if documents[b, i] == documents[b, j]]
            for h in range(q.shape[2]):
                scores = k[b, seen, h // group] @ q[b, i, h] / q.shape[3] ** 0.5
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                if sink is not None:
                    scores = torch.cat((scores, sink[h : h + 1]))
                out[b, i, h] = scores.softmax(0)[: len(seen)] @ v[b, seen, h // group]
    return out


@pytest.mark.parametrize("kernel", ["sdpa", "math", "flex"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("v_dim", [16, 12])
def test_kernels_follow_the_definition(kernel: str, packed: bool, window: int, v_dim: int) -> None:
    torch.manual_seed(0)
    tokens = torch.zeros(2, 24, dtype=torch.int64)
    documents = packed_documents(2, 24, [7, 3, 11]) if packed else None
    q, k, v = torch.randn(2, 24, 4, 16), torch.randn(2, 24, 2, 16), torch.randn(2, 24, 2, v_dim)
    mask = make_mask(architecture(), tokens, torch.float32, window, documents, kernel=kernel)
    found = attention(q, k, v, mask)
    torch.testing.assert_close(found, definition(q, k, v, window, documents), atol=1e-5, rtol=1e-5)


def test_narrow_values_do_not_cost_a_cpu_all_scores() -> None:
    ran = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ran.append(op.name())
            return op(*args, **(kwargs or {}))

    q, k, v = torch.randn(1, 24, 4, 16), torch.randn(1, 24, 4, 16), torch.randn(1, 24, 4, 12)
    with Watch():
        attention(q, k, v, AttentionMask("sdpa"))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran


@pytest.mark.parametrize("kernel", ["cpu", "math", "flex"])
@pytest.mark.parametrize(("window", "packed"), [(0, False), (5, True)])
def test_sinks_take_part_in_the_softmax(kernel: str, window: int, packed: bool) -> None:
    torch.manual_seed(0)
    documents = packed_documents(2, 24, [7, 3, 11]) if packed else None
    inputs = [torch.randn(2, 24, heads, 16, requires_grad=kernel != "flex") for heads in (4, 2, 2)]
    sink = torch.tensor([-1.0, 0.5, 2.0, 3.0], requires_grad=kernel != "flex")
    arch = architecture(sinks=True)
    mask = make_mask(arch, torch.zeros(2, 24, dtype=torch.int64), torch.float32, window, documents, kernel=kernel)
    found, expected = attention(*inputs, mask, sink), definition(*inputs, window, documents, sink)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    if kernel != "flex":  # whose gradients need a GPU
        gradient = torch.randn_like(found)
        for a, b in zip(*(torch.autograd.grad(x, (*inputs, sink), gradient) for x in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["math", "flex"])
@pytest.mark.parametrize(("window", "packed", "sinks"), [(0, False, False), (5, True, False), (5, False, True)])
def test_scores_may_have_a_soft_cap(
    kernel: str, window: int, packed: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_attention, "MOST_SCORES", 2 * 4 * 24 * 5)  # 5 rows at a time
    torch.manual_seed(0)
    documents = packed_documents(2, 24, [7, 3, 11]) if packed else None
    inputs = [torch.randn(2, 24, heads, 16, requires_grad=kernel != "flex") for heads in (4, 2, 2)]
    sink = torch.tensor([-1.0, 0.5, 2.0, 3.0]) if sinks else None
    arch = architecture(score_cap=0.7, sinks=sinks)
    mask = make_mask(arch, torch.zeros(2, 24, dtype=torch.int64), torch.float32, window, documents, kernel=kernel)
    found, expected = attention(*inputs, mask, sink), definition(*inputs, window, documents, sink, cap=0.7)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - definition(*inputs, window, documents, sink)).abs().max() > 1e-2
    if kernel != "flex":  # whose gradients need a GPU
        gradient = torch.randn_like(found)
        for a, b in zip(*(torch.autograd.grad(x, inputs, gradient) for x in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_kernels_of_capped_scores(hopper: set[str]) -> None:
    bf16, capped = torch.bfloat16, architecture(score_cap=5.0)
    assert choose_kernel(capped, CPU, torch.float32, plain=True) == "math"
    assert choose_kernel(capped, CUDA, bf16, plain=True) == "flex"
    assert choose_kernel(capped, CUDA, bf16, plain=False) == "flex"
    assert choose_kernel(architecture(score_cap=5.0, attn_backend="sdpa"), CUDA, bf16, plain=True) == "math"
    assert choose_kernel(architecture(score_cap=5.0, head_dim=8), CUDA, bf16, plain=True) == "math"
    with pytest.raises(UserError, match="has no score_cap"):
        choose_kernel(architecture(score_cap=5.0, attn_backend="varlen"), CUDA, bf16, plain=True)


def test_kernels_of_a_model_with_sinks_give_the_log_sum_exp() -> None:
    assert choose_kernel(architecture(sinks=True), CPU, torch.float32, plain=True) == "cpu"
    assert choose_kernel(architecture(sinks=True), CPU, torch.float32, plain=False) == "cpu"


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_end_what_a_query_sees(kernel: str, packed: bool) -> None:
    torch.manual_seed(0)
    documents = packed_documents(2, 24, [7, 3, 11]) if packed else torch.zeros(2, 24, dtype=torch.int64)
    q, k, v = torch.randn(2, 24, 4, 16), torch.randn(2, 24, 2, 16), torch.randn(2, 24, 2, 16)
    arch = architecture(window_kind="chunked")
    mask = make_mask(arch, q[:, :, 0, 0], torch.float32, 10, documents if packed else None, kernel=kernel)
    apart = documents * 100 + torch.arange(24) // 10
    torch.testing.assert_close(attention(q, k, v, mask), definition(q, k, v, 0, apart), atol=1e-5, rtol=1e-5)
    assert make_mask(arch, q[:, :, 0, 0], torch.float32, 24).allowed is None  # one chunk: plain causal


def test_chunks_are_documents_of_the_varlen_kernel() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    mask = make_mask(architecture(window_kind="chunked"), tokens, torch.bfloat16, 4, None, kernel="varlen")
    assert mask.boundaries is not None
    assert mask.boundaries.tolist() == [0, 4, 6, 10, 12]
    assert mask.window == 0


@pytest.mark.parametrize("cap", [None, 0.7])
def test_flex_mask_enters_a_compiled_function(cap: float | None) -> None:
    arch = architecture(score_cap=cap)
    q, k, v = torch.randn(2, 128, 4, 16), torch.randn(2, 128, 2, 16), torch.randn(2, 128, 2, 16)
    documents = packed_documents(2, 128, [50, 31])
    mask = make_mask(arch, q[:, :, 0, 0], torch.float32, 9, documents, kernel="flex")
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    dense = make_mask(arch, q[:, :, 0, 0], torch.float32, 9, documents, kernel="sdpa")
    torch.testing.assert_close(compiled(q, k, v, mask), attention(q, k, v, dense), atol=1e-5, rtol=1e-5)


def test_boundaries_are_the_documents_starts() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 5, 5]], dtype=torch.int32)
    mask = make_mask(architecture(), tokens, torch.bfloat16, 0, documents, kernel="varlen")
    assert mask.boundaries is not None
    assert mask.boundaries.dtype == torch.int32
    assert mask.boundaries.tolist() == [0, 2, 5, 6, 12]
    whole = make_mask(architecture(), tokens, torch.bfloat16, 4, None, kernel="varlen")
    assert whole.boundaries is not None
    assert whole.boundaries.tolist() == [0, 6, 12]
    assert whole.window == 4


def test_masks_by_window() -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    arch = architecture(n_layers=4, sliding_window=3, sliding_window_layers=(1, 3))
    assert windows(arch) == [0, 3, 0, 3]
    masks = make_masks(arch, tokens, torch.float32)
    assert set(masks) == {0, 3}
    assert masks[0].allowed is None
    assert masks[3].allowed is not None
    assert masks[3].allowed[0, 0].sum(-1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    # A window as long as the sequence hides nothing: the plain causal kernel serves.
    assert make_masks(architecture(sliding_window=8), tokens, torch.float32)[8].allowed is None


def test_documents_count_only_for_block_causal() -> None:
    tokens, documents = torch.zeros(1, 8, dtype=torch.int64), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    assert make_masks(architecture(), tokens, torch.float32, documents)[0].allowed is None
    mask = make_masks(architecture(attn_mask_type="block_causal"), tokens, torch.float32, documents)[0]
    assert mask.allowed is not None
    assert mask.allowed[0, 0].sum(-1).tolist() == [1, 2, 3, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_cpu_refuses_cuda_kernels(backend: str) -> None:
    with pytest.raises(UserError, match=r"attn_backend = .* needs a CUDA device.*--model.overrides.attn_backend=auto"):
        check_attention(architecture(attn_backend=backend), CPU, torch.float32)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Decide as on a Hopper device; kernels put into the returned set fail their probe."""
    failing: set[str] = set()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(partial_attention, "_agrees", lambda kernel, *rest: kernel not in failing)
    partial_attention.fastest_kernel.cache_clear()
    yield failing
    partial_attention.fastest_kernel.cache_clear()


@pytest.mark.parametrize(
    ("head_dim", "dtype", "failing", "expected"),
    [
        (128, torch.bfloat16, (), "cudnn"),
        (64, torch.float16, (), "cudnn"),
        (256, torch.bfloat16, (), "flash"),
        (128, torch.bfloat16, ("cudnn",), "flash"),
        (128, torch.bfloat16, ("cudnn", "flash"), "efficient"),
        (128, torch.float32, (), "efficient"),
        (20, torch.bfloat16, ("efficient",), "sdpa"),
    ],
)
def test_fastest_kernel(
    hopper: set[str], head_dim: int, dtype: torch.dtype, failing: tuple[str, ...], expected: str
) -> None:
    hopper.update(failing)
    assert choose_kernel(architecture(head_dim=head_dim), CUDA, dtype, plain=True) == expected


@pytest.mark.parametrize(("nope_dim", "v_dim", "expected"), [(128, 128, "cudnn"), (192, 128, "flash")])
def test_fastest_kernel_of_latent_attention(hopper: set[str], nope_dim: int, v_dim: int, expected: str) -> None:
    sizes = {"kv_rank": 32, "nope_dim": nope_dim, "rope_dim": 64, "v_dim": v_dim}
    arch = architecture(latent=sizes, n_kv_heads=4)
    assert choose_kernel(arch, CUDA, torch.bfloat16, plain=True) == expected


def test_deterministic_runs_avoid_cudnn(hopper: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_kernel(architecture(head_dim=128), CUDA, torch.bfloat16, plain=True) == "flash"


@pytest.mark.parametrize(("length", "expected"), [(128, "cudnn"), (8192, "cudnn"), (32, "flash"), (8256, "flash")])
def test_cudnn_gets_full_tiles_alone(hopper: set[str], length: int, expected: str) -> None:
    assert choose_kernel(architecture(), CUDA, torch.bfloat16, plain=True, length=length) == expected
    assert check_attention(architecture(), CUDA, torch.bfloat16, length) == expected


def test_a_run_keeps_pytorchs_own_choice_from_cudnn() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        set_determinism(Config(), CUDA)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_kernel_for_packed_documents(hopper: set[str]) -> None:
    bf16, f32 = torch.bfloat16, torch.float32
    assert choose_kernel(architecture(), CUDA, bf16, plain=False) == "varlen"
    assert check_attention(architecture(attn_mask_type="block_causal"), CUDA, bf16) == "varlen"
    assert check_attention(architecture(sliding_window=3), CUDA, bf16) == "varlen"
    assert check_attention(architecture(), CUDA, bf16) == "cudnn"
    assert choose_kernel(architecture(), CUDA, f32, plain=False) == "flex"
    assert choose_kernel(architecture(attn_backend="sdpa"), CUDA, bf16, plain=False) == "sdpa"
    assert choose_kernel(architecture(attn_backend="flex"), CUDA, bf16, plain=True) == "flex"
    assert choose_kernel(architecture(attn_backend="varlen"), CUDA, bf16, plain=True) == "varlen"
    with pytest.raises(UserError, match=r"bfloat16 or float16, not float32; use 'flex'"):
        choose_kernel(architecture(attn_backend="varlen"), CUDA, f32, plain=False)
    assert choose_kernel(architecture(sinks=True), CUDA, bf16, plain=True) == "cudnn"
    assert choose_kernel(architecture(sinks=True), CUDA, bf16, plain=False) == "flex"
    assert choose_kernel(architecture(sinks=True, attn_backend="sdpa"), CUDA, bf16, plain=False) == "efficient"
    with pytest.raises(UserError, match=r"no gradient for attention sinks; use 'flex'"):
        choose_kernel(architecture(sinks=True, attn_backend="varlen"), CUDA, bf16, plain=False)


def test_a_failing_probe_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert not partial_attention._agrees("cudnn", CPU, torch.float32, 64, False)
    assert "cudnn kernel cannot be used here" in caplog.text


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "varlen"])
def test_cuda_ops_have_the_signatures_we_call(kernel: str) -> None:
    """On meta tensors, forward and backward, values as the strided view the block makes: no copy of them is needed."""
    assert load_varlen()
    fused = torch.empty(2, 64, 2, 6, 32, device="meta", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = fused.split((4, 1, 1), dim=3)
    boundaries = torch.empty(5, dtype=torch.int32, device="meta")
    out = attention(
        (q * 1).flatten(2, 3), (k * 1).flatten(2, 3), v.squeeze(3), AttentionMask(kernel, 0, None, boundaries)
    )
    assert out.shape == (2, 64, 8, 32)
    assert out.is_contiguous()
    out.sum().backward()
    narrow = torch.empty(2, 64, 2, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = attention((q * 1).flatten(2, 3), (k * 1).flatten(2, 3), narrow, AttentionMask(kernel, 0, None, boundaries))
    assert out.shape == (2, 64, 8, 16)
    out.sum().backward()
    assert fused.grad is not None


def gpu_case(packed: bool, window: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None, Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 512, heads, 128, device="cuda").to(dtype) for heads in (8, 2, 2)]
    documents = packed_documents(2, 512, [100, 31, 200]).cuda() if packed else None
    return tensors, documents, torch.randn(2, 512, 8, 128, device="cuda").to(dtype)


def run(
    kernel: str,
    tensors: list[Tensor],
    documents: Tensor | None,
    window: int,
    grad: Tensor,
    cap: float | None = None,
) -> list[Tensor]:
    """The result and the gradients of `tensors`: q, k, v and perhaps a sink."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    tokens = torch.zeros(2, 512, dtype=torch.int64, device="cuda")
    mask = make_mask(architecture(head_dim=128, score_cap=cap), tokens, grad.dtype, window, documents, kernel=kernel)
    out = attention(*leaves[:3], mask, *leaves[3:])
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "packed", "window"),
    [(name, False, 0) for name in ("cudnn", "flash", "efficient", "sdpa", "varlen", "flex")]
    + [
        (name, packed, window)
        for name in ("sdpa", "varlen", "flex")
        for packed, window in ((True, 0), (True, 60), (False, 60))
    ],
)
def test_cuda_kernels_agree(kernel: str, packed: bool, window: int) -> None:
    tensors, documents, grad = gpu_case(packed, window, torch.bfloat16)
    expected = run("math", [tensor.float() for tensor in tensors], documents, window, grad.float())
    for found, wanted in zip(run(kernel, tensors, documents, window, grad), expected, strict=True):
        error = (found.float() - wanted).norm() / wanted.norm()
        assert error < 2e-2, (kernel, float(error))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "packed", "window"),
    [
        *((name, False, 0) for name in ("cudnn", "flash", "efficient", "flex")),
        ("efficient", True, 60),
        ("flex", True, 60),
    ],
)
def test_cuda_kernels_agree_on_sinks(kernel: str, packed: bool, window: int) -> None:
    tensors, documents, grad = gpu_case(packed, window, torch.bfloat16)
    tensors.append(torch.linspace(-2, 6, 8, device="cuda"))
    expected = run("math", [tensor.float() for tensor in tensors], documents, window, grad.float())
    for found, wanted in zip(run(kernel, tensors, documents, window, grad), expected, strict=True):
        error = (found.float() - wanted).norm() / wanted.norm()
        assert error < 2e-2, (kernel, float(error))


@pytest.mark.gpu
@pytest.mark.parametrize(("packed", "window"), [(False, 0), (True, 60)])
def test_cuda_kernels_agree_on_capped_scores(packed: bool, window: int) -> None:
    tensors, documents, grad = gpu_case(packed, window, torch.bfloat16)
    expected = run("math", [tensor.float() for tensor in tensors], documents, window, grad.float(), 1.5)
    for found, wanted in zip(run("flex", tensors, documents, window, grad, 1.5), expected, strict=True):
        error = (found.float() - wanted).norm() / wanted.norm()
        assert error < 2e-2, float(error)


@pytest.mark.gpu
def test_cuda_choice_runs_compiled() -> None:
    """The chosen kernels inside a compiled block: the same loss as eager, packed and plain."""
    from shardline.models.decoder import Decoder, block_function
    from shardline.models.init import init_weights

    packed = {"attn_mask_type": "block_causal"}
    sinks = {"sinks": True, "sliding_window": 40, "sliding_window_layers": (0,)}
    windows = ({"sliding_window": 40}, {"sliding_window": 40, "window_kind": "chunked"}, {"score_cap": 2.0})
    for changes in ({}, packed, *windows, sinks):
        torch._dynamo.reset()
        with torch.device("cuda"):
            model = Decoder(architecture(head_dim=64, **changes))
        init_weights(model, 0)
        model.compute_dtype = torch.bfloat16
        tokens = torch.randint(0, 50, (2, 256), device="cuda")
        losses = []
        for function in (block_function, torch.compile(block_function, fullgraph=True)):
            for block in model.layers.values():
                block.function = function
            loss = torch.stack(
                [
                    model(tokens, documents=packed_documents(2, 256, cut)).float().square().mean()
                    for cut in ([60, 9], [33])
                ]
            ).sum()
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=0)


@pytest.mark.parametrize(("head_dim", "kernel"), [(8, "sdpa"), (16, "flex")])
def test_small_heads_do_not_get_a_kernel_that_cannot_take_them(head_dim, kernel):
    """float32 on CUDA rules varlen out; the choice needs no device."""
    sizes = {"dim": 64, "n_layers": 1, "n_heads": 4, "head_dim": head_dim, "ffn_dim": 64, "vocab_size": 16}
    arch = Architecture(**sizes)
    assert choose_kernel(arch, torch.device("cuda"), torch.float32, plain=False) == kernel
    if kernel == "sdpa":
        forced = arch.with_overrides({"attn_backend": "flex"})
        with pytest.raises(UserError, match="attn_backend=sdpa"):
            choose_kernel(forced, torch.device("cuda"), torch.float32, plain=False)

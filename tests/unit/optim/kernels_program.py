"""The kernels of Adam and of rows of experts against torch: python -m tests.unit.optim.kernels_program.

On a GPU where there is one, else in Triton's interpreter. Ends with 0 where every result is right.
"""

import math
import os

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from shardline.models.experts.row_kernels import add_up_kernel, swiglu_gradient_kernel, swiglu_kernel  # noqa: E402
from shardline.optim.adam_kernel import adam_kernel  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"


def check_adam(kind: type[torch.optim.Adam], dtype: torch.dtype) -> None:
    source = torch.Generator(DEVICE).manual_seed(0)
    wanted = torch.nn.Parameter(torch.randn(37, 11, generator=source, device=DEVICE))
    found, m, v = wanted.detach().clone(), torch.zeros_like(wanted), torch.zeros_like(wanted)
    narrow = torch.empty_like(found, dtype=torch.bfloat16)
    lr, decay, eps, scale = 1e-2, 0.1, 1e-8, 0.25
    optimizer = kind([wanted], lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=decay)
    for count in range(1, 6):
        gradient = torch.randn(37, 11, generator=source, device=DEVICE).to(dtype)
        wanted.grad = gradient.float() * scale
        optimizer.step()
        numbers = (lr, 0.9, 0.95, eps, decay, lr / (1 - 0.9**count), math.sqrt(1 - 0.95**count), scale)
        adam_kernel[(-(-found.numel() // 128),)](
            found, gradient, m, v, narrow, found.numel(), *numbers,
            DECOUPLED=kind is torch.optim.AdamW, NARROW=True, BLOCK=128,
        )  # fmt: skip
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)
    cut_off = 0 if ON_GPU else 2**-7  # the interpreter does not round
    torch.testing.assert_close(narrow, found.to(torch.bfloat16), rtol=cut_off, atol=0)


def check_add_up() -> None:
    source = torch.Generator().manual_seed(1)
    tokens, k, width = 5, 3, 20
    rows = torch.randn(tokens * k, width, generator=source).to(DEVICE)
    inverse = torch.randperm(tokens * k, generator=source).to(DEVICE)
    out = torch.empty(tokens, width, device=DEVICE)
    add_up_kernel[(tokens, 2)](rows, inverse, out, width, K=k, BLOCK=16)
    torch.testing.assert_close(out, rows[inverse].view(tokens, k, width).sum(1))


def check_swiglu() -> None:
    source = torch.Generator().manual_seed(2)
    rows, width = 5, 20
    product = torch.randn(rows, 2 * width, generator=source).to(DEVICE).requires_grad_()
    weights = torch.rand(rows, 1, generator=source).to(DEVICE).requires_grad_()
    gate, up = product.chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up * weights
    given = torch.randn(rows, width, generator=source).to(DEVICE)
    of_product, of_weights = torch.autograd.grad(wanted, (product, weights), given)
    inputs = product.detach(), weights.detach()
    out, of_one, of_other = torch.empty_like(wanted), torch.empty_like(product), torch.empty_like(weights)
    swiglu_kernel[(rows,)](*inputs, out, width, BLOCK=32)
    swiglu_gradient_kernel[(rows,)](given, *inputs, of_one, of_other, width, BLOCK=32)
    torch.testing.assert_close(out, wanted.detach())
    torch.testing.assert_close(of_one, of_product)
    torch.testing.assert_close(of_other, of_weights)


if __name__ == "__main__":
    check_swiglu()
    for optimizer in (torch.optim.AdamW, torch.optim.Adam):
        for of_gradient in (torch.float32, torch.bfloat16):
            check_adam(optimizer, of_gradient)
    check_add_up()

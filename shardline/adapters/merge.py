"""A model's weights with its adapter added: what `shardline export --merge` writes, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardline.adapters.lora import Adaptation
from shardline.adapters.targets import EXPERTS
from shardline.storage.safetensors import LazyTensors

HEAD, EMBEDDING = "output.weight", "tok_embeddings.weight"


class MergedTensors(LazyTensors):
    """The logical tensors of the whole model, each computed in float32 from the frozen and the trained one."""

    def __init__(self, base: LazyTensors, trained: Mapping[str, Tensor], how: Adaptation) -> None:
        self.base, self.trained, self.how = base, trained, how
        self._rows = {**dict.fromkeys(base), HEAD: None}  # asked for where it is not tied, or no longer

    def dtype(self, name: str) -> torch.dtype:
        if name == HEAD and name not in self.base:
            return self.base.dtype(EMBEDDING)
        return self.trained[name].dtype if name in self.trained else self.base.dtype(name)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.trained:
            return self.trained[name]
        if name == HEAD and name not in self.base:
            return self.base[EMBEDDING]
        weight, module = self.base[name], name.removesuffix(".weight")
        half = None
        if EXPERTS in name and module.endswith((".w1", ".w3")):
            module, half = f"{module[:-3]}.w13", int(module.endswith(".w3"))
        if f"{module}.lora.a" not in self.trained or module == name:
            return weight
        return self._merged(weight.float(), module, half).to(weight.dtype)

    def _merged(self, weight: Tensor, module: str, half: int | None) -> Tensor:
        a, b = (self.trained[f"{module}.lora.{which}"].float() for which in ("a", "b"))
        b = b if half is None else b[:, half]
        change = (a.t() @ b.t() if module == "tok_embeddings" else b @ a) * self.how.scale
        merged = weight + change
        if not self.how.use_dora:
            return merged
        length = torch.linalg.vector_norm(merged, dim=1, keepdim=True)
        return merged * (self.trained[f"{module}.lora.magnitude"].float()[:, None] / length)

"""Merges an adapter into its model's weights, tensor by tensor, for `shardline export --merge`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardline.adapters.lora import Adaptation
from shardline.adapters.targets import EXPERTS
from shardline.config.architecture import Architecture
from shardline.models.fused_weights import embedding_name, upright
from shardline.storage.safetensors import LazyTensors


class MergedTensors(LazyTensors):
    """The logical tensors of the merged model, each computed in float32 from frozen and trained tensors."""

    def __init__(self, base: LazyTensors, trained: Mapping[str, Tensor], how: Adaptation, arch: Architecture) -> None:
        self.base, self.trained, self.how, self.arch = base, trained, how, arch
        ties = {"output.weight": "tok_embeddings.weight"} if arch.foreign is None else arch.foreign.ties
        self.ties = {other: name for other, name in ties.items() if other not in base}
        self._rows = dict.fromkeys([*base, *self.ties])  # the latter are read if they are no longer tied

    def dtype(self, name: str) -> torch.dtype:
        if name in self.ties:
            return self.base.dtype(self.ties[name])
        return self.trained[name].dtype if name in self.trained else self.base.dtype(name)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.trained:
            return self.trained[name]
        if name in self.ties:
            return self.base[self.ties[name]]
        weight, module = self.base[name], name.removesuffix(".weight")
        half = None
        if self.arch.foreign is None and EXPERTS in name and module.endswith((".w1", ".w3")):
            module, half = f"{module[:-3]}.w13", int(module.endswith(".w3"))
        if f"{module}.lora.a" not in self.trained or module == name:
            return weight
        merged = self._merged(upright(self.arch, module, weight.float()), module, half)
        return upright(self.arch, module, merged).to(weight.dtype)

    def _merged(self, weight: Tensor, module: str, half: int | None) -> Tensor:
        a, b = (self.trained[f"{module}.lora.{which}"].float() for which in ("a", "b"))
        b = b if half is None else b[:, half]
        change = (a.t() @ b.t() if module == embedding_name(self.arch) else b @ a) * self.how.scale_of(module)
        merged = weight + change
        if not self.how.use_dora:
            return merged
        length = torch.linalg.vector_norm(merged, dim=1, keepdim=True)
        return merged * (self.trained[f"{module}.lora.magnitude"].float()[:, None] / length)

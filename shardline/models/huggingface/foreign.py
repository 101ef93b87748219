"""A model that the code of `transformers` computes, in place of a `Decoder`.

    ForeignDecoder       owns the model's children: parameters keep the names that they have in that code and in files
      transformer.h.0    a block; its `forward` is replaced by one that collects plain tensors and calls a function,
      ...                which compilation, activation checkpointing and offloading wrap as they wrap a native block's
      lm_head            is skipped while hidden states are computed, so that the loss can apply it in chunks

A block's function runs a second copy of the block, without memory, into which `torch.func.functional_call` puts the
weights: the first copy carries the hooks of FSDP, and under DDP its parameters are DTensors, which that code does not
support.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.adapted.low_rank import Weight
from shardline.models.decoder import Adaptable, Decoder, Embedding, Linear, Stage
from shardline.models.dtensor import local
from shardline.models.fused_weights import is_low_rank
from shardline.models.huggingface.foreign_config import build_foreign, held_tensors
from shardline.models.products.linear import linear
from shardline.models.products.narrow import narrowed
from shardline.words import listed

log = logging.getLogger("shardline")


class Slot(NamedTuple):
    """A module's attribute that holds a tensor; the tensor changes when the model gets memory or FSDP all-gathers."""

    name: str
    owner: nn.Module
    attribute: str
    is_weight: bool  # cast to the compute type; tables keep their own

    def tensor(self, dtype: torch.dtype | None) -> Tensor:
        """The current tensor, or this rank's shard of it, as a plain tensor."""
        own = narrowed(local(getattr(self.owner, self.attribute)))
        return own.to(dtype) if self.is_weight and dtype is not None else own


class ForeignBlock:
    """One decoder layer. `function(x, tensors, others, names)` is pure, like that of a native block."""

    moe = None
    rest = None

    def __init__(self, model: ForeignDecoder, module: nn.Module, config: Any) -> None:
        self.model, self.module, self.config = model, module, config
        self.function: Callable[..., Any] = self.compute
        self.renew()

    def renew(self) -> None:
        """Take the modules and parameters of the layer as they are now."""
        self.module.__dict__.pop("forward", None)
        self.shadow = copy.deepcopy(self.module, {id(self.config): self.config})
        self.slots = [*_slots(self.module), *_tables(self.module)]
        self.module.forward = self._forward

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        if self.shadow.training != self.module.training:
            self.shadow.train(self.module.training)
        x, *others = (*arguments, *options.values())
        tensors = tuple(slot.tensor(self.model.compute_dtype) for slot in self.slots)
        return self.function(x, tensors, tuple(others), tuple(options))

    def compute(self, x: Any, tensors: tuple[Tensor, ...], others: tuple[Any, ...], names: tuple[str, ...]) -> Any:
        """Apply the block to x and `others`, the last of which are keyword arguments with these `names`."""
        values, named = (x, *others), {}
        first = len(values) - len(names)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            named[slot.name] = tensor
        return functional_call(self.shadow, named, values[:first], dict(zip(names, values[first:], strict=True)))


class ForeignDecoder(Decoder):
    """A model of `transformers` behind the interface of `Decoder`, without memory until `to_empty`."""

    def __init__(self, arch: Architecture) -> None:
        nn.Module.__init__(self)
        assert arch.foreign is not None
        with torch.device("cpu"):
            inner: Any = build_foreign(arch.foreign.config)
        self.arch = arch
        self.compute_dtype: torch.dtype | None = None
        self.adaptation: Any = None
        self.context: Any = None
        self.stages = (Stage(tuple(range(arch.n_layers)), True, True),)
        self.foreign_model = (inner,)  # in a tuple: only its children are registered here, under their names
        self.foreign_head = (inner.get_output_embeddings(),)
        self.gives_logits = not isinstance(self.foreign_head[0], nn.Linear) or self.foreign_head[0].bias is not None
        self._head_checked = self.gives_logits
        self._accepted = inspect.signature(inner.forward).parameters
        self.constants = {n: t.detach().clone() for n, t in held_tensors(inner).items() if not t.is_meta}
        self.fixed = _parameters_of_tables(inner)
        self.tables = {name: table.clone() for name, table in inner.named_buffers()}
        if list(inner.parameters(recurse=False)) or any(hasattr(self, name) for name, _ in inner.named_children()):
            raise UserError(f"{type(inner).__name__} has weights outside its modules; such a model is not supported")
        for name, child in inner.named_children():
            self.add_module(name, child)
        inner.to(device="meta")
        self.retie()
        blocks: Any = inner.get_submodule(arch.foreign.blocks)
        self._blocks = [ForeignBlock(self, block, inner.config) for block in blocks]
        self._outside = self._slots_outside()

    def hidden(self, tokens: Tensor, *, documents: Tensor | None = None, **others: Any) -> Tensor:
        """Hidden states (B, S, dim) before the output layer, or logits (B, S, V) where `gives_logits`."""
        assert not any(value is not None for value in others.values()), "neither stages nor a cache"
        if self.gives_logits:
            return self._run(tokens, documents)
        with self._without_head() as seen:
            out = self._run(tokens, documents)
        (states,) = seen
        if out is not states and not self._head_checked:
            self._head_checked = True
            self.gives_logits = out.shape != states.shape or not torch.equal(out.float(), states.float())
            if self.gives_logits:
                log.info("logits are not computed in chunks: the model changes them after its output layer")
                return self._run(tokens, documents)
        return states.clone() if states._is_view() else states  # a method of FSDP's root must not return a view

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        """Logits (B, S, V); `options` are those of `hidden`."""
        before, self.gives_logits = self.gives_logits, True
        try:
            return self.hidden(tokens, **options)
        finally:
            self.gives_logits = before

    def blocks(self) -> list[ForeignBlock]:  # type: ignore[override]
        return self._blocks

    def block(self, layer: int) -> ForeignBlock:  # type: ignore[override]
        return self._blocks[layer]

    @property
    def layers(self) -> dict[str, ForeignBlock]:  # type: ignore[override]
        return {str(number): block for number, block in enumerate(self._blocks)}

    def output_weight(self) -> Weight:
        head: Any = self.foreign_head[0]
        return head.used(local) if isinstance(head, Linear) else local(head.weight)

    def make_adaptable(self) -> None:
        """Replace the modules whose arithmetic is known by ones that can have low-rank matrices."""
        foreign, inner = self.arch.foreign, self.foreign_model[0]
        assert foreign is not None
        for name in foreign.adaptable:
            old = inner.get_submodule(name)
            embeds = name == foreign.embedding
            new = ForeignEmbedding(old) if embeds else ForeignLinear(old, name in foreign.transposed)
            for owner in (inner, self):  # both have the outermost modules
                owner.set_submodule(name, new)
        self.foreign_head = (inner.get_output_embeddings(),)

    def renew_blocks(self) -> None:
        self.retie()
        for block in self._blocks:
            block.renew()
        self._outside = self._slots_outside()

    def computing_modules(self) -> Iterator[nn.Module]:
        return itertools.chain(self.modules(), *(block.shadow.modules() for block in self._blocks))

    def whole_parameters(self) -> set[nn.Parameter]:
        """Tables that are stored in files: they are neither trained nor sharded."""
        return {self.get_parameter(name) for name in self.fixed}

    @torch.no_grad()
    def check_masks(self, device: torch.device) -> None:
        """Refuse a model whose tokens see later ones, or see other documents that the config keeps apart."""
        half, name = min(8, self.arch.max_seq_len // 2), type(self.foreign_model[0]).__name__
        places = torch.arange(2 * half, device=device)
        tokens, documents = places.remainder(self.arch.vocab_size)[None], (places >= half).long()[None]
        with self._probing():
            with self._checking_targets():
                mixed = self.hidden(tokens).float()
            other = self.hidden(torch.where(documents.bool(), 0, tokens)).float()
            change = (mixed - other).norm(dim=-1)[0]
            if change[:half].max() > 0.01 * change[half:].max():
                raise UserError(
                    f"{name} lets tokens see later ones, so it learns nothing from predicting the next one; some of"
                    ' these models become causal with "is_decoder": true in config.json'
                )
            if self.arch.attn_mask_type == "block_causal":
                alone = self.hidden(tokens[:, half:]).float()
                apart = self.hidden(tokens, documents=documents)[:, half:].float()
                if (apart - alone).norm() > 0.1 * (mixed[:, half:] - alone).norm():
                    raise UserError(
                        f"model.overrides.attn_mask_type = 'block_causal': {name} does not keep packed documents apart;"
                        " set it to 'causal'"
                    )

    @contextlib.contextmanager
    def _probing(self) -> Iterator[None]:
        """Turn off dropout, and the wrappers of blocks, since a compiler would specialise on the short sequences."""
        training, functions = self.training, [block.function for block in self._blocks]
        self.eval()
        for block in self._blocks:
            block.function = block.compute
        try:
            yield
        finally:
            self.train(training)
            for block, function in zip(self._blocks, functions, strict=True):
                block.function = function

    @contextlib.contextmanager
    def _checking_targets(self) -> Iterator[None]:
        """Refuse targets that the model's code never calls: what is trained beside them would have no effect."""
        assert self.arch.foreign is not None
        within, called, words = self.arch.foreign.blocks, set[str](), type(self.foreign_model[0]).__name__
        places = [(f"{within}.{number}.", block.shadow) for number, block in enumerate(self._blocks)]
        targets = {
            prefix + name: module
            for prefix, place in [("", self.foreign_model[0]), *places]
            for name, module in place.named_modules()
            if isinstance(module, Adaptable) and module.lora is not None
        }
        # An expert may get none of these few tokens, so it is enough that one expert of a layer is called.
        kinds = {name: re.sub(r"(?<=\.experts\.)\d+", "*", name) for name in targets}
        hooks = [
            module.register_forward_hook(lambda *_, kind=kinds[name]: called.add(kind))
            for name, module in targets.items()
        ]
        try:
            yield
        except (AttributeError, TypeError) as error:
            if not any(".stored." in name for name, _ in self.named_parameters()):
                raise
            raise UserError(
                f'lora.base_dtype: the code of {words} reads weights directly, not in quantised form; set it to "same"'
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        if missed := [kind for kind in dict.fromkeys(kinds.values()) if kind not in called]:
            raise UserError(
                f"lora.target_modules: {words} does not call {listed(missed, 4)}, so nothing can be trained beside"
                " it; list the other modules, or use an expression that leaves it out"
            )

    def _slots_outside(self) -> list[Slot]:
        assert self.arch.foreign is not None
        within = f"{self.arch.foreign.blocks}."
        return [slot for slot in _slots(self.foreign_model[0]) if not slot.name.startswith(within)]

    def retie(self) -> None:
        """Make tied weights one parameter again after each was replaced by a new one."""
        assert self.arch.foreign is not None
        for other, name in self.arch.foreign.ties.items():
            path, _, last = other.rpartition(".")
            setattr(self.foreign_model[0].get_submodule(path), last, self.foreign_model[0].get_parameter(name))

    def to_empty(self, *, device: Any, recurse: bool = True) -> ForeignDecoder:
        """Allocate the parameters' memory; tables get the values that the model's own code gave them."""
        super().to_empty(device=device, recurse=recurse)
        for name, table in self.tables.items():
            path, _, last = name.rpartition(".")
            self.foreign_model[0].get_submodule(path)._buffers[last] = table.to(device)
        self.retie()
        return self

    def _run(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """The logits that the model returns."""
        inner, options = self.foreign_model[0], {"input_ids": tokens, "use_cache": False, "return_dict": True}
        if documents is not None:
            if "position_ids" not in self._accepted:
                raise UserError(f"{type(inner).__name__} takes no positions, so it cannot keep packed documents apart")
            options["position_ids"] = positions_in(documents)
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in self._accepted.values()):
            options = {name: value for name, value in options.items() if name in self._accepted}
        weights = {slot.name: slot.tensor(self.compute_dtype) for slot in self._outside}
        out: Any = functional_call(inner, weights, (), options)
        logits: Tensor = out.logits
        return logits

    @contextlib.contextmanager
    def _without_head(self) -> Iterator[list[Tensor]]:
        """Make the output layer return its input, and append that to the list."""
        seen: list[Tensor] = []
        head: Any = self.foreign_head[0]

        def pass_through(states: Tensor) -> Tensor:
            seen.append(states)
            return states

        head.forward = pass_through
        try:
            yield seen
        finally:
            del head.forward


class ForeignLinear(Linear):
    """A linear layer of transformers' code, beside whose weight low-rank matrices may be trained.

    The weight is the layer's own, under its own name; with `transposed` it is (columns, rows).
    """

    def __init__(self, layer: Any, transposed: bool) -> None:
        Adaptable.__init__(self)
        self.weight, self.bias, self.transposed = layer.weight, layer.bias, transposed

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.used(self._part), self.bias)

    def _part(self, parameter: Tensor) -> Tensor:
        held = local(parameter)
        return held.t() if self.transposed and parameter is self.weight else held


class ForeignEmbedding(Embedding):
    """The token embedding of transformers' code, with what is trained beside it."""

    def __init__(self, layer: Any) -> None:
        Adaptable.__init__(self)
        self.weight, self.padding_idx = layer.weight, layer.padding_idx
        self.function = functools.partial(F.embedding, padding_idx=layer.padding_idx)


def positions_in(documents: Tensor) -> Tensor:
    """Positions (B, S) that begin at 0 with every document."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def _slots(module: nn.Module) -> list[Slot]:
    """The parameters of a module, tied ones once.

    Only trained weights are cast here: the others are tables, or frozen and already in the compute type, and low-rank
    matrices are cast where they are used.
    """
    found = []
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        is_weight = parameter.is_floating_point() and parameter.requires_grad and not is_low_rank(name)
        found.append(Slot(name, owner, last, is_weight))
    return found


def _tables(module: nn.Module) -> list[Slot]:
    split = [(name, *name.rpartition(".")) for name, _ in module.named_buffers()]
    return [Slot(name, module.get_submodule(path), last, False) for name, path, _, last in split]


def _parameters_of_tables(model: nn.Module) -> list[str]:
    """Turn the tables that are stored in files into parameters that are not trained; return their names."""
    kept, names = model.state_dict(keep_vars=True).keys(), []
    for name, table in list(model.named_buffers()):
        if name in kept:
            path, _, last = name.rpartition(".")
            owner = model.get_submodule(path)
            del owner._buffers[last]
            owner.register_parameter(last, nn.Parameter(table, requires_grad=False))
            names.append(name)
    return names

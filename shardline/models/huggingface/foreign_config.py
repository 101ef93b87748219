"""Models without a native implementation, which `transformers` builds: from config.json to an Architecture.

A model is built once to learn its weights and its list of decoder layers. Matrices get no memory while it is built;
vectors and tables do, so that tables (rotary frequencies, masks) and the initial values of norms come from the model's
own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardline.config.architecture import Architecture, ForeignModel, build
from shardline.errors import ConfigError
from shardline.models.fused_weights import is_halved
from shardline.models.huggingface.key_types import NAMES, check_sizes, check_together, in_their_names

OURS = ("attn_mask_type",)  # fields that no config.json has
LINEAR = ("Linear", "Conv1D", "FalconLinear")  # classes whose arithmetic is x W^T + bias; Conv1D has W^T
CHANGES_WEIGHTS = ("rwkv",)  # types whose code scales weights in place, but not what is trained beside them


def foreign_architecture(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Architecture:
    """The architecture of the model that transformers builds from a config.json with some fields changed."""
    overrides = dict(overrides or {})
    content = {**config, **_renamed(config, overrides)}
    check_sizes(content)
    check_together(content)
    model = build_foreign(content)
    try:
        return describe(model, content, {name: overrides[name] for name in OURS if name in overrides})
    except ConfigError as error:
        raise ConfigError(in_their_names(str(error))) from None


def describe(model: nn.Module, content: Mapping[str, Any], fields: Mapping[str, Any]) -> Architecture:
    """What training needs to know about a model that was built from `content`."""
    own: Any = model.config
    config = own.get_text_config()
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    blocks, ties = list_of_blocks(model), tied_names(model)
    shapes = {name: tuple(value.shape) for name, value in held_tensors(model).items()}
    odd = [name for name, parameter in model.named_parameters() if not parameter.ndim or is_halved(name)]
    if odd:
        raise ConfigError(f"{odd[0]} of {type(model).__name__} has no dimension to shard; its model is not supported")
    dim, heads = _number(config, "hidden_size", embedding.weight.shape[1]), _number(config, "num_attention_heads", 1)
    width = _number(config, "head_dim", dim // heads)
    names = {module: name for name, module in model.named_modules()}
    adaptable, transposed = adaptable_modules(model, ties)
    return build(
        {
            "family": "transformers",
            "dim": dim,
            "n_layers": len(model.get_submodule(blocks)),  # type: ignore[arg-type]
            "n_heads": heads,
            "head_dim": max(2, width + width % 2),
            "ffn_dim": _number(config, "intermediate_size", 4 * dim),
            "vocab_size": embedding.weight.shape[0],
            "max_seq_len": _number(config, "max_position_embeddings", Architecture.model_fields["max_seq_len"].default),
            "tie_word_embeddings": bool(ties),
            "init_std": _deviation(config),
            "foreign": ForeignModel(
                config=dict(content),
                shapes=shapes,
                ties=ties,
                blocks=blocks,
                embedding=names[embedding],
                output=names.get(model.get_output_embeddings(), ""),  # type: ignore[operator]
                adaptable=adaptable,
                transposed=transposed,
            ),
            **fields,
        }
    )


def build_foreign(content: Mapping[str, Any]) -> nn.Module:
    """The model that transformers builds from a config.json; tensors of two or more dimensions get no memory."""
    kind = content.get("model_type")
    if find_spec("transformers") is None:
        raise ConfigError(
            f"model_type {kind!r} is computed by transformers, which is not installed: pip install"
            " 'shardline[transformers]'"
        )
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if kind not in CONFIG_MAPPING:
        custom = "; code beside the weights (auto_map) is not run" if content.get("auto_map") else ""
        raise ConfigError(f"model_type {kind!r} is not one that transformers builds{custom}")
    if content.get("quantization_config"):
        given = content["quantization_config"]
        method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else "unknown"
        raise ConfigError(f"quantization_config ({method}) is not supported; use the unquantized weights")
    try:
        config = CONFIG_MAPPING[kind].from_dict(_with_floats(dict(content)))
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(f"model_type {kind!r} has no causal language model in transformers")
        with quiet(), torch.random.fork_rng(devices=[]), _WithoutMatrices():
            torch.manual_seed(0)  # vectors that the model's code draws are the same in every process
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"transformers cannot build model_type {kind!r}: {type(error).__name__}: {error}") from error
    return model


def _with_floats(value: Any) -> Any:
    """Convert infinities back to floats: JSON has none, so transformers writes a table {"__float__": ...} instead."""
    if isinstance(value, Mapping):
        return (
            float(value["__float__"])
            if value.keys() == {"__float__"}
            else {k: _with_floats(v) for k, v in value.items()}
        )
    return [_with_floats(one) for one in value] if isinstance(value, list) else value


def held_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once, and the tables that are stored in files too."""
    kept = model.state_dict(keep_vars=True).keys()
    return {**dict(model.named_parameters()), **{name: b for name, b in model.named_buffers() if name in kept}}


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of each parameter that has several, mapped to its first name."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    pairs = [(name, first.setdefault(id(parameter), name)) for name, parameter in named]
    return {name: other for name, other in pairs if name != other}


def adaptable_modules(model: nn.Module, ties: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Modules beside which low-rank matrices can be trained, and those of them that store columns before rows.

    Their arithmetic must be known, so other derived classes are not among them. Nor is a layer whose weight is tied to
    another one's, except the embedding.
    """
    own: Any = model.config
    if own.model_type in CHANGES_WEIGHTS:
        return [], []
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    shared, found = {*ties, *ties.values()}, []
    for name, module in model.named_modules():
        if module is embedding and type(module) is nn.Embedding and module.max_norm is None:
            found += [name] if f"{name}.weight" not in ties else []
        elif type(module).__name__ in LINEAR and f"{name}.weight" not in shared:
            found.append(name)
    return found, [name for name in found if type(model.get_submodule(name)).__name__ == "Conv1D"]


def list_of_blocks(model: nn.Module) -> str:
    """The name of the list of modules that has the most parameters: the decoder layers."""
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    if not sizes:
        raise ConfigError(f"{type(model).__name__} has no list of decoder layers; such a model is not supported")
    return max(sizes, key=lambda name: sizes[name])


def _renamed(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overridden fields under the names that this config.json has for them."""
    fields = {name: value for name, value in overrides.items() if name not in OURS}
    if not fields:
        return {}
    from transformers import CONFIG_MAPPING

    kind = content.get("model_type")
    default = CONFIG_MAPPING[kind]() if kind in CONFIG_MAPPING else None
    found = {}
    for name, value in fields.items():
        theirs = NAMES.get(name)
        if theirs is None or not hasattr(default, theirs):
            known = [field for field, key in NAMES.items() if hasattr(default, key)]
            raise ConfigError(
                f"model.overrides.{name}: transformers computes this model, and its config has no such field"
                f" (fields: {', '.join([*known, *OURS])})"
            )
        renamed: Mapping[str, str] = getattr(default, "attribute_map", {})
        found[renamed.get(theirs, theirs)] = value
    return found


def _number(config: Any, name: str, otherwise: int) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else otherwise


def _deviation(config: Any) -> float:
    """The standard deviation of initial weights: the config's if it is valid, or else 0.02."""
    value: Any = getattr(config, "initializer_range", None)
    return float(value) if type(value) in (int, float) and 0 < value <= 1000 else 0.02


class _WithoutMatrices(TorchFunctionMode):
    """`torch.empty` of two or more dimensions, with which modules make their matrices, allocates no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            size = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
            if len(size) > 1:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the advice that transformers logs about a model that it builds."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)

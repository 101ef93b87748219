"""The sizes and switches that define one decoder: what a flavor names and `model.overrides` changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from shardline.config.types import LARGEST, Section, show
from shardline.errors import ConfigError
from shardline.registry import nearest

# Limits beyond any real model: without them, a build would take forever or run out of memory before it is refused.
LAYERS, WIDTH, ROWS = 10_000, 2**24, 2**28
PARAMETERS = 10**14  # of a whole model

# The fields that each scaling rule reads besides the factor.
SCALING_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "longrope": ("original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
}


class RopeScaling(Section):
    """How rotary frequencies are scaled beyond the length that a model was first trained with."""

    type: Literal["linear", "dynamic", "longrope", "llama3", "yarn"] = Field(description="Scaling rule.")
    factor: float = Field(gt=0, description="How many times longer the context becomes.")
    low_freq_factor: float = Field(
        default=1.0, gt=0, description="llama3: wavelengths above original/this are divided."
    )
    high_freq_factor: float = Field(default=4.0, gt=0, description="llama3: wavelengths below original/this are kept.")
    original_max_position_embeddings: int | None = Field(
        default=None, ge=1, le=LARGEST, description="Length before scaling."
    )
    attention_factor: float | None = Field(
        default=None, gt=0, description="yarn, longrope: scale of cos and sin; unset: derived."
    )
    short_factor: tuple[float, ...] = Field(
        default=(), description="longrope: divisors of the frequencies of sequences up to the original length."
    )
    long_factor: tuple[float, ...] = Field(
        default=(), description="longrope: divisors of the frequencies of longer sequences."
    )
    beta_fast: float = Field(default=32.0, gt=0, description="yarn: rotations above which a frequency is kept.")
    beta_slow: float = Field(default=1.0, gt=0, description="yarn: rotations below which a frequency is divided.")
    mscale: float | None = Field(default=None, description="yarn: numerator of the derived attention factor.")
    mscale_all_dim: float | None = Field(default=None, description="yarn: denominator of the derived factor.")
    truncate: bool = Field(default=True, description="yarn: round the band limits to whole dimensions.")

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        lists = {name: data[name] for name in ("short_factor", "long_factor") if isinstance(data.get(name), list)}
        return {**data, **{name: tuple(float(value) for value in values) for name, values in lists.items()}}

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.type == "longrope" and self.original_max_position_embeddings is None:
            raise ValueError("longrope scaling needs original_max_position_embeddings")
        if self.type == "llama3" and self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must not be below low_freq_factor ({self.low_freq_factor})"
            )
        if self.type == "llama3" and self.original_max_position_embeddings is None:
            raise ValueError("llama3 scaling needs original_max_position_embeddings")
        return self


class LatentAttention(Section):
    """Multi-head latent attention: keys and values of all heads are products of one narrow latent vector per token.

    A query or key head has `nope_dim` dimensions without and `rope_dim` with rotary positions; the latter are shared by
    the key heads. `Architecture.head_dim` is their sum.
    """

    kv_rank: int = Field(ge=1, le=WIDTH, description="Width of the latent vector of keys and values.")
    q_rank: int | None = Field(
        default=None, ge=1, le=WIDTH, description="Width of the latent vector of queries; unset: none."
    )
    nope_dim: int = Field(ge=1, le=WIDTH, description="Dimensions of a head without rotary positions.")
    rope_dim: int = Field(
        ge=2, le=WIDTH, multiple_of=2, description="Dimensions of a head with rotary positions; even."
    )
    v_dim: int = Field(ge=1, le=WIDTH, description="Width of a value head; at most nope_dim + rope_dim.")

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim


class MixtureOfExperts(Section):
    """The layers whose feed-forward part is a router and experts, of which each token uses `top_k`."""

    n_experts: int = Field(ge=1, le=WIDTH, description="Routed experts of a layer.")
    top_k: int = Field(ge=1, le=WIDTH, description="Experts that each token uses.")
    expert_dim: int = Field(ge=1, le=WIDTH, description="Width inside one expert.")
    shared_dim: int = Field(
        default=0, ge=0, le=WIDTH, description="Width of the shared expert that every token uses; 0: none."
    )
    first_dense: int = Field(default=0, ge=0, le=LARGEST, description="Layers at the beginning without experts.")
    every: int = Field(
        default=1, ge=1, le=LARGEST, description="After them, each n-th layer has experts (layers n-1, 2n-1, ...)."
    )
    score: Literal["softmax", "sigmoid"] = Field(default="softmax", description="How logits become scores.")
    normalize: bool = Field(default=False, description="Divide the scores of the chosen experts by their sum.")
    scale: float = Field(default=1.0, gt=0, description="Factor of the scores of the chosen experts.")
    scale_input: bool = Field(default=False, description="Scores multiply an expert's input, not its output.")
    router_bias: bool = Field(default=False, description="Bias on the router's logits.")
    n_groups: int = Field(default=1, ge=1, le=WIDTH, description="Groups of experts, of which a token uses some.")
    top_groups: int = Field(default=1, ge=1, le=WIDTH, description="Groups that a token uses.")
    group_score: Literal["max", "top2"] = Field(
        default="max", description="A group's score: its best expert's, or the sum of its two best."
    )
    activation: Literal["silu", "clamped"] = Field(
        default="silu", description="clamped: gate and up are limited, and up is shifted by one."
    )
    balance_coeff: float = Field(
        default=0.0, ge=0, description="Step of the bias that balances the experts without a loss; 0: no bias."
    )
    aux_loss_coeff: float = Field(default=0.0, ge=0, description="Weight of the loss that balances each sequence.")
    z_loss_coeff: float = Field(default=0.0, ge=0, description="Weight of the loss on large router logits.")

    @model_validator(mode="after")
    def _check(self) -> MixtureOfExperts:
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k ({self.top_k}) must not exceed n_experts ({self.n_experts})")
        if self.n_experts % self.n_groups:
            raise ValueError(f"n_groups ({self.n_groups}) must divide n_experts ({self.n_experts})")
        if self.top_groups > self.n_groups:
            raise ValueError(f"top_groups ({self.top_groups}) must not exceed n_groups ({self.n_groups})")
        if self.top_k > self.top_groups * (self.n_experts // self.n_groups):
            held = self.top_groups * (self.n_experts // self.n_groups)
            raise ValueError(f"top_k ({self.top_k}) must not exceed the {held} experts of {self.top_groups} groups")
        return self

    def holds(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return layer >= self.first_dense and (layer + 1) % self.every == 0

    @property
    def losses(self) -> dict[str, float]:
        """The coefficients of the router's losses that are on, by their names in metrics.jsonl."""
        given = {"aux_loss": self.aux_loss_coeff, "z_loss": self.z_loss_coeff}
        return {name: coefficient for name, coefficient in given.items() if coefficient > 0}


# Fields of an architecture that are tables: `model.overrides.moe.top_k` changes one value of the flavor's.
TABLES: dict[str, type[Section]] = {"rope_scaling": RopeScaling, "latent": LatentAttention, "moe": MixtureOfExperts}


class ForeignModel(Section):
    """A model that `transformers` computes: its config.json, and what its code builds from it."""

    config: dict[str, Any] = Field(description="The content of config.json.")
    shapes: dict[str, tuple[int, ...]] = Field(description="Shapes of weights, by name in the model; tied ones once.")
    ties: dict[str, str] = Field(default={}, description="Other names of tied weights -> the first name.")
    blocks: str = Field(description="The name of the list of decoder layers in the model.")
    embedding: str = Field(default="", description="The name of the module that turns tokens into vectors.")
    output: str = Field(default="", description="The name of the output layer.")
    adaptable: list[str] = Field(default=[], description="Modules that can have low-rank matrices beside them.")
    transposed: list[str] = Field(default=[], description="Those of them whose weights are stored transposed.")

    @model_validator(mode="before")
    @classmethod
    def _from_json(cls, data: Any) -> Any:
        """Turn the lists of a manifest, which is JSON, into tuples."""
        if not isinstance(data, Mapping) or not isinstance(data.get("shapes"), Mapping):
            return data
        return {**data, "shapes": {name: tuple(shape) for name, shape in data["shapes"].items()}}


Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "llama4_text",
    "gpt_oss",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "smollm3",
    "glm",
    "glm4",
    "starcoder2",
    "cohere",
    "cohere2",
    "transformers",
]

# Fields of a mixture of experts that are settings of training: no Hugging Face config has them.
TRAINING_FIELDS = ("balance_coeff", "aux_loss_coeff", "z_loss_coeff")


_NOT_LATENT = ("norm_kind", "rope_fraction", "window_rope_theta", "attention_scale", "score_cap")


class Architecture(Section):
    """One decoder. By default, `n_kv_heads` is `n_heads` and `head_dim` is `dim // n_heads`."""

    dim: int = Field(ge=1, le=WIDTH, description="Width of the residual stream.")
    n_layers: int = Field(ge=1, le=LAYERS, description="Number of decoder layers.")
    n_heads: int = Field(ge=1, le=WIDTH, description="Query heads.")
    n_kv_heads: int = Field(default=0, ge=1, le=WIDTH, description="Key and value heads; divides n_heads.")
    head_dim: int = Field(default=0, ge=2, le=WIDTH, description="Width of one head; even.")
    ffn_dim: int = Field(ge=1, le=WIDTH, description="Width inside the feed-forward part of layers without experts.")
    latent: LatentAttention | None = Field(default=None, description="Multi-head latent attention.")
    moe: MixtureOfExperts | None = Field(default=None, description="Mixture of experts.")
    vocab_size: int = Field(ge=1, le=ROWS, description="Rows of the embedding.")
    max_seq_len: int = Field(
        default=131072, ge=1, le=LARGEST, description="Longest sequence that the model is meant for."
    )
    rope_theta: float = Field(default=500000.0, gt=0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(default=None, description="Scaling of the rotary frequencies.")
    rope_pairs: Literal["halves", "neighbors"] = Field(
        default="halves", description="Dimensions that rotate together: i and i + head_dim/2, or 2i and 2i + 1."
    )
    rope_fraction: float = Field(
        default=1.0, gt=0, le=1, description="Fraction of a head's dimensions, counted from the first, that rotate."
    )
    rope_layers: tuple[int, ...] | None = Field(
        default=None, description="Layers with rotary positions; unset means every layer."
    )
    window_rope_theta: float | None = Field(
        default=None,
        gt=0,
        description="rope_theta of layers with a window, which are then not scaled; unset: the same.",
    )
    query_scale: float = Field(
        default=0.0,
        ge=0,
        description="Layers without rotary positions multiply the query at position p by"
        " 1 + this * log(1 + floor((p + 1) / query_scale_step)); 0: they do not.",
    )
    query_scale_step: int = Field(
        default=8192, ge=1, le=LARGEST, description="Tokens after which the queries' factor grows."
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="Epsilon of the norms.")
    norm_kind: Literal["rms", "rms_plus_one", "layer"] = Field(
        default="rms", description="rms_plus_one multiplies by 1 + weight; layer subtracts the mean, too."
    )
    norm_bias: bool = Field(default=False, description="Bias of the norms; only norm_kind layer has one.")
    norm_places: Literal["before", "after", "both"] = Field(
        default="before",
        description="Where a block's two parts have norms: on their input, their output, or both.",
    )
    parallel_block: bool = Field(
        default=False,
        description="Attention and feed-forward part read the same norm, and their outputs are added.",
    )
    residual_scale: float = Field(default=1.0, gt=0, description="Factor of what a block adds to the residual stream.")
    embedding_scale: float = Field(default=1.0, gt=0, description="Factor of the embeddings.")
    logit_scale: float = Field(default=1.0, gt=0, description="Factor of the logits.")
    logit_cap: float | None = Field(
        default=None, gt=0, description="Logits become this * tanh(logit / this); unset: no cap."
    )
    attention_scale: float | None = Field(
        default=None, gt=0, description="Factor of the attention scores; unset: 1 / sqrt(head_dim)."
    )
    score_cap: float | None = Field(
        default=None, gt=0, description="Scores become this * tanh(score / this) before the mask; unset: no cap."
    )
    activation: Literal["silu", "gelu_tanh"] = Field(
        default="silu", description="Activation function of the feed-forward part of layers without experts."
    )
    gated: bool = Field(
        default=True, description="The feed-forward part multiplies its activation by a second product."
    )
    qkv_bias: bool = Field(default=False, description="Bias on the query, key and value projections.")
    out_bias: bool = Field(default=False, description="Bias on the attention output projection.")
    mlp_bias: bool = Field(default=False, description="Bias on the feed-forward projections.")
    qk_norm: bool = Field(default=False, description="Norm of queries and keys, of norm_kind and without bias.")
    qk_norm_over: Literal["head", "each_head", "width"] = Field(
        default="head",
        description="head: each head, with a shared weight; each_head: with its own; width: all heads together.",
    )
    rotated_norm: bool = Field(
        default=False, description="RMS norm without weights on each query and key head that was rotated."
    )
    sinks: bool = Field(
        default=False, description="A learned logit of each head takes part in the softmax, without a value."
    )
    tie_word_embeddings: bool = Field(default=False, description="The output layer shares the embedding's weight.")
    sliding_window: int | None = Field(
        default=None, ge=1, le=LARGEST, description="Tokens that a query sees; unset: all."
    )
    sliding_window_layers: tuple[int, ...] | None = Field(
        default=None, description="Layers that use the window; unset means every layer."
    )
    window_kind: Literal["sliding", "chunked"] = Field(
        default="sliding", description="chunked: the window does not slide but begins at multiples of its size."
    )
    attn_mask_type: Literal["causal", "block_causal"] = Field(
        default="causal", description="block_causal separates packed documents."
    )
    attn_backend: Literal["auto", "sdpa", "flex", "varlen"] = Field(default="auto", description="Attention kernels.")
    family: Family = Field(default="llama", description="Family whose Hugging Face names are used.")
    foreign: ForeignModel | None = Field(default=None, description="The model that transformers' code computes.")
    init_std: float = Field(default=0.02, gt=0, le=1000, description="Standard deviation of the initial weights.")

    @model_validator(mode="before")
    @classmethod
    def _fill_heads(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        heads, dim = filled.get("n_heads"), filled.get("dim")
        if filled.get("n_kv_heads") in (None, 0) and heads is not None:
            filled["n_kv_heads"] = heads
        width = _default_head_dim(filled.get("latent"), dim, heads)
        if filled.get("head_dim") in (None, 0) and width is not None:
            filled["head_dim"] = width
        for name in ("sliding_window_layers", "rope_layers"):
            if isinstance(filled.get(name), list):
                filled[name] = tuple(filled[name])
        return filled

    @model_validator(mode="after")
    def _check(self) -> Architecture:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads ({self.n_kv_heads}) must divide n_heads ({self.n_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even")
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.latent is None and (self.rope_dim < 2 or self.rope_dim % 2):
            raise ValueError(
                f"rope_fraction ({self.rope_fraction}) of head_dim {self.head_dim} must be an even number of dimensions"
            )
        self._check_norms()
        if self.moe is not None and not (self.gated and self.activation == "silu"):
            raise ValueError("with experts, activation must be 'silu', and gated true")
        self._check_factors(self.rope_scaling)
        if (self.family == "transformers") != (self.foreign is not None):
            raise ValueError('family "transformers" is for models that transformers computes')
        for name in ("sliding_window_layers", "rope_layers"):
            outside = [layer for layer in getattr(self, name) or () if not 0 <= layer < self.n_layers]
            if outside:
                raise ValueError(f"{name} names {outside}, but the layers are 0 to {self.n_layers - 1}")
        return self

    def _check_norms(self) -> None:
        if self.norm_bias and self.norm_kind != "layer":
            raise ValueError(f"norm_bias needs norm_kind 'layer', not {self.norm_kind!r}")
        if self.parallel_block and self.norm_places != "before":
            raise ValueError(f"parallel_block needs norm_places 'before', not {self.norm_places!r}")
        if self.parallel_block and self.moe is not None:
            raise ValueError("parallel_block cannot have experts")
        if self.qk_norm_over == "width" and self.norm_kind == "layer":
            raise ValueError("qk_norm_over 'width' needs a norm_kind without a mean, 'rms' or 'rms_plus_one'")

    def _check_factors(self, scaling: RopeScaling | None) -> None:
        if scaling is not None and scaling.type == "dynamic" and self.rope_dim < 4:
            raise ValueError(f"dynamic rope_scaling needs 4 or more dimensions that rotate, not {self.rope_dim}")
        if scaling is None or scaling.type != "longrope":
            return
        for name in ("short_factor", "long_factor"):
            if len(getattr(scaling, name)) != self.rope_dim // 2:
                raise ValueError(
                    f"rope_scaling.{name} has {len(getattr(scaling, name))} numbers, but {self.rope_dim} dimensions"
                    f" rotate: it needs {self.rope_dim // 2}"
                )

    def _check_latent(self, latent: LatentAttention) -> None:
        if self.head_dim != latent.head_dim:
            raise ValueError(
                f"head_dim ({self.head_dim}) must be latent.nope_dim + latent.rope_dim ({latent.head_dim})"
            )
        if latent.v_dim > latent.head_dim:  # kernels that need equal widths get values padded with zeros
            raise ValueError(f"latent.v_dim ({latent.v_dim}) must not exceed head_dim ({latent.head_dim})")
        if self.n_kv_heads != self.n_heads:
            raise ValueError(f"n_kv_heads ({self.n_kv_heads}) must be n_heads ({self.n_heads}) with latent attention")
        wrong = [name for name in ("qkv_bias", "out_bias", "qk_norm") if getattr(self, name)]
        if wrong:
            raise ValueError(f"latent attention has no {wrong[0]}")
        if self.sinks or self.rotated_norm or self.rope_layers is not None:
            raise ValueError("latent attention has no sinks, no rotated_norm, and rotary positions in every layer")
        given = [name for name in _NOT_LATENT if getattr(self, name) != Architecture.model_fields[name].default]
        if given:
            raise ValueError(f"latent attention cannot have {given[0]}")

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that rotate with the position."""
        return int(self.head_dim * self.rope_fraction) if self.latent is None else self.latent.rope_dim

    @property
    def v_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.latent is None else self.latent.v_dim

    def rotates(self, layer: int) -> bool:
        """Whether the layer has rotary positions."""
        return self.rope_layers is None or layer in self.rope_layers

    def with_overrides(self, overrides: Mapping[str, Any]) -> Architecture:
        """A copy with some fields changed.

        `head_dim` and `n_kv_heads` follow `dim` and `n_heads` if they did before. A table changes single values of the
        current one, except a `rope_scaling` with a `type` of its own.
        """
        unknown = [name for name in overrides if name not in OVERRIDABLE]
        if unknown:
            raise ConfigError("\n".join(unknown_override(name) for name in unknown))
        fields = {name: getattr(self, name) for name in Architecture.model_fields}
        if self.n_kv_heads == self.n_heads:
            fields.pop("n_kv_heads")
        if self.head_dim == _default_head_dim(self.latent, self.dim, self.n_heads):
            fields.pop("head_dim")
        fields.update(overrides)
        for name in TABLES:
            given, present = overrides.get(name), getattr(self, name)
            if isinstance(given, Mapping) and "type" not in given and present is not None:
                fields[name] = {**present.model_dump(), **given}
        return build(fields)


OVERRIDABLE = tuple(name for name in Architecture.model_fields if name != "foreign")  # by model.overrides
NATIVE = frozenset(get_args(Family)) - {"transformers"}  # families that the decoder computes itself


def _default_head_dim(latent: Any, dim: Any, heads: Any) -> int | None:
    """`head_dim` where it is not given; None where it does not follow from valid fields."""
    if isinstance(latent, LatentAttention):
        return latent.head_dim
    parts: tuple[Any, Any] = (dim, heads)
    if isinstance(latent, Mapping):
        parts = (latent.get("nope_dim"), latent.get("rope_dim"))
    if not all(isinstance(part, int) and part > 0 for part in parts):
        return None
    return parts[0] // parts[1] if latent is None else parts[0] + parts[1]


def build(fields: Mapping[str, Any]) -> Architecture:
    """Build an `Architecture`; its errors are ConfigErrors that name the field."""
    try:
        return Architecture.model_validate(dict(fields))
    except ValidationError as error:
        raise ConfigError("\n".join(": ".join(field_problem(row)) for row in error.errors())) from None


def unknown_override(name: str) -> str:
    """The error for a name that is not an architecture field."""
    close = nearest(name, OVERRIDABLE)
    known = "" if close else f"; fields: {', '.join(OVERRIDABLE)}"
    return f"model.overrides.{name}: there is no such architecture field{close}{known}"


def field_problem(row: Any) -> tuple[str, str]:
    """Return the key of the field in a row of pydantic's errors, and what is wrong with it."""
    names = [str(part) for part in row["loc"] if isinstance(part, str)]
    key = ".".join(["model.overrides", *names]) if names else "model"
    if row["type"] == "value_error":
        return key, str(row["ctx"]["error"])
    if row["type"] == "extra_forbidden":
        return key, "there is no such field" + nearest(names[-1][:100], TABLES[names[0]].model_fields)
    if row["type"] == "missing" and len(names) > 1:
        return key, f"is required: the flavor has no {names[0]} to change"
    expected = _EXPECTED[row["type"]].format(**row.get("ctx", {})) if row["type"] in _EXPECTED else row["msg"]
    return key, f"expected {expected}, got {show(row['input'])}"


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "tuple_type": "a list of whole numbers",
    "model_type": "a table",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number, {ge} or more",
    "less_than_equal": "a number, {le} or less",
}

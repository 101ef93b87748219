"""Named model sizes: from `model.name` and `model.flavor` to an Architecture. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline import registry
from shardline.config.architecture import Architecture, MixtureOfExperts, RopeScaling, build
from shardline.config.names import NOT_BUILT, is_built
from shardline.config.schema import Config, Model
from shardline.errors import ConfigError
from shardline.hub import local_path, model_name, repo_of_snapshot
from shardline.models.fused_weights import logical_shapes
from shardline.models.huggingface.config import architecture_from_hf, read_config
from shardline.words import listed

SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")


def _sized(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, **more: Any) -> Architecture:
    return Architecture(dim=dim, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads, ffn_dim=ffn_dim, **more)


_llama3 = functools.partial(_sized, family="llama", vocab_size=128256, rope_theta=500000.0, norm_eps=1e-5)
_qwen3 = functools.partial(
    _sized,
    family="qwen3",
    vocab_size=151936,
    max_seq_len=40960,
    head_dim=128,
    rope_theta=1000000.0,
    norm_eps=1e-6,
    qk_norm=True,
)
_mixtral = functools.partial(_sized, family="mixtral", vocab_size=32000, rope_theta=1000000.0, norm_eps=1e-5)
_qwen3_moe = functools.partial(_qwen3, family="qwen3_moe")
_SCALING = RopeScaling(
    type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
_PACKED_FLEX = {"attn_backend": "flex", "attn_mask_type": "block_causal"}
_PACKED_VARLEN = {"attn_backend": "varlen", "attn_mask_type": "block_causal"}


def _experts(n_experts: int, top_k: int, expert_dim: int, **more: Any) -> MixtureOfExperts:
    return MixtureOfExperts(n_experts=n_experts, top_k=top_k, expert_dim=expert_dim, normalize=True, **more)


def _balanced(n_experts: int, top_k: int, expert_dim: int) -> MixtureOfExperts:
    """Experts balanced by a bias, as TorchTitan trains them."""
    return _experts(n_experts, top_k, expert_dim, balance_coeff=1e-3)


def _shared_experts(count: int, top_k: int, width: int, shared: int, **more: Any) -> dict[str, Any]:
    """`count` experts of one width, and a shared expert as wide as `shared` of them; one layer is dense."""
    sizes = {"n_experts": count, "top_k": top_k, "expert_dim": width, "shared_dim": shared * width}
    return {**sizes, "first_dense": 1, "balance_coeff": 1e-3, **more}


def _deepseek(
    dim: int, layers: int, heads: int, ffn_dim: int, moe: dict[str, Any], mscale: float, q_rank: int | None, **more: Any
) -> Architecture:
    scaling = {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": mscale, "mscale_all_dim": mscale}
    fields: dict[str, Any] = {
        "family": "deepseek_v2",
        "max_seq_len": 163840,
        "rope_theta": 10000.0,
        "rope_pairs": "neighbors",
        "rope_scaling": {"type": "yarn", **scaling},
        "norm_eps": 1e-6,
        "latent": {"kv_rank": 512, "q_rank": q_rank, "nope_dim": 128, "rope_dim": 64, "v_dim": 128},
    }
    return _sized(dim, layers, heads, heads, ffn_dim, moe=moe, **{**fields, **more})


_DEBUG_DEEPSEEK = _deepseek(
    256, 6, 16, 1024, _shared_experts(8, 3, 256, 2), 0.707, None, vocab_size=2048, max_seq_len=16384
)
_V2_ROUTER = {"n_groups": 8, "top_groups": 3, "scale": 16.0}
_V3_ROUTER = {
    "first_dense": 3,
    "score": "sigmoid",
    "normalize": True,
    "scale": 2.5,
    "n_groups": 8,
    "top_groups": 4,
    "group_score": "top2",
}
_V2 = {"vocab_size": 102400, "attn_mask_type": "block_causal"}
_V3 = {"vocab_size": 129280, "attn_mask_type": "block_causal", "family": "deepseek_v3"}


_llama4 = functools.partial(
    _sized,
    family="llama4_text",
    vocab_size=202048,
    max_seq_len=1048576,
    rope_theta=500000.0,
    norm_eps=1e-5,
    rope_pairs="neighbors",
)
_SHARP_SCALING = RopeScaling(
    type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=8192
)
_LONG: dict[str, Any] = {"max_seq_len": 10485760, "rope_scaling": _SHARP_SCALING}


def _llama4_experts(n_experts: int, width: int, every: int) -> MixtureOfExperts:
    return MixtureOfExperts(
        n_experts=n_experts,
        top_k=1,
        expert_dim=width,
        shared_dim=width,
        every=every,
        score="sigmoid",
        scale_input=True,
        balance_coeff=1e-3,
    )


_DEBUG_LLAMA4: dict[str, Any] = {
    "vocab_size": 2048,
    "rope_scaling": _SHARP_SCALING,
    "moe": _llama4_experts(8, 512, every=2),
}


def _with_irope(flavor: str, chunk: int, arch: Architecture) -> dict[str, Architecture]:
    """The flavor, and a variant without rotary positions in layers 0, 4, ... and with chunked attention in the rest."""
    rotating = tuple(layer for layer in range(arch.n_layers) if layer % 4)
    chunks = {"sliding_window": chunk, "sliding_window_layers": rotating, "window_kind": "chunked"}
    return {flavor: arch, f"{flavor}_irope": arch.with_overrides({"rope_layers": rotating, **chunks, **_PACKED_FLEX})}


def _gpt_oss(dim: int, layers: int, n_experts: int) -> Architecture:
    experts = MixtureOfExperts(
        n_experts=n_experts,
        top_k=4,
        expert_dim=2880,
        normalize=True,
        router_bias=True,
        activation="clamped",
        balance_coeff=1e-3,
    )
    scaling = RopeScaling(type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096)
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    sizes = {"head_dim": 64, "vocab_size": 201088, "rope_theta": 150000.0, "rope_scaling": scaling}
    window = {"sliding_window": 128, "sliding_window_layers": tuple(range(0, layers, 2))}
    return _sized(dim, layers, 64, 8, 2880, family="gpt_oss", sinks=True, moe=experts, **biases, **sizes, **window)


# Dense families beyond Llama, in the sizes and with the settings in which they were published.


def _gemma(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, period: int, **more: Any) -> Architecture:
    """All layers except every `period`-th have the window."""
    fields: dict[str, Any] = {
        "norm_kind": "rms_plus_one",
        "norm_places": "both",
        "activation": "gelu_tanh",
        "norm_eps": 1e-6,
        "head_dim": 256,
        "embedding_scale": dim**0.5,
        "tie_word_embeddings": True,
        "sliding_window_layers": tuple(layer for layer in range(layers) if (layer + 1) % period),
    }
    return _sized(dim, layers, heads, kv_heads, ffn_dim, **{**fields, **more})


_gemma2 = functools.partial(
    _gemma,
    period=2,
    family="gemma2",
    vocab_size=256000,
    max_seq_len=8192,
    rope_theta=10000.0,
    sliding_window=4096,
    score_cap=50.0,
    logit_cap=30.0,
)
_gemma3 = functools.partial(
    _gemma,
    period=6,
    family="gemma3_text",
    vocab_size=262208,
    rope_theta=1000000.0,
    window_rope_theta=10000.0,
    sliding_window=1024,
    qk_norm=True,
)
_EIGHTFOLD: dict[str, Any] = {"rope_scaling": RopeScaling(type="linear", factor=8.0)}
_phi3 = functools.partial(_sized, family="phi3", vocab_size=32064, max_seq_len=4096, rope_theta=10000.0, norm_eps=1e-5)
_olmo2 = functools.partial(
    _sized,
    family="olmo2",
    vocab_size=100352,
    max_seq_len=4096,
    rope_theta=500000.0,
    norm_eps=1e-6,
    norm_places="after",
    qk_norm=True,
    qk_norm_over="width",
)
_granite = functools.partial(
    _sized,
    family="granite",
    vocab_size=49155,
    max_seq_len=4096,
    rope_theta=10000.0,
    norm_eps=1e-5,
    embedding_scale=12.0,
    residual_scale=0.22,
    tie_word_embeddings=True,
)
_starcoder2 = functools.partial(
    _sized,
    family="starcoder2",
    vocab_size=49152,
    max_seq_len=16384,
    sliding_window=4096,
    norm_kind="layer",
    norm_bias=True,
    norm_eps=1e-5,
    activation="gelu_tanh",
    gated=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
)
_cohere = functools.partial(
    _sized,
    vocab_size=256000,
    norm_kind="layer",
    norm_eps=1e-5,
    parallel_block=True,
    rope_pairs="neighbors",
    tie_word_embeddings=True,
)
_R7B_WINDOWS = tuple(layer for layer in range(32) if (layer + 1) % 4)
_falcon3 = functools.partial(
    _sized, family="llama", vocab_size=131072, max_seq_len=32768, head_dim=256, rope_theta=1000042.0, norm_eps=1e-6
)
_DENSE_FLAVORS: dict[str, dict[str, Architecture]] = {
    "gemma2": {
        "debugmodel": _gemma2(256, 4, 8, 4, 768, head_dim=32, vocab_size=2048, sliding_window=64),
        "2B": _gemma2(2304, 26, 8, 4, 9216),
        "9B": _gemma2(3584, 42, 16, 8, 14336),
        "27B": _gemma2(4608, 46, 32, 16, 36864, head_dim=128, attention_scale=144**-0.5),
    },
    # The larger ones also see images; these are their text models.
    "gemma3": {
        "debugmodel": _gemma3(256, 6, 8, 4, 768, head_dim=32, vocab_size=2048, sliding_window=64),
        "1B": _gemma3(1152, 26, 4, 1, 6912, vocab_size=262144, max_seq_len=32768, sliding_window=512),
        "4B": _gemma3(2560, 34, 8, 4, 10240, **_EIGHTFOLD),
        "12B": _gemma3(3840, 48, 16, 8, 15360, **_EIGHTFOLD),
        "27B": _gemma3(5376, 62, 32, 16, 21504, head_dim=128, attention_scale=168**-0.5, **_EIGHTFOLD),
    },
    "phi3": {
        "mini": _phi3(3072, 32, 32, 32, 8192, sliding_window=2047),
        "medium": _phi3(5120, 40, 40, 10, 17920, sliding_window=2047),
    },
    "phi4": {"14B": _phi3(5120, 40, 40, 10, 17920, vocab_size=100352, max_seq_len=16384, rope_theta=250000.0)},
    "olmo2": {
        "7B": _olmo2(4096, 32, 32, 32, 11008),
        "13B": _olmo2(5120, 40, 40, 40, 13824),
        "32B": _olmo2(5120, 64, 40, 8, 27648),
    },
    # Granite 3.0; later versions have another rotary base and vocabulary.
    "granite": {
        "2B": _granite(2048, 40, 32, 8, 8192, attention_scale=0.015625, logit_scale=1 / 8),
        "8B": _granite(4096, 40, 32, 8, 12800, attention_scale=0.0078125, logit_scale=1 / 16),
    },
    "smollm3": {
        "3B": _sized(
            *(2048, 36, 16, 4, 11008),
            family="smollm3",
            vocab_size=128256,
            max_seq_len=32768,
            rope_theta=2000000.0,
            norm_eps=1e-6,
            rope_layers=tuple(layer for layer in range(36) if (layer + 1) % 4),
            tie_word_embeddings=True,
        )
    },
    "glm4": {
        "9B": _sized(
            *(4096, 40, 32, 2, 13696),
            family="glm4",
            vocab_size=151552,
            rope_theta=10000.0,
            rope_fraction=0.5,
            rope_pairs="neighbors",
            norm_eps=1.5625e-7,
            norm_places="both",
            qkv_bias=True,
        )
    },
    "starcoder2": {
        "3B": _starcoder2(3072, 30, 24, 2, 12288, rope_theta=999999.4420358813),
        "7B": _starcoder2(4608, 32, 36, 4, 18432, rope_theta=1000000.0),
    },
    "command_r": {
        "35B": _cohere(8192, 40, 64, 64, 22528, family="cohere", rope_theta=8000000.0, logit_scale=0.0625),
        "7B": _cohere(
            *(4096, 32, 32, 8, 14336),
            family="cohere2",
            rope_theta=50000.0,
            logit_scale=0.25,
            sliding_window=4096,
            sliding_window_layers=_R7B_WINDOWS,
            rope_layers=_R7B_WINDOWS,
        ),
    },
    "falcon3": {
        "1B": _falcon3(2048, 18, 8, 4, 8192),
        "3B": _falcon3(3072, 22, 12, 4, 9216),
        "7B": _falcon3(3072, 28, 12, 4, 23040),
        "10B": _falcon3(3072, 40, 12, 4, 23040),
    },
}


# Llama 3.2 (1B, 3B) ties its embeddings and scales its rotary frequencies; 8B, 70B and 405B do neither, as in
# TorchTitan. The published Llama 3.1 weights of those sizes do scale them: load these with model.name = "auto".
# Llama 4 follows TorchTitan too: the published weights have no rotary positions in layers 3, 7, ..., a norm of rotated
# queries and keys (17Bx16E), and queries that grow with their position. gpt-oss is as published.
FLAVORS: dict[str, dict[str, Architecture]] = {
    "llama3": {
        "debugmodel": _llama3(256, 6, 16, 16, 768, vocab_size=2048),
        "debugmodel_flex_attn": _llama3(256, 6, 16, 16, 768, vocab_size=2048, **_PACKED_FLEX),
        "debugmodel_varlen_attn": _llama3(256, 6, 16, 16, 768, vocab_size=2048, **_PACKED_VARLEN),
        "1B": _llama3(2048, 16, 32, 8, 8192, rope_scaling=_SCALING, tie_word_embeddings=True),
        "3B": _llama3(3072, 28, 24, 8, 8192, rope_scaling=_SCALING, tie_word_embeddings=True),
        "8B": _llama3(4096, 32, 32, 8, 14336),
        "8B_flex": _llama3(4096, 32, 32, 8, 14336, **_PACKED_FLEX),
        "8B_varlen": _llama3(4096, 32, 32, 8, 14336, **_PACKED_VARLEN),
        "70B": _llama3(8192, 80, 64, 8, 28672),
        "405B": _llama3(16384, 126, 128, 8, 53248),
    },
    "qwen3": {
        "debugmodel": _qwen3(256, 8, 16, 8, 3072, vocab_size=2048, max_seq_len=4096, tie_word_embeddings=True),
        "0.6B": _qwen3(1024, 28, 16, 8, 3072, tie_word_embeddings=True),
        "1.7B": _qwen3(2048, 28, 16, 8, 6144, tie_word_embeddings=True),
        "4B": _qwen3(2560, 36, 32, 8, 9728, tie_word_embeddings=True),
        "8B": _qwen3(4096, 36, 32, 8, 12288),
        "14B": _qwen3(5120, 40, 40, 8, 17408),
        "32B": _qwen3(5120, 64, 64, 8, 25600),
        "debugmodel_moe": _qwen3_moe(256, 8, 16, 8, 3072, vocab_size=2048, max_seq_len=4096, moe=_balanced(64, 8, 768)),
        "30B-A3B": _qwen3_moe(2048, 48, 32, 4, 6144, max_seq_len=262144, moe=_balanced(128, 8, 768)),
        "235B-A22B": _qwen3_moe(4096, 94, 64, 4, 12288, rope_theta=5000000.0, moe=_balanced(128, 8, 1536)),
    },
    "mixtral": {
        "debugmodel": _mixtral(256, 6, 16, 4, 384, vocab_size=2048, max_seq_len=4096, moe=_experts(8, 2, 384)),
        "8x7B": _mixtral(4096, 32, 32, 8, 14336, max_seq_len=32768, moe=_experts(8, 2, 14336)),
        "8x22B": _mixtral(6144, 56, 48, 8, 16384, max_seq_len=65536, moe=_experts(8, 2, 16384)),
    },
    # 16B and 236B are DeepSeek-V2-Lite and -V2 with a balancing bias, although those were trained without one.
    "deepseek_v3": {
        "debugmodel": _DEBUG_DEEPSEEK,
        "debugmodel_flex_attn": _DEBUG_DEEPSEEK.with_overrides(_PACKED_FLEX),
        "16B": _deepseek(2048, 27, 16, 10944, _shared_experts(64, 6, 1408, 2), 0.707, None, **_V2),
        "236B": _deepseek(5120, 60, 128, 12288, _shared_experts(160, 6, 1536, 2, **_V2_ROUTER), 1.0, 1536, **_V2),
        "671B": _deepseek(7168, 61, 128, 18432, _shared_experts(256, 8, 2048, 1, **_V3_ROUTER), 1.0, 1536, **_V3),
    },
    "llama4": {
        **_with_irope("debugmodel", 256, _llama4(256, 6, 16, 16, 768, **_DEBUG_LLAMA4)),
        **_with_irope("17bx16e", 8192, _llama4(5120, 48, 40, 8, 16384, **_LONG, moe=_llama4_experts(16, 8192, 1))),
        **_with_irope("17bx128e", 8192, _llama4(5120, 48, 40, 8, 16384, moe=_llama4_experts(128, 8192, 2))),
    },
    "gpt_oss": {
        "debugmodel": _gpt_oss(256, 4, n_experts=8),
        "20b": _gpt_oss(2880, 24, n_experts=32),
        "120b": _gpt_oss(2880, 36, n_experts=128),
    },
    **_DENSE_FLAVORS,
}


def resolve(model: Model) -> Architecture:
    """The architecture that a config's model section names, with `model.overrides` applied."""
    if model.name == "auto":
        try:
            return architecture_from_hf(Path(local_path(model.hf_assets_path)), model.implementation, model.overrides)
        except ConfigError as error:
            if str(error).startswith(("model.", "model:")):  # the error already names a key
                raise
            raise ConfigError(f"model.hf_assets_path: {error}") from error
    known = {**FLAVORS.get(model.name, {}), **registry.flavors.get(model.name, {})}
    if model.flavor in known:
        return _architecture(model.name, model.flavor, known[model.flavor]).with_overrides(model.overrides)
    raise ConfigError(_unknown(model.name, model.flavor, known))


def check_weights(config: Config, arch: Architecture) -> None:
    """Refuse a Hugging Face folder whose weights belong to another model than the one in the config."""
    section, model = config.checkpoint, config.model
    own = model.name == "auto" and section.initial_load_path is None
    if own or not (section.enable and section.initial_load_in_hf) or arch.foreign is not None:
        return
    folder = Path(local_path(section.initial_load_path or model.hf_assets_path))
    if not (folder / "config.json").is_file():
        return  # the folder may still have the weights
    kind = str(read_config(folder).get("model_type"))
    found = architecture_from_hf(folder, "native") if is_built(kind) else None
    differing = _differences(found, arch, bool(config.data.added_tokens or config.data.special_tokens))
    if differing:
        named = "model.name = 'auto'" if model.name == "auto" else f"{model.name} {model.flavor}"
        raise ConfigError(
            f"{'checkpoint.initial_load_path' if section.initial_load_path else 'model.hf_assets_path'}: {folder} holds"
            f" another model, of type {kind!r}, than {named} ({differing}); use the folder's own model with"
            f" model.name = 'auto' and model.hf_assets_path = {str(folder)!r}, or name another folder"
        )


def _differences(found: Architecture | None, arch: Architecture, adds_tokens: bool) -> str:
    """The sizes in which a folder's model differs from `arch`, or the weights if no size differs."""
    if found is None:
        return "a family without a native implementation"
    if adds_tokens:
        found = found.model_copy(update={"vocab_size": arch.vocab_size})
    theirs, ours = ({**logical_shapes(one), "output.weight": ()} for one in (found, arch))  # only files may tie it
    if theirs == ours:
        return ""
    sizes = [name for name in SIZES if getattr(found, name) != getattr(arch, name)]
    rows = [f"{name} {getattr(found, name)}, here {getattr(arch, name)}" for name in sizes]
    return (
        ", ".join(rows)
        or f"weights: {listed([name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)], 3)}"
    )


def model_label(model: Model) -> str:
    """The name of a model in logs: its flavor, or the folder that it comes from."""
    if model.name != "auto":
        return f"{model.name} {model.flavor}"
    name, path = model_name(model.hf_assets_path), Path(model.hf_assets_path)
    repo = name.repo if name else repo_of_snapshot(path)
    return repo or (path.resolve().name if path.exists() else model.hf_assets_path)


def _architecture(name: str, flavor: str, given: Any) -> Architecture:
    """A flavor as an Architecture; a registered one may be a dict of fields."""
    if isinstance(given, Architecture):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"flavor {flavor!r} of {name!r} was registered as {type(given).__name__}, not as a dict")
    try:
        return build(given)
    except ConfigError as error:
        raise ConfigError(f"flavor {flavor!r} of {name!r}, as registered: {error}") from None


def _unknown(name: str, flavor: str, known: Mapping[str, Any]) -> str:
    needs = NOT_BUILT.get((name, flavor))
    if needs:
        return f"model.name = {name!r}, model.flavor = {flavor!r}: not built yet ({needs})"
    names = sorted({*FLAVORS, *registry.flavors, "auto"})
    if not known:
        others = {model for model, _ in NOT_BUILT} - set(names)
        if name in others:
            return f"model.name = {name!r}: not built yet; models: {', '.join(names)}"
        return f"model.name = {name!r}: no such model{registry.nearest(name, names)} (models: {', '.join(names)})"
    same = [other for other in known if other.lower() == flavor.lower()]
    close = f", did you mean {same[0]!r}?" if same else registry.nearest(flavor, known)
    return f"model.flavor = {flavor!r}: {name} has no such flavor{close} (flavors: {', '.join(known)})"

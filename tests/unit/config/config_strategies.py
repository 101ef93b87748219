"""Hypothesis strategies: valid values for every key, and things that look like a config without being one."""

import types
from typing import Annotated, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from shardline.config.aliases import ALIASES, NO_EFFECT
from shardline.config.schema import leaves

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NAMES = TEXT.filter(lambda text: text.strip() and text.lower() != "none")
SOURCES = st.lists(
    st.fixed_dictionaries(
        {"path": NAMES},
        optional={
            "type": st.sampled_from(["alpaca", "chat_template"])
            | st.fixed_dictionaries({}, optional={"field_input": NAMES, "format": TEXT}),
            "weight": st.floats(0.1, 10),
            "train_on_eos": st.sampled_from(["turn", "none"]),
            "roles": st.dictionaries(TEXT, st.lists(NAMES, max_size=2), max_size=2),
        },
    ),
    max_size=2,
)
SPECIAL = {
    "data.sources": SOURCES,
    "data.validation_sources": SOURCES,
    "data.special_tokens": st.fixed_dictionaries(
        {}, optional={"pad_token": NAMES, "additional_special_tokens": st.lists(NAMES, max_size=2)}
    ),
    "job.config_file": st.none(),
    "lora.rank_pattern": st.dictionaries(NAMES, st.integers(1, 99), max_size=2),
    "lora.alpha_pattern": st.dictionaries(NAMES, st.floats(0.5, 99), max_size=2),
    "lr_scheduler.momentum_range": st.none() | st.floats(0, 0.9).map(lambda low: [low, low + 0.05]),
    "optimizer.adafactor_decay_rate": st.floats(-10, 0, exclude_max=True),
    "optimizer.adafactor_eps": st.tuples(st.floats(0, 1), st.floats(0, 1)).map(list),
    "activation_checkpoint.selective_ac_option": st.sampled_from(["op", "1", "7"]),
    "model.converters": st.lists(NAMES, max_size=3, unique=True).map(
        lambda names: [name for name in names if name not in ("float8", "mx")]
    ),
    "checkpoint.preempted_exit_code": st.just(0) | st.integers(3, 255),
    "metrics.prometheus_port": st.none() | st.integers(0, 65535),
    "checkpoint.mirror": st.none() | st.sampled_from(["s3://bucket/run", "file:///disk/run", "memory://run"]),
    "checkpoint.save_before": st.none() | st.sampled_from(["0", "90s", "30m", "4h", "1d12h", "86400"]),
    "data.chat_template_kwargs": st.dictionaries(NAMES, st.booleans() | TEXT, max_size=2),
    "comm.nccl.env": st.dictionaries(st.sampled_from(["NCCL_DEBUG", "NCCL_IB_HCA"]), TEXT),
    "model.overrides": st.fixed_dictionaries(
        {},
        optional={
            "dim": st.integers(1, 4096),
            "head_dim": st.integers(2, 64),
            "rope_theta": st.floats(1, 1e7) | st.integers(1, 10**6),
            "qk_norm": st.booleans(),
            "sliding_window": st.none() | st.integers(1, 100),
            "attn_mask_type": st.sampled_from(["causal", "block_causal"]),
            "rope_scaling": st.none() | st.fixed_dictionaries({"factor": st.floats(0.5, 100)}),
        },
    ),
}


def values(key, field):
    """Valid values of one key."""
    return SPECIAL[key] if key in SPECIAL else _values(field.annotation, _words(field.metadata))


def configs():
    """Some keys with valid values."""
    return st.fixed_dictionaries({}, optional={key: values(key, field) for key, field in leaves().items()})


def _words(metadata):
    return next((item.words for item in metadata if hasattr(item, "words")), "")


def _values(annotation, words=""):
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0], _words(arguments[1:]))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([_values(item) for item in arguments])
    if origin is list:
        return st.lists(_values(arguments[0]), max_size=3)
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        low = 0 if words.endswith("0 or more") else 1
        return st.integers(low, 2**63 - 1) | (st.just(-1) if words.startswith("-1") else st.nothing())
    if annotation is float:
        low, high = (0, 1) if "from 0 to" in words or "at most 1" in words else (0, 1e30)
        return st.floats(low, high, exclude_min="above 0" in words, exclude_max="below 1" in words)
    return NAMES


KEYS = st.sampled_from([*leaves(), *ALIASES, *NO_EFFECT, "extends", "training", "model.overrides.dim", "a.b"]) | TEXT
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["none", "demo", "2", "float32", "op", 2**63, 10**400])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
EDGES = st.sampled_from(["=", ":", "-", "--", "[", "]", "{", "}", "\n", "#", "'", '"', ",", "."]) | st.sampled_from(
    ["training", "steps", "model", "overrides", "dim", "1", "0.5", "true", "none", "extends", "&a", "*a"]
)
FLAG_WORDS = st.lists(
    st.one_of(
        KEYS.map(lambda key: f"--{key}"),
        st.builds(lambda key, value: f"--{key}={value}", KEYS, st.text(max_size=8)),
        st.text(max_size=8),
        st.sampled_from(["--preset", "demo", "-1", "true", "[1", "{dim=1}", "[[1]]", "--", "-", "\udc80"]),
    ),
    max_size=6,
)

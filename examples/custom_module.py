"""Add a flavor, a data source, an optimizer and hooks: `--experimental.custom_import examples/custom_module.py`."""

import logging

from shardline import register_flavor, register_hook, register_optimizer, register_source

log = logging.getLogger("shardline")

# --model.name llama3 --model.flavor tiny
register_flavor(
    "llama3", "tiny", {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 192, "vocab_size": 320}
)


@register_source("counting")  # --training.dataset counting; the path is training.dataset_path
def counting(path):
    """Each document counts up from its own number."""
    for first in range(2000):
        yield " ".join(str(number) for number in range(first, first + 40))


@register_optimizer("PlainSGD")  # --optimizer.name PlainSGD; `section` is the config's [optimizer]
def plain_sgd(parameter_groups, section):
    import torch

    return torch.optim.SGD(parameter_groups, lr=section.lr)


@register_hook("before_build")
def announce(config):
    log.info("custom module: %s will be built", config.model.flavor)


@register_hook("after_build")
def count(model, config):
    log.info("custom module: %d parameters", sum(parameter.numel() for parameter in model.parameters()))


@register_hook("after_step")  # after every step; `row` holds step, loss and lr
def watch(trainer, row):
    if row["step"] == 1:
        log.info("custom module: first loss %.3f", row["loss"])

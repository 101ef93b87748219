"""What several commands share: options, and the config that they read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardline.cli.parser import Option
from shardline.config.files import preset_names
from shardline.config.names import DTYPES
from shardline.errors import UserError
from shardline.words import to_stderr

if TYPE_CHECKING:
    from shardline.config.schema import Config

DTYPE = Option("dtype", f"Convert to {', '.join(DTYPES)}; unset keeps the types.", str, "TYPE", choices=DTYPES)
BASE = Option("base", "For an adapter: where its frozen weights are now.", str, "FOLDER")
JSON = Option("json", "Print one JSON object per line.", bool)
ITERATIONS = Option("iterations", "Timed calls; unset: as many as fit into half a second.", int, "N", low=1)
RENDEZVOUS = (
    Option("nnodes", "Number of machines, or a range.", str, "N|MIN:MAX", default="1"),
    Option("node-rank", "Number of this machine, from 0.", int, "N", default=0, low=0),
    Option("rdzv-id", "Name of the job, the same on all machines.", str, "ID", default="none"),
    Option("rdzv-backend", "Rendezvous backend: static or c10d.", str, "NAME", default="static"),
    Option("rdzv-endpoint", "Address of the rendezvous, on the first machine.", str, "HOST:PORT", default=""),
    Option("rdzv-secret-file", "File (mode 0600) with the secret that all machines share.", str, "FILE", default=""),
)


def processes(help: str, default: int | None = None) -> Option:
    return Option("nproc", f"Processes per machine{help}.", int, "N", ("nproc-per-node",), default=default, low=1)


CONFIG_DETAILS = f"""\
FILE is TOML or YAML. Flags change single keys: --training.steps 100, --training.steps=100, --compile.enable,
--compile.no_enable; lists are comma separated. `shardline config --comments` explains every key.
--preset NAME starts from a packaged file (`shardline config --presets` describes them):
{", ".join(preset_names())}."""


def load(file: str | None, flags: Sequence[str], *, check_model: bool = False, download: bool = False) -> Config:
    """The config of a command: loaded, its custom module imported, its combinations checked.

    A rank takes the config of the launcher that started it, which has checked it. With `download`, the sizes
    and the tokenizer of a model on the Hub are downloaded; without it, such a model is not checked.
    """
    from shardline.config.check import check
    from shardline.config.load import load_config, take_handed_over
    from shardline.registry import import_custom

    handed_over = take_handed_over()
    config = handed_over or load_config(file, flags)
    with placing(config):
        import_custom(config.experimental.custom_import)
        if handed_over is None:
            check(config)
            if check_model:
                config = _check_model(config, download)
    return config


def _check_model(config: Config, download: bool) -> Config:
    """Resolve the flavor and its overrides, unless the model is not built yet or not on this machine."""
    from shardline.config.check import check_architecture, check_parameters, pending, with_data_named
    from shardline.hub import model_name
    from shardline.run.downloads import downloaded

    name = model_name(config.model.hf_assets_path) if config.model.name == "auto" else None
    if download:
        config = downloaded(config, weights=False, data=False)
    elif name is not None and name.folder is None:
        to_stderr(f"note: {name} is a model on the Hub, which `shardline train` downloads: not checked")
        return config
    if pending(config).keys() & {"model.name", "model.flavor"}:
        return config
    from shardline.models.flavors import check_weights, resolve
    from shardline.models.fused_weights import parameter_count

    arch = resolve(config.model)
    parameters = parameter_count(arch)
    check_parameters(config, parameters)
    check_architecture(config, arch)
    check_weights(config, arch)
    return with_data_named(config, parameters)


@contextlib.contextmanager
def placing(config: Config) -> Iterator[None]:
    """Add the place where a key was given to each line of an error that begins with the key."""
    try:
        yield
    except UserError as error:
        error.args = ("\n".join(_located(config, line) for line in str(error).splitlines()),)
        raise


def _located(config: Config, line: str) -> str:
    from shardline.config.assemble import annotation_of

    key = re.match(r"[\w.]*", line)[0].rstrip(".")  # type: ignore[index]
    if annotation_of(key) is None and not line.startswith("model: "):  # "model: " is about several fields
        return line
    places = [config.origin(known) for known in (key, *config.given()) if known == key or known.startswith(f"{key}.")]
    where = next((place for place in places if place), "")
    return f"{where}: {line}" if where else line

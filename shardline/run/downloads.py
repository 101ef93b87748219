"""Downloads what a config names on the Hugging Face Hub, and gives each name the commit that it stands for.

The launcher does this once on its machine, before it starts ranks, which read from the cache of `huggingface_hub`.
That package has the token, the cache, the endpoint and the offline mode; texts of its errors are not shown, since they
hold addresses.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardline.config.names import CARD, DATA_FILES, LAUNCHER_VARIABLE, is_registered
from shardline.config.schema import Config, leaves
from shardline.config.sources import SOURCE_LISTS
from shardline.errors import UserError, blame
from shardline.hub import HubName, cache_folder, dataset_name, local_path, model_name
from shardline.run.dataset_card import named_files
from shardline.storage.progress import say
from shardline.words import listed

ASSETS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")  # beside the weights; none is large
WEIGHTS = ("*.safetensors",)
NOT_THESE = ("*/*", "consolidated*")  # copies of the weights in other formats
INDEX = "model.safetensors.index.json"


def downloaded(config: Config, *, weights: bool = True, data: bool = True) -> Config:
    """Download what the config names on the Hub, and return the config with the commit of every name.

    Weights and data, which are large, can be left for later. A rank of our launcher has nothing to download.
    """
    if LAUNCHER_VARIABLE in os.environ:
        return config
    changes = dict(_models(config, weights))
    changes |= dict(_datasets(config)) if data else {}
    return config.replace(changes, origin=None) if changes else config


def _models(config: Config, weights: bool) -> Iterator[tuple[str, str]]:
    section = config.checkpoint
    loads = section.enable and section.initial_load_in_hf
    own = loads and section.initial_load_path is None
    uses_assets = config.model.name == "auto" or config.model.tokenizer_path is None or own
    wanted = {  # whether anything of it is read, and whether its weights are
        "model.hf_assets_path": (uses_assets, own),
        "model.tokenizer_path": (True, False),
        "checkpoint.initial_load_path": (loads, loads),
    }
    for key, (is_used, has_weights) in wanted.items():
        name = model_name(config.value(key) or "") if is_used else None
        if name is not None:
            with blame(key):
                yield key, str(fetch_model(name, weights and has_weights))


def _datasets(config: Config) -> Iterator[tuple[str, Any]]:
    for part in ("training", "validation"):
        section = config.value(part)
        if config.data.sources or (part == "validation" and not section.enable):
            continue
        with blame(f"{part}.{'dataset_path' if section.dataset_path else 'dataset'}"):
            yield from _section(part, section)
    for key in SOURCE_LISTS if config.validation.enable else SOURCE_LISTS[:1]:
        tables = []
        for number, table in enumerate(config.value(key)):
            with blame(f"{key}[{number}]"):
                tables.append(_source(table))
        if tables != config.value(key):
            yield key, tables


def _section(part: str, section: Any) -> Iterator[tuple[str, Any]]:
    """The keys of `[training]` or `[validation]` with commits; a dataset by its name alone becomes its files."""
    if section.dataset_path:
        items = [item.strip() for item in section.dataset_path.split(",")]
        names = [dataset_name(item) for item in items]
        if any(names):
            found = [str(fetch_files(name)) if name else item for item, name in zip(items, names, strict=True)]
            yield f"{part}.dataset_path", ",".join(found)
        return
    repo, _, subset = (section.dataset or "").partition(":")
    name = None if is_registered(section) or "[" in section.dataset_split else model_name(repo)
    if name is None:
        return
    files = fetch_dataset(name._replace(kind="dataset"), subset or None, section.dataset_split)
    if files is not None:
        yield f"{part}.dataset_path", ",".join(map(str, files))
        if files[0].path:  # files of the split alone
            yield f"{part}.dataset_split", leaves()[f"{part}.dataset_split"].default


def _source(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A table of `data.sources` whose path has a commit."""
    path, files = str(table.get("path", "")), table.get("data_files")
    patterns = [files] if isinstance(files, str) else files
    name = dataset_name(path)
    if name is not None:
        inside = [name._replace(path=f"{name.path}/{one}".strip("/")) for one in patterns or [""]]
        commits = [fetch_files(one).revision for one in inside]
        return {**table, "path": str(name._replace(revision=commits[0]))}
    name = model_name(path)
    if name is None:
        return table
    name = name._replace(kind="dataset", revision=table.get("revision") or name.revision)
    split = str(table.get("split") or "train").partition("[")[0]
    found = fetch_dataset(name, table.get("name"), split, patterns)
    if found is None:
        return table  # left to the package `datasets`
    kept = {key: value for key, value in table.items() if key not in ("name", "revision")}
    paths = [one.path for one in found if one.path]
    return {**kept, "path": str(found[0]._replace(path="")), **({"data_files": paths} if paths else {})}


def local_copy(text: str, weights: bool = False) -> str:
    """Return a path as it is; download what a name on the Hub stands for, and return its local path."""
    data, model = dataset_name(text), model_name(text)
    if data is not None:
        return local_path(str(fetch_files(data)))
    return text if model is None else local_path(str(fetch_model(model, weights)))


# ---- repositories ----------------------------------------------------------------------------------------------------


def fetch_model(name: HubName, weights: bool) -> HubName:
    """Download a model, or all of it but its weights; return the name with its commit."""
    known = name.folder
    if weights and known is not None and missing_weights(known):
        say(f"downloading the weights of {name.repo}")
    found, folder = _fetch(name, (*ASSETS, *(WEIGHTS if weights else ())), NOT_THESE)
    if weights and (missing := missing_weights(folder)):
        raise UserError(f"{name} has no {missing}; {_by_hand(name)}")
    return found


def missing_weights(folder: Path) -> str:
    """Which weights a folder should have and does not have."""
    if (folder / INDEX).is_file():
        try:
            shards = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            return listed(sorted(shard for shard in shards if not (folder / shard).is_file()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"readable {INDEX}"
    return "" if any(folder.glob("*.safetensors")) else "*.safetensors"


def fetch_files(name: HubName) -> HubName:
    """Download the files that a path inside a dataset names; return the name with its commit."""
    path = name.path.rstrip("/")
    if ".." in Path(path).parts:
        raise UserError(f"{name} leads out of the dataset")
    if path.removesuffix(".gz").endswith(DATA_FILES) or glob.has_magic(path):
        found, folder = _fetch(name, *_like_globs([path]))
    else:
        found, folder = _fetch(name, [*_readable(path)])
    if not (glob.glob(str(folder / path), recursive=True) if path else any(map(_is_data, folder.rglob("*")))):
        raise UserError(f"the dataset {name.repo} has no file {path or ' or '.join(DATA_FILES)} at {name.revision}")
    return found


def fetch_dataset(
    name: HubName, config: str | None, split: str, patterns: Sequence[str] | None = None
) -> list[HubName] | None:
    """Download the files of a dataset; None where they are of kinds that only the package `datasets` reads.

    The dataset's card says which files belong to a split; without a card, all readable files are downloaded, and
    their names tell.
    """
    try:
        pinned, folder = _fetch(name, [CARD])
    except HubUnreachable:
        if find_spec("datasets") is None:
            raise
        return None  # that package has a cache of its own
    wanted = patterns or named_files(folder / CARD, config, split) or ([f"{config}/*"] if config else None)
    if wanted is None:
        _, folder = _fetch(pinned, [*_readable("")])
        return [pinned] if any(_is_data(file) for file in folder.rglob("*")) else None
    _fetch(pinned, *_like_globs(wanted))
    found = [file for pattern in wanted for file in glob.glob(str(folder / pattern), recursive=True)]
    return [pinned._replace(path=one) for one in wanted] if found and all(map(_is_data, map(Path, found))) else None


def _like_globs(patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """What to download and what to ignore for globs: in the package's patterns, `*` also goes into folders."""
    several = [pattern.replace("**/", "") for pattern in patterns]
    deepest = max(pattern.count("/") for pattern in patterns)
    deeper = [] if several != list(patterns) else ["/".join("*" * (deepest + 2))]
    return [*patterns, *several], deeper


def _readable(folder: str) -> Iterator[str]:
    for ending in DATA_FILES:
        yield from (f"{folder}{'/' if folder else ''}*{ending}{packed}" for packed in ("", ".gz"))


def _is_data(file: Path) -> bool:
    return file.name.removesuffix(".gz").endswith(DATA_FILES) and file.name != CARD


def _fetch(name: HubName, patterns: Sequence[str], ignored: Sequence[str] = ()) -> tuple[HubName, Path]:
    """Download the matching files of a repository; return the name with its commit, and the folder."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{name} is on the Hub, and the package huggingface_hub is not installed: pip install 'shardline[hub]'"
        ) from None
    try:
        with _quiet_on_files():
            folder = snapshot_download(
                name.repo,
                repo_type=name.kind,
                revision=name.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored) or None,
            )
    except Exception as error:  # the package raises its own, those of its HTTP library and those of files
        kind = HubUnreachable if _is_unreachable(error) else UserError
        raise kind(_explain(error, name)) from None
    commit = Path(folder).name
    if commit != name.revision:
        say(f"{name} of the Hub: commit {commit[:8]}, in {cache_folder()}")
    return name._replace(revision=commit), Path(folder)


@contextlib.contextmanager
def _quiet_on_files() -> Iterator[None]:
    """Let the package show progress bars only on a terminal, and none of its retries."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    before, hides = logging.get_verbosity(), not sys.stderr.isatty() and not are_progress_bars_disabled()
    logging.set_verbosity_error()
    with warnings.catch_warnings():  # a variable of the package may have decided
        warnings.simplefilter("ignore")
        if hides:
            disable_progress_bars()
        try:
            yield
        finally:
            logging.set_verbosity(before)
            if hides:
                enable_progress_bars()


class HubUnreachable(UserError):
    """There is no network, or it is not to be used."""


def _is_unreachable(error: Exception) -> bool:
    from huggingface_hub import errors

    return isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)


def _explain(error: Exception, name: HubName) -> str:
    """What went wrong and what to do, in one line, without the package's own words."""
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    missing = f"the Hub's dataset {name.repo}"
    if name.kind == "model":
        missing = f"there is no folder {name.repo!r}, and the Hub's model of that name"
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return f"{missing} is gated: ask for access on its page, then {login}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{missing} has no revision {name.revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return f"{missing} does not exist or is private: check the name, or {login}"
    if _is_unreachable(error):
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        return f"{missing} is not in the cache, or not all of it, and {offline}; {_by_hand(name)}"
    if status is not None:
        return f"{missing} cannot be downloaded: the Hub answers {status}; {_by_hand(name)}"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return f"{missing} cannot be written to {cache_folder()}: {error.strerror}; HF_HOME names another place"
    broke = f"the connection broke ({type(error).__name__})"
    return f"{missing} was not downloaded: {broke}; the same command resumes it"


def _by_hand(name: HubName) -> str:
    kind = " --repo-type dataset" if name.kind == "dataset" else ""
    at = "" if name.revision == "main" else f" --revision {name.revision}"
    command = f"hf download {name.repo}{kind}{at}"
    return f"where there is a network, `{command}` fills {cache_folder()}: copy that here, or name a folder of files"

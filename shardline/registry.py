"""Flavors, data sources, optimizers and hooks that a user's module (`experimental.custom_import`) adds."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from shardline.errors import ConfigError

Event = Literal["before_build", "after_build", "after_step"]
Function = TypeVar("Function", bound=Callable[..., Any])

flavors: dict[str, dict[str, Any]] = {}
sources: dict[str, Callable[..., Any]] = {}
optimizers: dict[str, Callable[..., Any]] = {}
hooks: dict[str, list[Callable[..., Any]]] = {"before_build": [], "after_build": [], "after_step": []}


def register_flavor(model: str, flavor: str, architecture: Any) -> None:
    """Add `model.name = model`, `model.flavor = flavor`: an `Architecture` or a dict of its fields."""
    flavors.setdefault(model, {})[flavor] = architecture


def register_source(name: str) -> Callable[[Function], Function]:
    """Let `training.dataset = name` read documents from `function(path) -> Iterable[str]`."""
    return _adder(functools.partial(sources.__setitem__, name))


def register_optimizer(name: str) -> Callable[[Function], Function]:
    """Let `optimizer.name = name` build `function(parameter_groups, section) -> torch.optim.Optimizer`."""
    return _adder(functools.partial(optimizers.__setitem__, name))


def register_hook(event: Event) -> Callable[[Function], Function]:
    """Call `function` at `event`: before_build(config), after_build(model, config) or after_step(trainer, row)."""
    if event not in hooks:
        raise ValueError(f"unknown hook event {event!r}: {', '.join(hooks)}")
    return _adder(hooks[event].append)


def run_hooks(event: Event, *arguments: Any) -> None:
    for function in hooks[event]:
        function(*arguments)


def nearest(name: str, names: Any) -> str:
    """`, did you mean 'x'?` if a name is close to a known one, else nothing."""
    known = {str(candidate).lower(): str(candidate) for candidate in names}
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f", did you mean {known[close[0]]!r}?" if close else ""


def import_custom(module: str) -> None:
    """Import the user's module by dotted name or `.py` path; its `register_*` calls run once per process."""
    if not module:
        return
    try:
        if module.endswith(".py"):
            _import_path(Path(module))
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")
            importlib.import_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
        where = f" ({inside[-1].filename}:{inside[-1].lineno})" if inside else ""
        raise ConfigError(
            f"experimental.custom_import = {module!r} cannot be imported: {type(error).__name__}: {error}{where}"
        ) from error


def _import_path(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"experimental.custom_import = {str(path)!r}: there is no such file")
    name = f"shardline_custom_{path.stem}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _adder(add: Callable[[Callable[..., Any]], None]) -> Callable[[Function], Function]:
    def added(function: Function) -> Function:
        add(function)
        return function

    return added

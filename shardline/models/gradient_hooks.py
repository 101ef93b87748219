"""Hooks that run when a gradient is complete, and do not keep alive the object that they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


def when_gradient_arrives(parameter: nn.Parameter, method: Callable[[Any], None]) -> None:
    """Call a bound method with the parameter each time its gradient is complete, as long as its object lives.

    The object refers to its parameters. If their hooks referred to the object, the garbage collector, which does not
    see a parameter's hooks, could free neither, and a model would stay in memory after its trainer is gone.
    """
    reference = weakref.WeakMethod(method)

    def call(arrived: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(arrived)

    parameter.register_post_accumulate_grad_hook(call)

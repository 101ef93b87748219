"""Calls for gradients that have arrived, which do not keep alive what they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


def when_gradient_arrives(parameter: nn.Parameter, method: Callable[[Any], None]) -> None:
    """Call a bound method with the parameter each time its gradient is complete, as long as its object lives.

    The object knows its parameters. If their hooks knew it too, the collector could not free either of them: the hooks
    of a parameter are beyond its sight, and a model would stay in memory after its trainer is gone.
    """
    reference = weakref.WeakMethod(method)

    def call(arrived: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(arrived)

    parameter.register_post_accumulate_grad_hook(call)

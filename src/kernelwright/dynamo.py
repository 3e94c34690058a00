"""Provides the backend of `torch.compile(model, backend="kernelwright")`.

Each part of a model that Dynamo finds between graph breaks is searched at its first call, or taken from what an earlier
search saved.

    faster = torch.compile(model, backend="kernelwright", options={"out": "compiled", "budget": 12})

PyTorch finds it by the entry point `torch_dynamo_backends`, so nothing of Kernelwright is imported by hand.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import fx, nn
from torch._dynamo.utils import get_static_address_type

from kernelwright import api
from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.records import sha256_of
from kernelwright.tasks.in_memory import Inputs, form_of

_KNOWN = frozenset({"out", *api.SearchOptions.__annotations__})
_SAVED = "saved"
MOST_WEIGHTS = 512
"""Sets of weights for which one part is kept, such as those of equal layers. Our choice."""
_MOVES_ONLY = frozenset({"placeholder", "get_attr", "output"})


def backend(graph: fx.GraphModule, _examples: object, *, options: Mapping[str, Any] | None = None) -> CompiledPart:
    """The callable that runs one part of a model.

    Args:
        graph: The part, as Dynamo has traced it: weights and inputs are its arguments.
        _examples: Arguments of the call that is traced.
        options: `out`, a folder for runs and saved results, and options of `kernelwright.optimize`. With `budget` 0 nothing
            is searched.

    Raises:
        UsageError: there is no such option, or no `out`.
    """
    given = dict(options or {})
    if unknown := sorted(given.keys() - _KNOWN) or "out" not in given:
        found = ", ".join(map(str, unknown)) if isinstance(unknown, list) else "no `out`"
        raise UsageError(
            f'Wanted torch.compile(model, backend="kernelwright", options={{"out": DIR}}), with options of '
            f"kernelwright.optimize ({', '.join(sorted(_KNOWN))}); found {found}."
        )
    return CompiledPart(graph, Path(given.pop("out")), given)


class CompiledPart:
    """One part of a model, searched or loaded when it is first called with some weights. Layers of equal code share it."""

    def __init__(self, graph: fx.GraphModule, out: Path, options: dict[str, Any]) -> None:
        self._graph, self._out, self._options = graph, out, options
        self._weights: list[int] = []
        self._inputs: list[int] = []
        self._modules: dict[tuple[int, ...], nn.Module] = {}
        """The module that runs, by the addresses of the weights that it holds."""
        self._is_refused = False

    def __call__(self, *arguments: Any) -> Any:
        """The part's outputs."""
        if not (self._weights or self._inputs):
            for index, value in enumerate(arguments):
                holds = isinstance(value, nn.Parameter) or get_static_address_type(value) is not None
                (self._weights if holds else self._inputs).append(index)
        held = tuple([id(arguments[index]) for index in self._weights])
        module = self._modules.get(held)
        if module is None and len(self._modules) == MOST_WEIGHTS:
            warnings.warn("kernelwright: a part of the model runs as it is, since its weights change often.", stacklevel=2)
            return self._graph(*arguments)
        if module is None:
            module = self._modules[held] = self._made(arguments)
        return module(*[arguments[index] for index in self._inputs])

    def _made(self, arguments: tuple[Any, ...]) -> nn.Module:
        """The part with confirmed code in place, or as it is where there is none."""
        model = self._around_weights(arguments)
        if all(node.op in _MOVES_ONLY for node in model.graph.nodes):
            return model
        given = [arguments[index] for index in self._inputs]
        known = (model.code, form_of(arguments, []))
        folder = self._out / f"part-{sha256_of(repr(known))[:16]}"
        try:
            if (folder / _SAVED).exists():
                return api.load(model, folder / _SAVED)
            if self._is_refused or self._options.get("budget") == 0:
                return model
            result = api.optimize(model, Inputs(*given), out=folder, **self._options)
            result.save(folder / _SAVED)
        except KernelwrightError as error:
            self._is_refused = True
            warnings.warn(f"kernelwright: a part of the model runs as it is ({folder.name}). {error}", stacklevel=3)
            return model
        return result.module

    def _around_weights(self, arguments: tuple[Any, ...]) -> fx.GraphModule:
        """The part as a module with weights of its own: Dynamo passes parameters and buffers in each call."""
        model = fx.GraphModule(self._graph, copy.deepcopy(self._graph.graph)).eval()
        places = [node for node in model.graph.nodes if node.op == "placeholder"]
        for index in self._weights:
            node, value = places[index], arguments[index]
            if isinstance(value, nn.Parameter):
                model.register_parameter(node.name, value)
            else:
                model.register_buffer(node.name, value)
            with model.graph.inserting_before(node):
                node.replace_all_uses_with(model.graph.get_attr(node.name))
            model.graph.erase_node(node)
        model.recompile()
        return model

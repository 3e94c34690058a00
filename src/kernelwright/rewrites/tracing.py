"""Traces a task's source into operator graphs, one per module mode, with everything needed to print them again.

The task is trusted code: it is run here, on fake tensors where it can be, so that even a task of many
gigabytes is traced in seconds and megabytes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import operator
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from kernelwright.errors import InternalError
from kernelwright.records import Task
from kernelwright.rewrites.graph import (
    argument,
    aten,
    is_call,
    is_mutable,
    is_tensor,
    value,
    without_steps,
)
from kernelwright.rewrites.printing import literal
from kernelwright.tasks import map_tensors, printing_aside

BOOKKEEPING = (aten.detach, aten.detach_, aten.alias, aten.lift_fresh, aten.lift_fresh_copy)
"""Operators that only matter to autograd or to the exporter: their result is their input."""


class UntraceableError(InternalError):
    """A task has no operator graph that could be printed as source. The policy then only wraps the module."""


class CarriedStateError(UntraceableError):
    """A module leaves a tensor for its next call in an attribute: neither operators in one line nor a CUDA graph do that."""


class OtherFormError(UntraceableError):
    """An operator writes to storage that another value shares, or is in a nested graph, as under autocast: the exporter's
    functional form may still be printed."""


def normalise(graph: fx.Graph) -> None:
    """Remove bookkeeping and turn in-place operators on intermediates into ordinary ones.

    Only counters of buffers (`num_batches_tracked += 1`) stay in place, because they are seen from outside.

    Raises:
        OtherFormError: an operator writes to storage that another value shares.
        UntraceableError: an operator writes to an input or a parameter, or has no functional form.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if is_call(node, *BOOKKEEPING):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is operator.getitem and is_call(node.args[0], aten.broadcast_tensors):
            _drop_broadcast(node)
        elif is_call(node, aten.to, aten.type_as):
            _simplify_conversion(node)
        elif str(node.target).startswith("aten._assert"):
            graph.erase_node(node)
        elif is_mutable(node):
            _make_functional(graph, node)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _scalars(node)
    _record_contract(graph)
    graph.lint()


def _drop_broadcast(pick: fx.Node) -> None:
    """Read what was broadcast together with others directly where its shape did not change."""
    together = cast(fx.Node, pick.args[0])
    source = cast(Any, together.args[0])[pick.args[1]]
    if value(source).shape == value(pick).shape:
        pick.replace_all_uses_with(source)
        pick.graph.erase_node(pick)
        if not together.users:
            pick.graph.erase_node(together)


def _simplify_conversion(node: fx.Node) -> None:
    """Drop a conversion to what a tensor already is, for which PyTorch returns the tensor; name the type of `type_as`."""
    source = cast(fx.Node, node.args[0])
    before, after = value(source), value(node)
    same = (before.dtype, before.device, before.stride()) == (after.dtype, after.device, after.stride())
    if same and not argument(node, "copy"):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)
    elif is_call(node, aten.type_as) and before.device == after.device:
        node.target, node.args = aten.to.dtype, (source, after.dtype)


def _make_functional(graph: fx.Graph, node: fx.Node) -> None:
    target = node.args[0]
    if not is_tensor(target):
        raise UntraceableError(f"{node.target} writes to something that is no tensor")
    target = cast(fx.Node, target)
    if target.op == "placeholder":
        if target.meta["role"] == "buffer" and not node.users and all(is_mutable(user) for user in target.users):
            return
        raise UntraceableError(f"{node.target} writes to {target.meta['expression']}")
    if _shares_storage(target, node):
        raise OtherFormError(f"{node.target} writes to storage that another value shares")
    name = cast(Any, node.target)._schema.name.split("::")[1]
    packet = getattr(aten, name.removesuffix("_"), None)
    overload = getattr(packet, cast(Any, node.target)._overloadname, None) if name.endswith("_") else None
    if node.target is aten.bernoulli_.float:  # stochastic depth draws so
        overload = aten.bernoulli.p
    if overload is None or overload._schema.is_mutable:
        raise UntraceableError(f"{node.target} has no form that leaves its input alone")
    nodes = list(graph.nodes)
    later = set(nodes[nodes.index(node) + 1 :])
    node.target = overload
    target.replace_all_uses_with(node, delete_user_cb=lambda user: user in later)


def _shares_storage(target: fx.Node, writer: fx.Node) -> bool:
    """True where a call writes to storage of another value that is read later, such as one that the target is a view of."""
    nodes = list(target.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    family = [target]
    while is_view_call(family[0]) and not is_mutable(family[0]):
        family.insert(0, cast(fx.Node, family[0].args[0]))
    for member in family:
        views = (user for user in member.users if is_tensor(user) and is_view_call(user) and not is_mutable(user))
        family += [user for user in views if user not in family and place[user] < place[writer]]
    others = (member for member in family if member is not target)
    return family[0].op == "placeholder" or any(
        place[user] > place[writer] for member in others for user in member.users if user not in family
    )


def is_view_call(node: fx.Node) -> bool:
    """True where a call's result may share storage with its first argument."""
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(result.alias_info is not None for result in schema.returns)
    # These say nothing in their schema and may or may not copy.
    return aliases or is_call(node, aten.reshape, aten.flatten, aten.contiguous, aten.to, aten.expand_as)


def aliases_placeholder(node: fx.Node) -> bool:
    """True where a value may share storage with an input or with state."""
    while node.op == "call_function" and is_view_call(node) and is_tensor(node.args[0]):
        node = cast(fx.Node, node.args[0])
    return node.op == "placeholder"


def _record_contract(graph: fx.Graph) -> None:
    """Remember what is promised about the outputs, before any rule changes how they are made."""
    output = next(node for node in graph.nodes if node.op == "output")
    output.meta["contract"] = [
        (value(item).stride(), aliases_placeholder(item)) if is_tensor(item) else None for item in output.args[0]
    ]


def _scalars(node: fx.Node) -> None:
    """Read a constant of one element as a Python number where that gives the same result type."""
    if not is_call(node, aten.add, aten.sub, aten.mul, aten.div, aten.min, aten.max, aten.minimum, aten.maximum):
        return
    if len(node.args) != 2 or not all(is_tensor(item) or isinstance(item, int | float) for item in node.args):
        return
    left, right = node.args
    if not (isinstance(right, fx.Node) and "constant" in right.meta and isinstance(left, fx.Node)):
        return
    if not (value(left).is_floating_point() and value(left).dim() and value(node).dtype == value(left).dtype):
        return
    number = right.meta["constant"]
    if is_call(node, aten.min, aten.minimum):
        node.target, node.args = aten.clamp_max.default, (left, number)
    elif is_call(node, aten.max, aten.maximum):
        node.target, node.args = aten.clamp_min.default, (left, number)
    else:
        node.args = (left, number)


_RUN_BYTES = 2 << 30
"""Weights and inputs up to which a module is run to see how its submodules are called, on a CPU. Our choice."""
LARGEST_CONSTANT = 64
"""Tensors made inside `forward` from literals are printed as literals up to this many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One argument of `forward`: what it was when the graph was traced."""

    name: str
    """Text that reads it: that of an argument, or of a part of one."""
    parameter: str
    """The argument, with `**` where it holds the keywords that the signature has no names for."""
    default: str | None = None
    """Text of its default value in the signature."""
    shape: tuple[int, ...] | None = None
    """None when the argument is not a tensor."""
    strides: tuple[int, ...] | None = None
    """None when it is contiguous, too."""
    dtype: torch.dtype | None = None
    constant: Any = None
    """The value of an argument that is not a tensor, plain data or a function; it is baked into the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorGraph:
    """The operators of `forward` in one mode. Placeholders of module state carry `meta["expression"]`."""

    graph: fx.Graph
    mode: FakeTensorMode
    output_spec: pytree.TreeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A task's module as operator graphs."""

    inputs: tuple[Input, ...]
    init_inputs: tuple[Any, ...] | None
    """The constructor's arguments when it takes any and they are plain data: the graphs hold for these only."""
    training: OperatorGraph
    evaluation: OperatorGraph
    only: bool | None
    """The mode that both graphs are of, `training` of the task's module, where the other mode has none."""
    paths: tuple[str, ...] = ()
    """Submodules whose `forward` it is, equal ones; empty for the whole module."""
    others: tuple[Trace, ...] = ()
    """The other submodules with a graph, of a module that has none."""
    obstacle: str = ""
    """Reason why the whole has no graph."""

    @property
    def graphs(self) -> tuple[OperatorGraph, ...]:
        """The graphs in train and in eval mode, then those of the other submodules."""
        return (self.training, self.evaluation, *(graph for other in self.others for graph in other.graphs))


def load(source: str, name: str) -> types.ModuleType:
    """Run a task's source as a module of its own, outside `sys.modules`; whatever it raises comes through."""
    module = types.ModuleType(name)
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's warnings and log lines away from the user, what the task prints away from the result, and the
    caller's random state as it was."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), printing_aside():
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(0)  # which parts run may depend on values
            yield
    finally:
        logging.disable(previous)


def trace(task: Task) -> Trace:
    """Trace a task in train and in eval mode.

    Raises:
        UntraceableError: the module cannot be expressed as one straight line of operators; CarriedStateError where it keeps
        a state between calls.
    """
    failure: Exception | None = None
    place = ""
    # Real tensors where fake ones do not do, which may take much memory; one mode alone where the other has no graph.
    for is_fake, is_whole in ((True, True), (False, True), (True, False)):
        if isinstance(failure, UntraceableError) and not is_fake:
            continue
        with _quiet():
            try:
                with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else contextlib.nullcontext():
                    model: nn.Module | None = None
                    module, model, init_inputs = _made(task)
                    inputs = tuple(module.get_inputs())
                return _trace_of(model, inputs, init_inputs, is_whole)
            except CarriedStateError:
                raise
            # Any exception of a task's own code or of the exporter means the same here: no graph.
            except Exception as error:  # noqa: BLE001
                if not isinstance(failure, UntraceableError):
                    failure, place = error, _place(error, model)
    if not isinstance(failure, UntraceableError):
        message = "".join(str(failure).splitlines()[:1]).partition(" (unhinted")[0].rstrip(".")
        to_do = "; use torch.where, or decide outside of forward" if "data-dependent" in message else ""
        failure = UntraceableError(f"{type(failure).__name__}: {message}{to_do}")
    failure = UntraceableError(f"{place}{failure}")
    with _quiet(), contextlib.suppress(Exception):  # what is wrong with the whole is said
        first, *others = _parts(task)
        return replace(first, others=tuple(others), obstacle=str(failure))
    raise failure


def _place(error: Exception, model: nn.Module | None) -> str:
    """The innermost submodule that an exception came through, in words; empty where there is none."""
    children = model.named_modules() if model is not None else ()
    paths = {id(child): f"in {path}, a {type(child).__name__}, " for path, child in children if path}
    owners = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((paths[owner] for owner in reversed(owners) if owner in paths), "")


def _made(task: Task) -> tuple[types.ModuleType, nn.Module, tuple[Any, ...] | None]:
    """A task's text as a module, its model, and the constructor's arguments where the graphs hang on them."""
    module = load(task.source, "kernelwright_task")
    init_inputs = module.get_init_inputs()
    model = cast(nn.Module, module.Model(*init_inputs))
    if len({child.training for child in model.modules()}) != 1:
        raise UntraceableError("its submodules are in different modes")
    own = type(model).__init__ is not nn.Module.__init__ and bool(inspect.signature(type(model)).parameters)
    return module, model, tuple(init_inputs) if own and _is_plain(init_inputs) else None


def _trace_of(
    model: nn.Module,
    inputs: tuple[Any, ...],
    init_inputs: tuple[Any, ...] | None,
    is_whole: bool,
    named: Mapping[str, Any] = MappingProxyType({}),
) -> Trace:
    """The trace of a module, or of a submodule, in both modes or in its own alone, in which it stays."""
    signature, own = _signature(model, inputs, named), model.training
    modes = (True, False) if is_whole else (own,)
    try:
        graphs = [_graph(model.train(training), inputs, named, signature) for training in modes]
    finally:
        model.train(own)
    only = None if is_whole else own
    return Trace(inputs=signature, init_inputs=init_inputs, training=graphs[0], evaluation=graphs[-1], only=only)


def _parts(task: Task) -> list[Trace]:
    """The traces of the largest submodules that have a graph, equal ones together, the longest first."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, model, init_inputs = _made(task)
        tensors = pytree.tree_leaves([*model.parameters(), *model.buffers(), *module.get_inputs()])
    if sum(item.numel() * item.element_size() for item in tensors if isinstance(item, torch.Tensor)) > _RUN_BYTES:
        return []
    module, model, init_inputs = _made(task)
    calls: dict[nn.Module, list[inspect.BoundArguments | None]] = {}

    def note(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The trace of a part alone knows nothing of autocast around it.
        strange = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        calls.setdefault(child, []).append(None if strange else _given(child, args, kwargs))

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for child in model.modules():
            hooks.enter_context(child.register_forward_pre_hook(note, with_kwargs=True))
        for _ in range(2):  # calls whose shapes hang on values differ
            model(*module.get_inputs())
    found: dict[str, Trace] = {}
    waiting = list(model.named_children())
    for path, child in waiting:
        traced = _part(child, calls.get(child, []), init_inputs)
        if traced is None:
            waiting += [(f"{path}.{name}", part) for name, part in child.named_children()]
        else:
            key = "\n".join(map(repr, [traced.inputs, traced.only, *map(_described, traced.graphs)]))
            known = found.get(key, traced)
            found[key] = replace(known, paths=(*known.paths, path))
    return sorted(found.values(), key=lambda one: -len(one.evaluation.graph.nodes))


def _given(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call, defaults included."""
    given = inspect.signature(child.forward).bind(*args, **kwargs)
    given.apply_defaults()
    return given


def trace_block(task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace | None:
    """The trace of the module in memory that is a task's `model`, called with tensors like these; None where it has none."""
    with _quiet(), contextlib.suppress(Exception):  # the task's own code
        with FakeTensorMode(allow_non_fake_inputs=True):
            child = _made(task)[1].get_submodule("model")
            args, kwargs = map_tensors(
                (args, kwargs), lambda like: torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            )
        return _part(child, [_given(child, args, kwargs)], None)
    return None


def _part(
    child: nn.Module, calls: Sequence[inspect.BoundArguments | None], init_inputs: tuple[Any, ...] | None
) -> Trace | None:
    """The trace of a submodule that is called in one way; None where it has none, or hardly any operators."""
    for is_whole in (True, False):
        with contextlib.suppress(Exception):
            known = [given for given in calls if given is not None]
            (_,) = {repr(_signature(child, given.args, given.kwargs)) for given in known}
            traced = _trace_of(child, known[0].args, init_inputs, is_whole, known[0].kwargs)
            count = sum(node.op == "call_function" for node in traced.evaluation.graph.nodes)
            functions = any(callable(item.constant) for item in traced.inputs)  # which the candidate's text may not have
            return None if count < 2 or functions or "forward" in vars(child) or len(known) < len(calls) else traced
    return None


def _described(graph: OperatorGraph) -> list[Any]:
    """All that the text of a graph hangs on."""
    state = [node for node in graph.graph.nodes if node.op == "placeholder" and is_tensor(node)]
    tensors = [(node.meta["expression"], value(node).shape, value(node).stride(), value(node).dtype) for node in state]
    return [str(graph.graph), tensors, str(graph.output_spec)]


def _is_plain(item: Any) -> bool:
    if isinstance(item, list | tuple):
        return all(map(_is_plain, item))
    if isinstance(item, dict):
        return all(map(_is_plain, item.items()))
    return item is None or isinstance(item, bool | int | float | str)


def _signature(model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Input, ...]:
    """The arguments of `forward`, matched with the traced inputs."""
    described = []
    for index, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
        is_rest = parameter.kind is parameter.VAR_KEYWORD
        if not is_rest and parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise UntraceableError("forward takes *args or keyword-only arguments")
        has_default = parameter.default is not parameter.empty
        function = has_default and _is_own_function(model, parameter.default)
        if has_default and not function and not _is_plain(parameter.default):
            raise UntraceableError(f"the default of argument {parameter.name} is not plain data")
        given = is_rest or index < len(inputs)
        item = named if is_rest else inputs[index] if given else parameter.default
        parts = item.items() if is_rest else enumerate(item) if isinstance(item, list | tuple) else ()
        if is_rest and not named:
            described.append(Input(name=parameter.name, parameter=f"**{parameter.name}", constant={}))
            continue
        for name, leaf in [(f"{parameter.name}[{place!r}]", part) for place, part in parts] or [(parameter.name, item)]:
            tensor = isinstance(leaf, torch.Tensor)
            if (not tensor and not _is_plain(leaf) and (given or not function)) or isinstance(leaf, list | tuple | dict):
                raise UntraceableError(f"argument {name} is neither a tensor nor a number")
            described.append(
                Input(
                    name=name,
                    parameter="**" * is_rest + parameter.name,
                    default=parameter.default.__name__ if function else repr(parameter.default) if has_default else None,
                    shape=tuple(leaf.shape) if tensor else None,
                    strides=leaf.stride() if tensor and not leaf.is_contiguous() else None,
                    dtype=leaf.dtype if tensor else None,
                    constant=None if tensor else leaf,
                )
            )
    return tuple(described)


def _is_own_function(model: nn.Module, item: Any) -> bool:
    """True where it is a function of the model's own module, which the candidate has under the same name."""
    return isinstance(item, types.FunctionType) and type(model).forward.__globals__.get(item.__name__) is item


def _graph(
    model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], signature: tuple[Input, ...]
) -> OperatorGraph:
    try:
        return _operators(model, _exported(model, inputs, named), signature)
    except OtherFormError as shared:
        # The exporter's functional form is wordier than ours, so it is taken only where ours is not possible.
        exported = _exported(model, inputs, named).run_decompositions({})
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in exported.graph_signature.output_specs):
            raise UntraceableError(str(shared)) from shared
        return _operators(model, exported, signature)


def _exported(model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> torch.export.ExportedProgram:
    watch = _AttributeWatch()
    hooks = model.register_forward_pre_hook(watch.start), model.register_forward_hook(watch.end)
    # Where it fails, the exporter writes the whole graph to standard error.
    silent = contextlib.redirect_stderr(io.StringIO())
    with silent, without_steps(), _attention_as_in_inference(model), hooks[0], hooks[1]:
        exported = torch.export.export(model, inputs, dict(named), strict=False)
    # The exporter takes what a call reads of an attribute for a constant, and drops what the call leaves there.
    used = {node.name for node in exported.graph.nodes if node.op == "placeholder" and node.users}
    read = {spec.target for spec in exported.graph_signature.input_specs if spec.arg.name in used}
    if carried := sorted(watch.new & read):
        raise CarriedStateError(f"it keeps a state between calls in {', '.join(carried)}")
    return exported


@contextlib.contextmanager
def _attention_as_in_inference(model: nn.Module) -> Iterator[None]:
    """Results of attention layers lie in memory as in inference, where PyTorch computes some by one operator of its own. It
    does not while it is traced, and what it does then leaves a batch's sequences side by side."""
    instead: dict[type, Callable[..., Any]] = {nn.MultiheadAttention: _laid_out, nn.TransformerEncoder: _with_padding}
    layers = [child for child in model.modules() if type(child) in instead and "forward" not in vars(child)]
    for child in layers:
        vars(child)["forward"] = partial(instead[type(child)], child)
    try:
        yield
    finally:
        for child in layers:
            del vars(child)["forward"]


def _laid_out(layer: nn.MultiheadAttention, *given: Any, **named: Any) -> tuple[Any, ...]:
    """The result of an attention layer as it lies in inference."""
    result = nn.MultiheadAttention.forward(layer, *given, **named)
    arguments = inspect.signature(nn.MultiheadAttention.forward).bind(layer, *given, **named).arguments
    return (result[0].contiguous(), *result[1:]) if _is_one_operator(layer, arguments) else result


def _with_padding(encoder: nn.TransformerEncoder, *given: Any, **named: Any) -> torch.Tensor:
    """The result of an encoder. Raises an error where inference leaves padding out, which depends on the mask's values."""
    arguments = inspect.signature(nn.TransformerEncoder.forward).bind(encoder, *given, **named).arguments
    is_padded = arguments.get("mask") is None and arguments.get("src_key_padding_mask") is not None
    if is_padded and encoder.use_nested_tensor and not encoder.training:
        raise UntraceableError(
            "padding is left out by its values; construct TransformerEncoder with enable_nested_tensor=False"
        )
    return nn.TransformerEncoder.forward(encoder, *given, **named)


def _is_one_operator(layer: Any, given: dict[str, Any]) -> bool:
    """True where `torch.nn.MultiheadAttention` computes such a call by one operator in inference, by its own conditions."""
    query = given["query"]
    masks = [given.get(name) for name in ("attn_mask", "key_padding_mask")]
    return (
        query is given["key"] is given["value"]
        and query.dim() == 3
        and not layer.training
        and layer.batch_first
        and layer.num_heads % 2 == 0
        and layer._qkv_same_embed_dim
        and layer.in_proj_bias is not None
        and layer.bias_k is None
        and not layer.add_zero_attn
        and not any(mask is not None and mask.is_floating_point() for mask in masks)
    )


class _AttributeWatch:
    """Watches the attributes in which a module's calls leave a tensor that they have made."""

    def __init__(self) -> None:
        self.new: set[str] = set()
        """Paths of these attributes. `x.to` makes no tensor where `x` is there already."""
        self._before: list[torch.Tensor] = []

    def start(self, model: nn.Module, _: Any) -> None:
        """A hook before a call: keep the tensors that there are."""
        self._before += _attributes(model).values()

    def end(self, model: nn.Module, *_: Any) -> None:
        """A hook after a call: note the attributes with other tensors."""
        known = set(map(id, self._before))
        self.new.update(path for path, item in _attributes(model).items() if id(item) not in known)


def _attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors in plain attributes of a module and its children, by their paths."""
    return {
        f"{prefix}.{name}".removeprefix("."): item
        for prefix, child in model.named_modules()
        for name, item in vars(child).items()
        if isinstance(item, torch.Tensor)
    }


def _operators(model: nn.Module, exported: torch.export.ExportedProgram, signature: tuple[Input, ...]) -> OperatorGraph:
    graph = exported.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    if any(node.op in ("get_attr", "call_module", "call_method") for node in graph.nodes):
        devices = {node.args[0] for node in graph.nodes if node.target is torch.ops.higher_order.wrap_with_autocast}
        if elsewhere := devices - {"cpu"}:
            raise UntraceableError(
                f"forward enters autocast of {', '.join(map(str, elsewhere))}; call the model in it instead"
            )
        raise OtherFormError("it has control flow or nested graphs")
    names = iter(signature)
    mode: FakeTensorMode | None = None
    for spec in exported.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if isinstance(node.meta.get("val"), torch.Tensor):
            mode = mode or getattr(node.meta["val"], "fake_mode", None)
        if spec.kind is InputKind.USER_INPUT:
            node.meta["expression"] = next(names).name
            node.meta["role"] = "input"
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            node.meta["expression"] = path_expression(model, cast(str, spec.target))
            node.meta["role"] = "buffer" if spec.kind is InputKind.BUFFER else "parameter"
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            _constant(model, node, cast(str, spec.target), exported.constants)
        else:
            raise UntraceableError(f"it takes an input of kind {spec.kind}")
    if mode is None:
        raise UntraceableError("it has no tensor input or parameter")
    for node in graph.nodes:
        _check_fit(node)
    kinds = [exported.call_spec.out_spec]
    for spec in kinds:
        kinds += spec.children()
        if not spec.is_leaf() and spec.type not in (tuple, list, dict):
            raise UntraceableError(f"forward returns a {spec.type}")
    normalise(graph)
    return OperatorGraph(graph=graph, mode=mode, output_spec=exported.call_spec.out_spec)


def _check_fit(node: fx.Node) -> None:
    """Raise an error for a value that is no plain tensor of known sizes."""
    stack = node.meta.get("nn_module_stack", {}).values()
    place = node.meta.get("expression") or "/".join([path for path, _ in stack if path][-1:]) or "forward"
    for made in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(made, torch.Tensor) and made.layout is not torch.strided:
            raise UntraceableError(f"{place} has a tensor of layout {made.layout}; keep it dense")
        if isinstance(made, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in made.shape):
            raise UntraceableError(f"{place} has a tensor whose shape depends on values; keep all rows and use a mask")


def _constant(model: nn.Module, node: fx.Node, target: str, constants: dict[str, Any]) -> None:
    """Describe a tensor that is neither input nor state: an attribute of the module or a literal of `forward`."""
    node.meta["role"] = "constant"
    with contextlib.suppress(AttributeError):
        node.meta["expression"] = path_expression(model, target)
        return
    tensor = constants[target]
    if "Fake" in type(tensor).__name__ or tensor.numel() > LARGEST_CONSTANT:
        raise UntraceableError("forward makes a large constant tensor")
    items = tensor.tolist()
    node.meta["role"] = "literal"
    is_scalar = tensor.dim() == 0
    # A kernel fills a scalar; a copy from the host cannot be in a CUDA graph.
    made = f"torch.full((), {literal(items)}" if is_scalar else f"torch.tensor({literal(items)}"
    node.meta["expression"] = f"{made}, dtype={tensor.dtype})"
    if is_scalar and not isinstance(items, bool):
        node.meta["constant"] = items


def path_expression(model: nn.Module, path: str) -> str:
    """Python text that reads `path` from `self`, such as `self.layers[0].weight`.

    Raises:
        AttributeError: the module has no such member.
    """
    text, item = "self", cast(Any, model)
    for part in path.split("."):
        child = getattr(item, part)
        if part.isidentifier():
            text += f".{part}"
        elif isinstance(item, nn.Sequential | nn.ModuleList | nn.ParameterList) and part.isdigit():
            text += f"[{part}]"
        else:
            text = f"getattr({text}, {part!r})"
        item = child
    return text

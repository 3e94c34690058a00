"""Computes the float64 truth, in the judge's own process and from the task's own code."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kernelwright.errors import InternalError, TaskError
from kernelwright.judge.check.compare import TF32_MANTISSA_BITS, round_mantissa
from kernelwright.judge.worker.inspection import FREE_OPERATORS, used
from kernelwright.judge.worker.structure import StructureError, arguments, flatten, unflatten
from kernelwright.tasks import LiveTask, device_is_full, give_back_spare_memory, has_nan, is_inexact, seed_generators, unfit
from kernelwright.tasks.input_sets import CHANNELS_LAST, by_parts, computable, size_of
from kernelwright.tasks.loading import described

State = dict[str, torch.Tensor]
Inputs = Callable[[], list[Any]]
"""Returns the arguments of one call, the same each time."""
Outputs = list[torch.Tensor]
"""All tensors that one call returned, flat."""
_ARGUMENTS = "Have get_inputs() return a list of the arguments that Model.forward takes."
_HARDLY_SEEN = 0.01
"""Root mean square of a parameter below which its effect may vanish in rounding."""
_SEEN = 0.5
"""Size in which such a parameter is loaded once. Our choice."""
_KEPT_BYTES = 1 << 30
"""Size in float64 up to which weights are kept as they were converted. Our choice."""
_WORTH_PRODUCTS = 1 << 28
"""Multiply-adds from which a transposed convolution in float64 is computed as products. Our choice."""

COPIED_BYTES = 1 << 28
"""Size of all outputs up to which they are copied; a large task needs the memory. Our choice."""


class OutOfDomainError(InternalError):
    """The reference raised, or is not finite, on this input set."""


class Oracle:
    """Computes what is right, and what lower precision would make of it."""

    def __init__(self, live: LiveTask, device: torch.device, seed: int) -> None:
        self.device = device
        self._live, self._seed = live, seed
        self.give_way: Callable[[], None] | None = None
        """Called after each operator of a truth, if given: a network in float64 can keep a GPU for seconds."""
        self.model = live.model(seed, device)
        self.training = self.model.training
        self.initial_state = state_of(self.model)
        self.sparse = {key: value for key, value in self.model.state_dict().items() if key not in self.initial_state}
        """Sparse buffers, which stay as the constructor makes them on both sides."""
        owners: dict[int, str] = {}
        self._owner = {
            name: owners.setdefault(id(parameter), name)
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if name in self.initial_state  # which a module may keep some out of
        }
        """First name of each parameter by every name it has: tied parameters have several."""
        self.parameter_names = set(self._owner)
        self._converted_from: State | None = None
        self._kept: dict[int | None, State] = {}
        """The latest state in float64, by the bits to which it was rounded."""
        try:
            with _float64_default():
                self._double = _widened(copy.deepcopy(self.model))
        except RuntimeError as error:
            if device_is_full(error):
                raise
            self.build_anew()  # no module with `nn.utils.weight_norm` can be copied: it keeps a tensor that has a gradient

    def owners(self) -> list[set[str]]:
        """The names of each parameter: tied ones have several."""
        firsts = sorted(set(self._owner.values()))
        return [{name for name, owner in self._owner.items() if owner == first} for first in firsts]

    def build_anew(self) -> None:
        """Build the float64 module from the seed, for one whose copy does not run. Functions that it keeps are then its own
        and not the original's; tensors beside its parameters and buffers are converted too.

        Tensors that share memory with those stay: converted they would miss the next `load_state_dict`.
        """
        built = self._live.model(self._seed, self.device)
        owners = (tensor for tensor in (*built.parameters(), *built.buffers()) if tensor.layout is torch.strided)
        shared = {tensor.untyped_storage().data_ptr() for tensor in owners}
        for module in built.modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and is_inexact(value) and value.layout is torch.strided:
                    is_shared = value.untyped_storage().data_ptr() in shared
                    vars(module)[name] = value if is_shared else _wide(value)
        self._double = _widened(built)

    def truth(
        self,
        inputs: list[Any],
        state: State,
        *,
        training: bool,
        mantissa_bits: int | None = None,
        noise: float = 0.0,
        mode: TorchDispatchMode | None = None,
    ) -> Outputs:
        """Outputs in float64, flat.

        Args:
            inputs: Floating tensors are converted.
            state: Weights and buffers.
            training: Mode of the module.
            mantissa_bits: Precision to which inputs and weights are rounded first.
            noise: Share of themselves and of their tensor's size by which inputs and parameters are moved at random first.
                Buffers stay, since they may be masks.
            mode: Mode in which the module's operators run. It sees them as they were called.

        Raises:
            OutOfDomainError: the reference raised or gave NaN.
        """
        skeleton, tensors = flatten(inputs)
        with _float64_default():
            self._double.load_state_dict(self._converted(state, mantissa_bits, noise), strict=False)
            self._double.train(training)
            shares = contextlib.nullcontext() if self.give_way is None else _SharedDevice(self.give_way)
            exact = unflatten(skeleton, [_exact(tensor, mantissa_bits, noise) for tensor in tensors])
            with shares, contextlib.nullcontext() if mode is None else mode:
                outputs = self._forward(self._double, exact)
        return self._usable(outputs)  # a mode sees the module's operators alone

    def _converted(self, state: State, mantissa_bits: int | None, noise: float) -> State:
        """A state as `truth` loads it. A small one is kept: most questions in a row have the same weights."""
        if self._converted_from is not state:
            self._converted_from, self._kept = state, {}
        if noise or mantissa_bits not in self._kept:
            noises = dict.fromkeys(self.parameter_names, noise)
            made = {key: _exact(value, mantissa_bits, noises.get(key, 0.0)) for key, value in state.items()}
            if noise or sum(value.nbytes for value in made.values()) > _KEPT_BYTES:
                return made
            self._kept[mantissa_bits] = made
        return self._kept[mantissa_bits]

    def state_after(self) -> State:
        """The float64 module's state as the latest call left it."""
        return state_of(self._double)

    def with_tf32(self, inputs: list[Any], state: State, *, training: bool, products: bool) -> Outputs | None:
        """Outputs in float64 with the inputs of convolutions, cuDNN's recurrent networks and, if asked, matrix `products`
        rounded to TF32; None where the reference has none of them. Raises as `truth`."""
        rounding = _OtherArguments(_tf32_in_products if products else _tf32_in_cudnn)
        outputs = self.truth(inputs, state, training=training, mode=rounding)
        return outputs if rounding.happened else None

    def with_other_sums_in_norms(self, inputs: list[Any], state: State, *, training: bool) -> Outputs | None:
        """Outputs of the reference in its own dtype and without TF32, flat. The inputs of batch, instance and group norms
        lie with channels last in memory, which PyTorch sums otherwise. None where no norm has an image. Raises as `truth`.
        """
        with (
            torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False),
            _OtherArguments(_norms_with_channels_last) as layout,
        ):
            outputs = self.own_precision(inputs, state, training=training, seed=self._seed)
        return outputs if layout.happened else None

    def own_precision(self, inputs: list[Any], state: State, *, training: bool, seed: int) -> Outputs:
        """Outputs of the reference in its own dtype, with the random generator seeded; flat. Raises as `truth`."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            seed_generators(seed)
            return self._usable(self._forward(self.model, self._prepared(inputs, state, training)))

    def used(self, inputs: list[Any], state: State, *, training: bool, seed: int) -> dict[str, Any]:
        """Answers of the reference to a training step and to a call under autocast; see `inspection.used`."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            seed_generators(seed)
            return used(self.model, *flatten(self._prepared(inputs, state, training)), seed)

    def _prepared(self, inputs: list[Any], state: State, training: bool) -> list[Any]:
        """Copies of the inputs, for the reference with this state in this mode."""
        self.model.load_state_dict(state, strict=False)
        self.model.train(training)
        skeleton, tensors = flatten(inputs)
        return unflatten(skeleton, [tensor.clone() for tensor in tensors])  # type: ignore[no-any-return]

    def _usable(self, outputs: Outputs) -> Outputs:
        if not outputs:
            raise TaskError("Wanted at least one tensor from the reference's forward; found none.")
        give_back_spare_memory(self.device)
        if has_nan(outputs):
            raise OutOfDomainError("the reference gives NaN")
        return [*map(computable, outputs)]

    def _forward(self, model: torch.nn.Module, inputs: list[Any]) -> Outputs:
        try:
            with torch.no_grad():
                placed, named = arguments(inputs)
                outputs = flatten(model(*placed, **named))[1]
                # The next call overwrites what a module returns again and again.
                if strange := next(filter(None, map(unfit, outputs)), None):
                    raise StructureError(strange)
                is_copied = sum(one.nbytes for one in outputs) <= COPIED_BYTES
                return [one.clone() for one in outputs] if is_copied else outputs
        except StructureError as error:
            raise TaskError(
                f"Wanted tensors, numbers, lists, tuples or dicts from the reference's forward; found {error}."
            ) from error
        except Exception as error:
            if device_is_full(error):
                raise  # by others, as it may be: the judge makes room, for no check may be left out because of them
            raise OutOfDomainError(f"the reference raised {type(error).__name__}: {error}") from error

    def own_outputs(self, inputs: list[Any]) -> Outputs:
        """Outputs of the reference in its own dtype, in the mode it was built in; flat."""
        try:
            return self._forward(self.model, self._prepared(inputs, self.initial_state, self.training))
        except OutOfDomainError as error:
            task = self._live.task
            raise TaskError(
                f"Wanted the reference of {task.origin or task.id} to run on its own inputs; "
                f"it raised {described(error.__cause__ or error, task, _ARGUMENTS)}"
            ) from error

    def random_state(self, generator: torch.Generator) -> State:
        """New weights of the same size: scaled, shifted and nowhere at a default such as 0 or 1.

        Parameters and batch-norm statistics are drawn anew; other buffers (masks, tables, counters) stay, since a
        module may rely on what it built.
        """
        return self.tied(
            {
                key: self._drawn(key, value, generator) if is_inexact(value) and self._is_redrawn(key) else value.clone()
                for key, value in self.initial_state.items()
            }
        )

    def tied(self, state: State) -> State:
        """The same with one value under all names of one parameter: otherwise the order of loading would decide."""
        return {key: state[self._owner.get(key, key)] for key in state}

    def other_defaults(self, generator: torch.Generator) -> State:
        """New values for floating and boolean buffers whose elements are all alike, such as zeros: they are placeholders.

        A module may rely on masks and tables, whose elements differ. Integers stay: they may be places in memory, and a
        wrong one takes the device away from everybody. Parameters so small that what they scale is hardly seen, such as
        1e-6 in front of a residual branch, get larger values.
        """
        larger = {
            key: (value * (_SEEN / size)).to(value.dtype)
            for key, value in self.initial_state.items()
            if key in self.parameter_names and is_inexact(value) and 0 < (size := _size(value)) < _HARDLY_SEEN
        }
        return larger | {
            key: self._drawn(key, value, generator)
            for key, value in self.initial_state.items()
            if (is_inexact(value) or value.dtype == torch.bool)
            and value.numel()
            and not self._is_redrawn(key)
            and torch.isfinite(computable(value)).all()
            and (value == value.flatten()[0]).all()
        }

    def _is_redrawn(self, key: str) -> bool:
        return key in self.parameter_names or key.rpartition(".")[2] in ("running_mean", "running_var")

    def _drawn(self, key: str, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if value.dtype == torch.bool:
            return value ^ (torch.rand(value.shape, generator=generator, device=value.device) < 0.25)
        kept, value = value.dtype, computable(value)
        leaf = key.rpartition(".")[2]
        factor = 0.5 + torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float32)
        if leaf == "running_var":
            return (value * factor).to(kept)
        size = _size(value)
        kind = torch.complex64 if value.is_complex() else torch.float32
        noise = torch.randn(value.shape, generator=generator, device=value.device, dtype=kind)
        return (value * factor + (0.1 * size if size > 0 else 0.1) * noise).to(kept)


_aten = torch.ops.aten


class _DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that keeps torch.compile out of its own code only where that has been imported: PyTorch imports it to do so,
    which takes three seconds."""

    def __init_subclass__(cls) -> None:
        plain = cls.__dict__["__torch_dispatch__"]
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        uncompiled: Any = cls.__torch_dispatch__

        def dispatch(self: Any, *args: Any, **named: Any) -> Any:
            return (uncompiled if "torch._dynamo" in sys.modules else plain)(self, *args, **named)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


class _SharedDevice(_DispatchMode):
    """Lets others use the device between two operators, and computes large transposed convolutions as products."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._give_way = give_way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.convolution.default and _is_worth_products(*args):
            x, weight, bias, stride, padding, dilation, _, more, _ = args
            found = transposed_convolution(x, weight, bias, stride, padding, dilation, more)
        else:
            found = func(*args, **(kwargs or {}))
        if func.overloadpacket._qualified_op_name not in FREE_OPERATORS:  # half of a transformer's are views
            self._give_way()
        return found


def _is_worth_products(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> bool:
    """True if the arguments of `aten::convolution` are those of a large transposed one in float64 without groups."""
    *_, transposed, _, groups = others
    plain = transposed and groups == 1 and x.dtype is torch.float64 and x.dim() == weight.dim()
    return plain and x.numel() * weight[0].numel() >= _WORTH_PRODUCTS


def transposed_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> torch.Tensor:
    """A transposed convolution without groups as a product for each place in the kernel.

    In float64 cuDNN's own reaches 0.6 to 1.2 TFLOP/s on an H200, and such a sum of products for a plain one mostly 5 to 13
    (`docs/log.md`).

    Args:
        x: Shape (batch, channels in, *sizes).
        weight: Shape (channels in, channels out, *kernel).
        bias: Shape (channels out,), or None.
        stride: As for `torch.nn.functional.conv_transpose2d`, a number for each dimension, and so the others.
        padding, dilation, output_padding: See `stride`.
    """
    sizes, kernel = x.shape[2:], weight.shape[2:]
    steps = [*zip(sizes, kernel, stride, padding, dilation, output_padding, strict=True)]
    full = [(size - 1) * step + far * (taps - 1) + 1 + more for size, taps, step, _, far, more in steps]
    rows = x.movedim(1, -1).reshape(-1, x.shape[1])
    out = x.new_zeros(x.shape[0], *full, weight.shape[1])
    for number, tap in enumerate(itertools.product(*map(range, kernel))):
        places = [
            slice(at * far, at * far + (size - 1) * step + 1, step)
            for at, (size, _, step, _, far, _) in zip(tap, steps, strict=True)
        ]
        product = rows @ weight.flatten(2)[..., number]
        out[(slice(None), *places)] += product.view(x.shape[0], *sizes, -1)
    inner = [slice(cut, length - cut) for length, (_, _, _, cut, _, _) in zip(full, steps, strict=True)]
    found = out[(slice(None), *inner)]
    return (found if bias is None else found + bias).movedim(-1, 1).contiguous()


class _OtherArguments(_DispatchMode):
    """Some of PyTorch's operators get other arguments than they were called with: those that a rule gives them, which
    gives None for the others."""

    def __init__(self, rule: Callable[[Any, tuple[Any, ...]], tuple[Any, ...] | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule = rule
        self.happened = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        other = self._rule(func, args)
        self.happened |= other is not None
        return func(*(args if other is None else other), **(kwargs or {}))


def _tf32_in_cudnn(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Inputs of convolutions and of cuDNN's recurrent networks are rounded to TF32; sums and hidden states stay exact."""
    if func is _aten.convolution.default:
        return (*map(_in_tf32, args[:2]), *args[2:])
    if func is _aten._cudnn_rnn.default:
        return recurrent_in_tf32(args)
    return None


_FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "_addmm_activation": 1}
"""Place of the first of a product's two factors among its arguments. PyTorch takes `linear`, `matmul` and `einsum` apart
into these; products with a vector have no TF32."""


def _tf32_in_products(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The same, and factors of matrix products."""
    if (first := _FACTORS.get(func.overloadpacket.__name__.removesuffix("_"))) is None:
        return _tf32_in_cudnn(func, args)
    return (*args[:first], *map(_in_tf32, args[first : first + 2]), *args[first + 2 :])


_NORMS = frozenset(
    {
        _aten.native_batch_norm,
        _aten._native_batch_norm_legit,
        _aten._batch_norm_with_update,
        _aten.cudnn_batch_norm,
        _aten.native_group_norm,
    }
)


def _norms_with_channels_last(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Inputs of normalisations of images lie with channels last in memory."""
    if func.overloadpacket in _NORMS and args[0].dim() in CHANNELS_LAST:
        return (args[0].contiguous(memory_format=CHANNELS_LAST[args[0].dim()]), *args[1:])
    return None


_SUMMING = re.compile(r"sum|mean|var|std|norm|loss|kl_div|prod|mm|mv|dot|conv|softmax|cum|avg_pool|cdist|attention|einsum")
"""Names of operators whose outputs are sums of many terms."""


_LINEAR = re.compile(r"(sum|mean|mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|convolution|cumsum|avg_pool\dd)$")
"""Those that give the sum of the sizes of their terms when they are given sizes."""
_ROUNDED_TERMS, _TILED_TERMS = 2.0, 32.0
"""Roundings of each term's size in a sum of any order, and in a convolution by tiles (Winograd) of four. Terms of both signs
that are added one after the other make half of one (rms), which counts where they cancel. Our choice."""
_TILE = 7
"""Elements in a row that decide an output of such a convolution, wherever it lies in its tile."""


class OtherSums(_DispatchMode):
    """Moves each sum by what another order of its terms may change it, in units of rounding (`unit`), and convolutions by
    what tiles may, if asked (`tiles`).

    Terms of any order may make u * sqrt(n) for unit roundoff u: Higham and Mary, A New Approach to Probabilistic Rounding
    Error Analysis (2019), theorem 2.4. Random ones of one sign that are added one after the other make about a quarter.
    Terms in order or nearly alike, whose roundings all have one direction, make u * n / 2 in series (`series`).
    """

    def __init__(self, unit: float = 0.0, *, tiles: bool = False, series: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit, self._tiles, self._series = unit, tiles, series
        self.names = set[str]()
        """All operators that ran, of whatever kind."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.names.add(name)
        counts = isinstance(found, torch.Tensor) and not is_inexact(found)
        if counts or not self._unit or not _SUMMING.search(name) or name.endswith("_") or "out" in kwargs:
            return found
        terms = _terms(name, args, found)
        if not _LINEAR.match(name):
            return tree_map(lambda x: self._moved(x, terms, 0.0), found)
        sizes, roundings = [x.abs() if isinstance(x, torch.Tensor) else x for x in args], _ROUNDED_TERMS
        if self._tiles and name == "convolution":
            pool, roundings = getattr(torch.nn.functional, f"max_pool{args[0].dim() - 2}d"), _TILED_TERMS
            sizes[0] = pool(sizes[0], _TILE, stride=1, padding=_TILE // 2)
        return self._moved(found, terms, roundings * func(*sizes, **kwargs))

    def _moved(self, x: Any, terms: int, sizes: Any) -> Any:
        if not (isinstance(x, torch.Tensor) and is_inexact(x)):
            return x
        roundings = terms / 2 if self._series else math.sqrt(terms)
        limit = (roundings * x.abs() + sizes) * self._unit
        return x + torch.rand_like(limit).sub_(0.5).sign_() * limit


def _terms(name: str, args: Sequence[Any], found: Any) -> int:
    """Terms of each sum that one operator takes, from its arguments and result."""
    read, made = ([x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.numel()] for values in (args, found))
    if not read or not made:
        return 1
    if re.search(r"mm|mv|dot|attention", name):
        return max(x.shape[-1] if x.dim() else 1 for x in read)
    if "conv" in name:
        return read[1].numel() // max(1, read[1].shape[0])
    if re.search(r"softmax|cum", name):
        return read[0].shape[args[1]] if read[0].dim() else 1
    # A normalisation also returns its statistics, which are fewer than its outputs.
    return max(x.numel() for x in read) // min(x.numel() for x in made)


NAMING = frozenset(["topk", "sort", "kthvalue", "median", "nanmedian", "mode", "argmax", "argmin", "max", "min"])
_EQUAL_UNITS = 16
"""Rounding units between elements that are computed and taken for equal. Our choice."""


class Places(NamedTuple):
    """Elements that one operator chose in a row, by their places."""

    given: torch.Tensor
    dim: int | None
    places: torch.Tensor
    promises: bool
    """True of an operator that promises the first of several equal elements."""

    def as_good(self, others: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Mask of other places whose elements equal those chosen, none twice in a row. Among elements that a `dtype` does
        not hold exactly, rounding may decide, whatever an operator promises."""
        x, dim = (self.given.flatten(), 0) if self.dim is None else (self.given, self.dim)
        is_rounded = is_inexact(x) and not torch.equal(x.to(dtype).to(x.dtype), x)
        if self.promises and not is_rounded:
            return others == self.places
        left_out = x.dim() > self.places.dim()
        chosen, found = ((one.unsqueeze(dim) if left_out else one).long() for one in (self.places, others))
        exists = (found >= 0) & (found < x.shape[dim])
        wanted, named = x.gather(dim, chosen), x.gather(dim, found.where(exists, 0))
        unit = _EQUAL_UNITS * torch.finfo(dtype).eps * is_rounded
        near = (wanted == named) | ((wanted - named).abs() <= unit * (wanted.abs() + _size(x)))
        twice = (found.sort(dim)[0].diff(dim=dim) == 0).any(dim, keepdim=True)
        return (exists & near & ~twice).reshape(others.shape)


class NamedPlaces(_DispatchMode):
    """Notes what operators chose that name elements by their places."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen: list[Places] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name, schema = func.overloadpacket.__name__, func._schema.arguments
        given = {one.name: one.default_value for one in schema} | dict(zip((one.name for one in schema), args, strict=False))
        given |= kwargs or {}
        if name in NAMING and "dim" in given:
            places = found if isinstance(found, torch.Tensor) else found[1]
            promises = name in ("argmax", "argmin", "max", "min") or bool(given.get("stable"))
            self.chosen.append(Places(given["self"], given["dim"], places, promises))
        return found


def recurrent_in_tf32(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of `aten::_cudnn_rnn`, rounded: input, weights and first states. The weights' flat buffer, which would be
    taken in their place, is left out."""
    x, weights, stride, _, hidden, cell, *others = args
    rounded = [_in_tf32(weight) for weight in weights]
    return (_in_tf32(x), rounded, stride, None, _in_tf32(hidden), None if cell is None else _in_tf32(cell), *others)


def _in_tf32(tensor: torch.Tensor) -> torch.Tensor:
    return _rounded(tensor, TF32_MANTISSA_BITS)


def _rounded(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """The tensor with so many bits of each mantissa; integers stay."""
    if tensor.is_complex():
        return torch.view_as_complex(round_mantissa(torch.view_as_real(tensor.resolve_conj()), bits))
    return round_mantissa(tensor, bits) if tensor.is_floating_point() else tensor


def state_of(model: torch.nn.Module) -> State:
    """Copies of a module's parameters and buffers, without those that are sparse."""
    return {key: value.clone() for key, value in model.state_dict().items() if value.layout is torch.strided}


def tensors_of(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among inputs, flat."""
    return flatten(list(inputs))[1]


def _size(x: torch.Tensor) -> float:
    return float(computable(x).abs().float().square().mean().sqrt()) if x.numel() else 0.0


def _wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float64 or complex128."""
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


def _widened(module: torch.nn.Module) -> torch.nn.Module:
    """A module's own `double` leaves complex parameters as they are."""
    return module._apply(_wide)  # type: ignore[no-any-return, no-untyped-call]  # what `double` and `to` do, too


def _exact(tensor: torch.Tensor, mantissa_bits: int | None, noise: float) -> torch.Tensor:
    """A tensor in float64 or complex128, first rounded and then moved at random where that is asked for."""
    exact = _wide(tensor if mantissa_bits is None else _rounded(tensor, mantissa_bits))
    return disturbed(exact, noise) if noise and is_inexact(tensor) else exact


def disturbed(x: torch.Tensor, noise: float) -> torch.Tensor:
    """The tensor moved at random by a share (`noise`) of each element and of its own size."""
    return by_parts(x, functools.partial(_moved, noise, size_of(x, finite=True)))


def _moved(noise: float, size: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    noisy = torch.randn_like(part).mul_(part.abs().add_(size).mul_(noise)).add_(part)
    return torch.where(torch.isfinite(part), noisy, part)


@contextlib.contextmanager
def _float64_default() -> Iterator[None]:
    """Constants that a module creates in `forward` must be float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

"""Labels that follow a forward pass: which channel each element of each tensor belongs to.

See `coupling.py` for what becomes of them.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

# Labels of elements that belong to no group: constant zeros, as of padding, bind nothing; what is
# PINNED stays.
VOID = -1
PINNED = 0

# Element-wise, and zero where their input is zero.
ZERO_PRESERVING = {
    *("relu", "relu_", "relu6", "leaky_relu", "leaky_relu_", "elu", "selu", "celu", "silu", "gelu"),
    *("mish", "hardswish", "tanh", "hardtanh", "hardtanh_", "softsign", "clone", "contiguous"),
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "neg"),
    *("alpha_dropout", "detach", "to", "float", "double", "type", "abs", "square"),
}
# Element-wise, and not zero where their input is zero.
ELEMENTWISE = {"sigmoid", "sigmoid_", "hardsigmoid", "hardsigmoid_", "softplus", "exp"}
# Done to the labels as to the data.
SHAPING = {
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "squeeze"),
    *("unsqueeze", "expand", "expand_as", "cat", "concat", "stack", "chunk", "split", "unbind"),
    *("__getitem__", "swapaxes", "narrow", "select", "t", "tensor_split", "broadcast_to"),
}
# Each channel by itself, over positions only.
POOLING = {
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample"),
    *("boolean_dispatch",),
}
ADDITIONS = {"add", "add_", "__add__", "__iadd__", "__radd__", "sub", "sub_", "__sub__", "__isub__"}
PRODUCTS = {"mul", "mul_", "__mul__", "__imul__", "__rmul__", "multiply"}
# Of a tensor and a number.
SCALINGS = {"div", "div_", "__truediv__", "__itruediv__", "true_divide"}
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}


class Trace(TorchFunctionMode):
    """Labels of all tensors that a forward pass makes, and which of them became one group."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        # Tensors are kept alive, so that no id is given twice.
        self.labels: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self.parent = [PINNED]
        self.reasons: dict[int, str] = {}
        self.rows: dict[str, np.ndarray] = {}
        self.columns: dict[str, np.ndarray] = {}
        self.positions: dict[str, int] = {}
        self.units: dict[int, int] = {}

    # -- labels ------------------------------------------------------------------------------------

    def label(self, tensor: Tensor, labels: Tensor, zero: bool = True) -> None:
        """Let `labels` stand for `tensor`; with `zero`, a removed group is zero in it."""
        self.labels[id(tensor)] = (tensor, labels, zero)

    def labels_of(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """Return labels and whether a removed group is zero; what nothing is known of is pinned."""
        found = self.labels.get(id(tensor))
        if found is None:
            return _pinned(tensor), False
        return found[1], found[2]

    def label_pinned(self, results: Iterable[object]) -> None:
        """Let every element of the tensors in `results` be one that stays."""
        for tensor in _tensors(results):
            self.label(tensor, _pinned(tensor), zero=False)

    def fresh(self, count: int) -> np.ndarray:
        """Return `count` new labels."""
        first = len(self.parent)
        self.parent.extend(range(first, first + count))
        return np.arange(first, first + count)

    def root(self, label: int) -> int:
        """Return the label that stands for all that were joined with `label`."""
        while self.parent[label] != label:
            self.parent[label] = self.parent[self.parent[label]]
            label = self.parent[label]
        return label

    def join(self, first: np.ndarray, second: np.ndarray) -> None:
        """Make labels that meet, element by element, one group."""
        for a, b in sorted(set(zip(first.ravel().tolist(), second.ravel().tolist(), strict=True))):
            if VOID in (a, b) or a == b:
                continue
            if PINNED in (a, b):
                self.reasons.setdefault(max(a, b), "it meets what cannot be removed")
                continue
            a, b = self.root(a), self.root(b)
            self.parent[max(a, b)] = min(a, b)

    def pin(self, tensors: Iterable[object], reason: str) -> None:
        """Never remove what appears in `tensors`."""
        for tensor in _tensors(tensors):
            labels, _ = self.labels_of(tensor)
            self._pin_labels(_thin(labels)[0].unique().numpy(), reason)

    # -- operations --------------------------------------------------------------------------------

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        if not any(True for _ in _tensors([result])):
            return result
        if name in CONVOLUTIONS:
            self._convolution(result, *args, **kwargs)
        elif name == "linear":
            self._linear(result, *args, **kwargs)
        elif name == "batch_norm":
            self._batch_norm(result, *args, **kwargs)
        elif name == "multi_head_attention_forward":
            self._attention(result, *args, **kwargs)
        elif name in ADDITIONS or name in PRODUCTS:
            self._meet(result, name in PRODUCTS, *args)
        elif name in ZERO_PRESERVING or (name in SCALINGS and isinstance(args[1], int | float)):
            self.label(result, *self.labels_of(args[0]))
        elif name in ELEMENTWISE:
            self.label(result, self.labels_of(args[0])[0], zero=False)
        elif name in POOLING and isinstance(result, Tensor):
            self._pool(result, args[0])
        elif name in ("mean", "sum", "amax"):
            self._reduce(result, func, args, kwargs)
        elif name == "pad":
            self._pad(result, *args, **kwargs)
        elif name in SHAPING:
            self._shape(result, func, args, kwargs)
        else:
            self.pin([args, kwargs], f"{_plain_name(func)} mixes it with others")
            self.label_pinned([result])
        return result

    def _read(self, tensor: Tensor, dim: int, reader: str) -> np.ndarray:
        """Return the labels along `dim`; pin them unless a removed group is zero and whole."""
        labels, zero = self.labels_of(tensor)
        along = _thin(labels.movedim(dim, 0))[0].flatten(1)
        if not zero:
            self.pin([tensor], f"{reader} reads what isn't zero without it")
        if bool((along != along[:, :1]).any()):
            self.pin([tensor], f"{reader} reads it together with others")
            return np.full(tensor.shape[dim], PINNED)
        return along[:, 0].numpy()

    def _note(
        self, known: dict[str, np.ndarray], parameter: Tensor | None, labels: np.ndarray
    ) -> bool:
        """Set or join labels of a parameter's rows or columns; say whether it is the model's."""
        if parameter is None:
            return True
        name = self.names.get(id(parameter))
        if name is None:
            return False
        if name in known:
            self.join(known[name], labels)
        else:
            known[name] = labels
        return True

    def _convolution(
        self, result, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1
    ) -> None:
        name = self.names.get(id(weight), "a computed weight")
        # A batch of one; without a batch dimension nothing is known.
        columns = self._read(x, 1, name) if x.dim() == weight.dim() else None
        multiple = weight.shape[0] // groups
        if columns is None or name not in self.shapes:
            self.pin([x], f"{name} is no parameter")
            rows = np.full(weight.shape[0], PINNED)
        elif groups == 1:
            rows = self.fresh(weight.shape[0])
            self._note(self.columns, weight, columns)
        elif weight.shape[1] == 1:
            # Depthwise: an output channel is its input channel.
            rows = np.repeat(columns, multiple)
        else:
            self.pin([x], f"{name} is a grouped convolution, whose groups must stay alike")
            rows = self.fresh(weight.shape[0])
            for label in rows.tolist():
                self.reasons[label] = "a grouped convolution's groups must stay alike"
        self._note(self.rows, weight, rows)
        if not self._note(self.rows, bias, rows):
            self._pin_labels(rows, "its bias is no parameter")
        if name in self.shapes:
            self.positions[name] = self.positions.get(name, 0) + result[0, 0].numel()
        shape = (1, -1, *[1] * (result.dim() - 2))
        self.label(result, torch.from_numpy(rows).view(shape).expand(result.shape))

    def _linear(self, result, x, weight, bias=None) -> None:
        name = self.names.get(id(weight))
        columns = self._read(x, -1, name or "a computed weight")
        rows = self.fresh(weight.shape[0])
        if name is None:
            self.pin([x], "a computed weight is no parameter")
            self._pin_labels(rows, "a computed weight is no parameter")
        else:
            self._note(self.columns, weight, columns)
            self._note(self.rows, weight, rows)
            self.positions[name] = self.positions.get(name, 0) + result[..., 0].numel()
        if not self._note(self.rows, bias, rows):
            self._pin_labels(rows, "its bias is no parameter")
        self.label(result, torch.from_numpy(rows).expand(result.shape))

    def _batch_norm(self, result, x, mean, var, weight=None, bias=None, *rest, **options) -> None:
        labels, _ = self.labels_of(x)
        along = _thin(labels.movedim(1, 0))[0].flatten(1)
        whole = not bool((along != along[:, :1]).any())
        if weight is None or bias is None or not whole:
            reason = "a BatchNorm without gamma and beta passes a constant"
            self.pin([x], reason if whole else "a BatchNorm mixes it with others")
            self.label_pinned([result])
            return
        known = [self._note(self.rows, p, along[:, 0].numpy()) for p in (weight, bias)]
        if not all(known):
            self.pin([x], "its gamma or beta is no parameter")
        self.label(result, labels)

    def _attention(self, result, query, key, value, embed_dim, heads, *args, **options) -> None:
        weight, bias, bias_k, bias_v, zero_attn, _, out_weight, out_bias = args[:8]
        self.pin([query, key, value], "self-attention keeps its width")
        plain = weight is not None and bias_k is None and bias_v is None and not zero_attn
        if plain and id(weight) in self.names and id(out_weight) in self.names:
            size = embed_dim // heads
            labels = self.fresh(heads)
            self.units.update(dict.fromkeys(labels.tolist(), size))
            by_row = np.tile(np.repeat(labels, size), 3)
            self._note(self.rows, weight, by_row)
            self._note(self.rows, bias, by_row)
            self._note(self.columns, out_weight, np.repeat(labels, size))
            rows = self.fresh(out_weight.shape[0])
            self._note(self.rows, out_weight, rows)
            self._note(self.rows, out_bias, rows)
            self._pin_labels(rows, "self-attention keeps its width")
            tokens = query.numel() // query.shape[-1]
            for name in (self.names[id(weight)], self.names[id(out_weight)]):
                self.positions[name] = self.positions.get(name, 0) + tokens
        self.label_pinned([result])

    def _meet(self, result, product: bool, *operands) -> None:
        """Join what an addition or a product brings together element by element."""
        found = []
        for operand in operands[:2]:
            if isinstance(operand, Tensor) and operand.dim():
                labels, zero = self.labels_of(operand)
                found.append((labels.expand(result.shape), zero))
            elif not product and float(operand) != 0:
                # A constant that is added leaves no zero.
                found.append((None, False))
        labelled = _thin(*(labels for labels, _ in found if labels is not None))
        zeros = [zero for _, zero in found]
        if len(labelled) == 2:
            self.join(labelled[0].numpy(), labelled[1].numpy())
        zero = any(zeros) if product else all(zeros)
        labels = labelled[0]
        for other in labelled[1:]:
            # Where one operand is constant zero, the sum is the other; a product stays zero.
            labels = (
                torch.minimum(labels, other)
                if product
                else torch.where(labels == VOID, other, labels)
            )
            labels = torch.where(other == PINNED, PINNED, labels)
        self.label(result, labels.expand(result.shape), zero)

    def _pool(self, result: Tensor, x: Tensor) -> None:
        labels, zero = self.labels_of(x)
        # Batch and channel come first.
        kept = 2
        flat = _thin(labels)[0].flatten(kept) if labels.dim() > kept else labels
        if labels.dim() != result.dim() or bool((flat != flat[..., :1]).any()):
            self.pin([x], "pooling mixes it with others")
            self.label_pinned([result])
            return
        corner = labels[(..., *[slice(0, 1)] * (labels.dim() - 2))]
        self.label(result, corner.expand(result.shape), zero)

    def _reduce(self, result: Tensor, func: Callable, args, kwargs) -> None:
        labels, zero = self.labels_of(args[0])
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        if dims is not None and isinstance(result, Tensor):
            low, high = labels.amin(dims, keepdim=keep), labels.amax(dims, keepdim=keep)
            if bool((low == high).all()):
                self.label(result, low, zero)
                return
        self.pin([args[0]], f"{func.__name__} mixes it with others")
        self.label_pinned([result])

    def _pad(self, result, x, pad, mode="constant", value=None) -> None:
        labels, zero = self.labels_of(x)
        if mode != "constant" or value:
            self.pin([x], "padding that isn't zero")
            self.label_pinned([result])
            return
        for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
            dim, size = x.dim() - 1 - number, x.shape[-1 - number]
            places = torch.arange(-before, size + after)
            moved = labels.index_select(dim, places.clamp(0, size - 1))
            first = labels.narrow(dim, 0, 1)
            # Zeros around the positions of a channel belong to it; zero channels are void.
            if dim < 2 or bool((labels != first).any()):
                shape = [-1 if d == dim else 1 for d in range(x.dim())]
                inside = ((places >= 0) & (places < size)).view(shape)
                moved = torch.where(inside, moved, VOID)
            labels = moved
        self.label(result, labels, zero)

    def _shape(self, result, func: Callable, args, kwargs) -> None:
        operands = list(_tensors([args, kwargs]))
        zero = all(self.labels_of(t)[1] for t in operands)
        whole = set(_distinct(self.labels_of(t)[0] for t in operands))
        outputs = list(_tensors([result]))
        try:
            moved = list(_tensors([func(*self._labels_in(args), **self._labels_in(kwargs))]))
        except RuntimeError:
            # Such as an operation that integers do not have.
            moved = [_pinned(t) for t in outputs]
        # Cutting channels apart counts them, and would cut elsewhere once some are gone.
        cut = any(set(_distinct([m])) != whole or _varying(m) > 1 for m in moved)
        if cut:
            self.pin(operands, f"{_plain_name(func)} counts its channels")
        for tensor, labels in zip(outputs, moved, strict=True):
            self.label(tensor, labels, zero)

    def _labels_in(self, value):
        """Return `value` with labels in the place of tensors of numbers."""
        if isinstance(value, Tensor):
            return self.labels_of(value)[0].contiguous() if value.is_floating_point() else value
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self._labels_in(v) for v in value)
        if isinstance(value, dict):
            return {k: self._labels_in(v) for k, v in value.items()}
        return value

    def _pin_labels(self, labels: np.ndarray, reason: str) -> None:
        for label in labels.tolist():
            if label > PINNED:
                self.reasons.setdefault(label, reason)


def _pinned(tensor: Tensor) -> Tensor:
    """Return labels that keep all of `tensor`; a view of one element."""
    return torch.tensor(PINNED).expand(tensor.shape)


def _thin(*labels: Tensor) -> list[Tensor]:
    """Return labels of one shape with a single entry in the dimensions that repeat in all."""
    thin = list(labels)
    for dim in range(1, labels[0].dim()):
        if all(t.stride(dim) == 0 for t in thin):
            thin = [t.narrow(dim, 0, 1) for t in thin]
    return thin


def _distinct(labels: Iterable[Tensor]) -> Iterable[int]:
    """Return all labels that occur."""
    for tensor in labels:
        yield from _thin(tensor)[0].unique().tolist()


def _varying(labels: Tensor) -> int:
    """Return along how many dimensions labels differ."""
    thin = _thin(labels)[0]
    return sum(bool((thin != thin.narrow(d, 0, 1)).any()) for d in range(thin.dim()))


def _tensors(values: Iterable[object]) -> Iterable[Tensor]:
    """Walk tensors in nested arguments and results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _plain_name(func: Callable) -> str:
    return (resolve_name(func) or getattr(func, "__name__", "an operation")).split(".")[-1]

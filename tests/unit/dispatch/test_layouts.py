"""Tensors without strides or memory: sparse, opaque and nested ones, and those on meta."""

import re

import pytest
import torch
from torch import Tensor

import tilewright as tw

X, SRC = torch.arange(1.0, 13.0).view(4, 3), torch.ones(2, 3)
ROWS, INDEX = torch.tensor([0, 1]), torch.tensor([[0, 1, 2], [1, 1, 0]])
WEIGHT = torch.ones(3)
CALLS = {
    "gather": (torch.gather, (X, 0, INDEX)),
    "scatter": (torch.scatter, (X, 0, INDEX, SRC)),
    "scatter_add": (torch.scatter_add, (X, 0, INDEX, SRC)),
    "scatter_add_": (Tensor.scatter_add_, (X, 0, INDEX, SRC)),
    "scatter_reduce": (torch.scatter_reduce, (X, 0, INDEX, SRC, "amax")),
    "index_add": (torch.index_add, (X, 0, ROWS, SRC)),
    "index_add_": (Tensor.index_add_, (X, 0, ROWS, SRC)),
    "index_reduce": (torch.index_reduce, (X, 0, ROWS, SRC, "prod")),
    "index_put": (torch.index_put, (X, (ROWS,), SRC)),
    "index_put_": (Tensor.index_put_, (X, (ROWS,), SRC)),
    "embedding": (torch.nn.functional.embedding, (ROWS, X)),
    "softmax": (torch.softmax, (X, -1)),
    "layer_norm": (torch.layer_norm, (X, (3,), WEIGHT, WEIGHT)),
    "lerp": (torch.lerp, (X, X, 0.5)),
}
LAYOUTS = {
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "sparse": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "opaque": Tensor.to_mkldnn,
}


def holds_tensors(value):
    return isinstance(value[0] if isinstance(value, tuple) else value, Tensor)


def outcome(call, args):
    """What a call returns, or its error."""
    try:
        out = call(*args)
    except Exception as error:  # whatever PyTorch raises
        return type(error), unnumbered(str(error).splitlines()[0])
    return type(out), unnumbered(str(out))


def unnumbered(text):
    """Without the numbers that jagged sizes get one after the other, and without addresses."""
    return re.sub(r"\bj\d+|0x[0-9a-f]+", "", text)


def with_layout(args, place, layout, requires_grad):
    args = [a.clone() if isinstance(a, Tensor) else a for a in args]
    if isinstance(args[place], tuple):
        args[place] = tuple(LAYOUTS[layout](i) for i in args[place])
        return args
    args[place] = LAYOUTS[layout](args[place])
    if args[place].is_floating_point():
        args[place].requires_grad_(requires_grad)
    return args


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_other_layouts_have_pytorchs_results_and_words(name, layout, requires_grad):
    """After calls on plain tensors, too, which the ones that follow are held against."""
    pytorchs, args = CALLS[name]
    for _ in range(4):
        getattr(tw, name)(*(a.clone() if isinstance(a, Tensor) else a for a in args))
    for place in (i for i, a in enumerate(args) if holds_tensors(a)):
        if layout == "opaque" and (place or name.endswith("_")):
            continue  # PyTorch reads memory that is not there
        try:
            given = [with_layout(args, place, layout, requires_grad) for _ in range(2)]
        except (RuntimeError, IndexError):  # no such tensor
            continue
        assert outcome(getattr(tw, name), given[0]) == outcome(pytorchs, given[1])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_on_meta_a_call_has_its_shape(name, requires_grad):
    pytorchs, args = CALLS[name]
    wanted = requires_grad and not name.endswith("_")  # else it is a leaf

    def on_meta(value):
        if isinstance(value, tuple):
            return tuple(map(on_meta, value))
        if not isinstance(value, Tensor):
            return value
        return value.to("meta").requires_grad_(wanted and value.is_floating_point())

    given = [*map(on_meta, args)]
    found, expected = (f(*given) for f in (getattr(tw, name), pytorchs))
    assert found.is_meta
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)

"""Sums of tensors in any layout on a GPU: the same bits in every run, and results as they lie."""

import pytest
import torch

import tilewright as tw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CUDA = torch.device("cuda:0")


def called(name, x, index, source):
    if name == "transposed source":
        return tw.index_add(x, 0, index, source.t().contiguous().t())
    if name == "expanded source":
        return tw.index_add(x, 0, index, source[:1].expand(source.shape))
    if name == "every second index":
        return tw.index_add(x, 0, index.repeat_interleave(2)[::2], source)
    if name == "transposed table":
        return tw.index_add(x.t().contiguous().t(), 0, index, source)
    if name == "transposed table, in place":
        table = x.t().contiguous().t()
        assert tw.index_add_(table, 0, index, source) is table
        return table
    if name == "separate elements of a transposed table":
        rows = index[:, None].expand(source.shape).contiguous()
        return tw.scatter_add(x.t().contiguous().t(), 0, rows, source)
    assert name == "expanded gradient"
    grad = source[0, 0].expand(source.shape)
    return x + tw.embedding_backward(grad, index, x.shape[0])


@pytest.mark.parametrize(
    "name",
    [
        "transposed source", "expanded source", "every second index", "transposed table",
        "transposed table, in place", "separate elements of a transposed table",
        "expanded gradient",
    ],
)  # fmt: skip
def test_layouts_keep_their_bits_and_sum_right(name):
    x, source = torch.randn(500, 64, device=CUDA), torch.randn(20000, 64, device=CUDA)
    index = torch.randint(500, (20000,), device=CUDA).square() // 500
    found = called(name, x, index, source)
    for _ in range(20):
        assert torch.equal(called(name, x, index, source), found)
    terms = source.double()
    if name == "expanded source":
        terms = terms[:1].expand(source.shape)
    elif name == "expanded gradient":
        terms = terms[0, 0].expand(source.shape)
    expected = x.double().index_add(0, index, terms)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("reduce", ["mean", "prod"])
def test_means_and_products_keep_their_bits_where_a_gradient_is_recorded(reduce):
    x = torch.rand(500, 64, device=CUDA) + 0.5
    source = (torch.rand(20000, 64, device=CUDA) * 0.01 + 1).requires_grad_()
    index = torch.randint(500, (20000,), device=CUDA).square() // 500
    found = tw.index_reduce(x, 0, index, source, reduce)
    assert found.requires_grad
    for _ in range(20):
        assert torch.equal(tw.index_reduce(x, 0, index, source, reduce), found)
    found.sum().backward()
    mine, source.grad = source.grad, None
    torch.index_reduce(x, 0, index, source, reduce).sum().backward()
    torch.testing.assert_close(mine, source.grad, rtol=1e-3, atol=1e-3)

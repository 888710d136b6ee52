"""tw.index_put on a GPU: the last of several writes to one place wins, whatever the dtype, wherever
the indices are, and below torch.compile; what is out of range is left out."""

import pytest
import torch

import tilewright as tw
from tilewright.errors import IndexOutOfRange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
PLACES, COUNT = 4, 2_000_000
DTYPES = [torch.float32, torch.int16, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]


def drawn(dtype):
    index = torch.randint(PLACES, (COUNT,), generator=torch.Generator().manual_seed(0))
    last = [int((place == index).nonzero()[-1]) for place in range(PLACES)]
    values = (torch.arange(COUNT) % 97 % 2 if dtype is torch.bool else torch.arange(COUNT) % 97).to(
        dtype
    )
    return index, values.cuda(), values[last].view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("form", [tw.index_put, tw.index_put_])
def test_the_last_write_wins(dtype, where, form):
    index, values, last = drawn(dtype)
    x, mask = torch.zeros(1, PLACES, dtype=dtype, device="cuda"), torch.ones(1, dtype=torch.uint8)
    for indices in ((index.to(where),), (mask.to(where), index.to(where))):
        for _ in range(3):
            table = x[0] if len(indices) == 1 else x
            found = form(table.clone(), indices, values)
            assert torch.equal(found.view(-1).cpu().view(torch.uint8), last)


@pytest.mark.parametrize("form", [tw.index_put, tw.index_put_])
def test_also_below_torch_compile(form):
    index, values, last = drawn(torch.float32)
    put = torch.compile(lambda *call: form(*call), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        found = put(torch.zeros(PLACES, device="cuda"), (index.cuda(),), values)
        assert torch.equal(found.cpu().view(torch.uint8), last)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_what_is_out_of_range_is_left_out_and_told(dtype):
    index = torch.tensor([0, 4, 2, -5, 2], device="cuda")
    values = torch.tensor([1, 1, 0, 1, 1], device="cuda").to(dtype)
    found = tw.index_put(torch.zeros(4, dtype=dtype, device="cuda"), (index,), values)
    found = found.real if dtype.is_complex else found.float()
    assert found.tolist() == [1, 0, 1, 0]
    with pytest.raises(IndexOutOfRange):
        tw.check()

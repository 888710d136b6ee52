"""Sums of tensors in any layout keep their bits: kernels of ours run on contiguous copies."""

import pytest
import torch

from tilewright.device import DEVICES, spec_of
from tilewright.dispatch import evidence, selection
from tilewright.dispatch.copies import of_copies
from tilewright.dispatch.evidence import OperatorRecords
from tilewright.impls._vendor import vendor
from tilewright.op import Workload

LAYOUTS = {
    "index_add(x=f32[100,64], dim=0, index=i64[500], source=f32[500,64]@strides(1,500))": "source",
    "index_add(x=f32[100,64], dim=0, index=i64[500], source=f32[500,64]@strides(0,0))": "source",
    "index_add(x=f32[100,64], dim=0, index=i64[500]@strides(2), source=f32[500,64])": "index",
    "index_add(x=f32[100,64]@strides(1,100), dim=0, index=i64[500], source=f32[500,64])": "x",
    "index_add(x=f32[100,64]@strides(1,100), dim=0, index=i64[500], source=f32[500,64])"
    "!donate=x": "x",
    "index_reduce(x=f32[100,64], dim=0, index=i64[500], source=f32[500,64]@strides(1,500), "
    "reduce=mean)": "source",
    "scatter_add(x=f32[100,64]@strides(1,100), dim=0, index=i64[50,64], src=f32[50,64])": "x",
    "embedding_backward(grad=f32[9,50,64]@strides(64,576,1), index=i64[9,50], num_weights=100)"
    "": "grad",
    "embedding_backward(grad=f32[9,50,64]@strides(0,0,0), index=i64[9,50]@strides(1,9), "
    "num_weights=100)": "grad,index",
    "scatter(x=f32[9,4]@strides(1,9), dim=0, index=i64[3,4], src=f32[3,4])!donate=x": "x",
    "scatter(x=f32[9,4,5], dim=0, index=i64[3,4,5]@strides(4,1,0), src=2.5)": "index",
}
TRANSPOSED = next(iter(LAYOUTS))


@pytest.fixture(autouse=True)
def an_h200_without_records(monkeypatch):
    monkeypatch.setattr(
        selection,
        "device_spec_of",
        lambda d: DEVICES["h200"] if d.type == "cuda" else spec_of(None),
    )
    monkeypatch.setattr(evidence, "records_of", lambda device, op: OperatorRecords([]))


@pytest.mark.parametrize("text", LAYOUTS)
def test_what_lies_in_any_layout_goes_to_kernels_that_keep_what_is_promised(text):
    w = Workload.parse(text)
    choice = selection.choose(w, "cuda:0")
    assert choice.implementation not in ("aten", "aten_deterministic")
    assert "contiguous copies" in choice.reason
    kept = choice.copied.tensors
    assert {n for n, s in w.tensors.items() if kept[n] != s} == set(LAYOUTS[text].split(","))
    assert choice.copied.donated == w.donated


@pytest.mark.parametrize("text", LAYOUTS)
def test_what_runs_on_copies_is_the_same_and_lies_as_pytorchs(text):
    w = Workload.parse(text)
    copied = selection.contiguous(w)
    expected = vendor(w)(*w.operator.examples(w, "integer", 0, "cpu")).clone()
    tensors = w.operator.examples(w, "integer", 0, "cpu")
    found = of_copies(w, copied, vendor(copied))(*tensors)
    assert torch.equal(found, expected)
    assert found.stride() == w.outputs[0].real_strides
    if w.donated:
        assert found.data_ptr() == tensors[0].data_ptr()


def test_an_expanded_index_is_not_made_up_where_it_need_not_be():
    w = Workload.parse(
        "scatter_add(x=f32[100,64], dim=0, index=i64[500,64]@strides(1,0), "
        "src=f32[500,64]@strides(1,500))!donate=x"
    )
    choice = selection.choose(w, "cuda:0")
    assert choice.implementation not in ("aten", "aten_deterministic")
    assert (choice.copied or w)["index"].strides == (1, 0)


def test_contiguous_updates_and_sums_need_no_copies():
    for text in (
        "scatter(x=f32[9,4], dim=0, index=i64[3,4], src=f32[3,4])",
        "index_add(x=f32[100,64], dim=0, index=i64[500], source=f32[500,64])",
    ):
        assert selection.choose(Workload.parse(text), "cuda:0").copied is None


def test_pytorchs_kernel_runs_where_all_that_it_breaks_is_waived_and_on_a_cpu(monkeypatch):
    w = Workload.parse(TRANSPOSED)
    assert selection.choose(w, "cpu").implementation == "aten"
    monkeypatch.setenv("TILEWRIGHT_NONDETERMINISTIC", "1")
    assert selection.choose(w, "cuda:0").copied is not None
    monkeypatch.setenv("TILEWRIGHT_CHECK_INDICES", "0")
    assert selection.choose(w, "cuda:0").implementation == "aten"

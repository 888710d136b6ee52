"""What tests of dispatch share: records of duels, and what they choose."""

import torch
from torch.nn import functional as F

import tilewright as tw
from tilewright.dispatch import selection
from tilewright.environment import environment
from tilewright.impl import Executable
from tilewright.record import Record

CPU = torch.device("cpu")
SOFTMAX = "softmax(x=f32[8,16])"


class ProbeExecutable(Executable):
    def __init__(self, probe, w):
        self.probe, self.w = probe, w

    def __call__(self, *tensors, scalars=None):
        if self.probe.launch_error:
            raise tw.LaunchError(self.probe.launch_error)
        self.probe.runs += 1
        args = self.w.call(tensors)
        if scalars is not None:
            assert self.probe.takes_scalars
            args.update(zip(self.w.scalars, scalars, strict=True))
        return self.w.operator.reference(**args)


def record(store, text, implementation="probe", config=None, us=10.0, **more):
    """The winner of a duel against aten, which took 20 us."""
    key, info, versions = environment(CPU)
    w = tw.Workload.parse(text)
    versions = versions | ({"program": w.program} if w.program else {})
    common = {"status": "ok", "device": key, "device_info": info, "versions": versions}
    common |= {"final": True, "duel": text, **more}
    if config is None:
        config = {"width": 2} if implementation == "probe" else {}
    rows = [Record(str(w), w.op, implementation, config, median_us=us, **common)]
    if implementation != "aten":
        rows.append(Record(str(w), w.op, "aten", {}, median_us=20.0, **common))
    store.add(rows)
    tw.reload_records()
    return w


def assert_softmaxes(*inputs):
    for x in inputs:
        assert torch.equal(tw.softmax(x), F.softmax(x, -1))


def chosen(text):
    return selection.choose(tw.Workload.parse(text), CPU)

"""What a run found, for tests of what is printed and written of it."""

from tilewright.report import Baseline, Own, Report, Row, Verified

SOFTMAX = "softmax(x=f32[64,100])"


def report(**changes) -> Report:
    row = Row(
        workload=SOFTMAX,
        floor_us=5.0,
        copy_us=4.0,
        method="cpu",
        distribution=None,
        host_us={},
        baselines={"aten": Baseline(20.0, (19.0, 21.0)), "inductor": Baseline(15.0, (14.0, 16.0))},
        own=Own(10.0, (9.9, 10.1), "fused", {"rows": 2}),
        chosen="fused",
        candidates=7,
        verified=Verified(1.0, 4.0, None, True),
        refused={},
    )
    versions = {"torch": "2.13.0", "tilewright": "0.1.0"}
    return Report([row], {"name": "Some CPU"}, versions, 3.0, **changes)

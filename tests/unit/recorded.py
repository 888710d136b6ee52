"""Records for tests of the store."""

from tilewright.record import Record

DEVICE = "NVIDIA H200, 132 SMs, 140 GiB"
NOW = {"torch": "2.11.0", "cuda": "13.0", "driver": "580.95.05", "nvrtc": "13.0"}
BEFORE = {**NOW, "driver": "570.10.01"}
SOFTMAX = "softmax(x=f16[8,768])"


def record(implementation="fused", median_us=10.0, **given):
    defaults = {
        "workload": SOFTMAX,
        "op": "softmax",
        "config": {"threads": 128},
        "status": "ok",
        "device": DEVICE,
        "versions": NOW,
    }
    return Record(implementation=implementation, median_us=median_us, **{**defaults, **given})


def duel(name, times, hour=0, **given):
    return [
        record(
            implementation,
            median_us,
            final=True,
            duel=name,
            created=f"2026-11-20T{hour:02}:00:00.000000+00:00",
            **given,
        )
        for implementation, median_us in times.items()
    ]


def many(count, **given):
    return [record(median_us=float(i), **given) for i in range(1, count + 1)]


def by_id(records):
    return {r.id: r for r in records}

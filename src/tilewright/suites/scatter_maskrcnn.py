"""The scatters of Mask R-CNN in TVM's pull request 7233, and its one-dimensional sweep (7056).

The four-dimensional ones collect region features (1000 regions, 256 channels, 7 x 7); the tiny ones
are `array[i] = value` as a graph writes it.
"""

from tilewright.suite import suite

REGIONS = "1000,256,7,7"

scatter_maskrcnn = suite(
    "scatter_maskrcnn",
    [
        *(
            f"scatter(x=f32[{REGIONS}], dim={dim}, index=i64[{REGIONS}], src=f32[{REGIONS}])"
            for dim in range(4)
        ),
        "scatter(x=f32[1000], dim=0, index=i64[1], src=1.5)",
        *(
            f"scatter(x=f32[{n}], dim=0, index=i64[{n}], src=f32[{n}])"
            for n in (50, 5_000, 10_000, 25_000, 50_000, 100_000, 500_000, 1_000_000)
        ),
    ],
)

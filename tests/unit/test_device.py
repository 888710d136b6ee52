"""What a device's spec must tell."""

import dataclasses

import pytest

from tilewright.device import DEVICES, DeviceSpec
from tilewright.errors import InvalidArgument


def test_a_gpu_without_its_memories_is_refused_by_name():
    with pytest.raises(
        InvalidArgument, match="device l40s: a GPU's spec needs shared_bytes_per_sm"
    ):
        DeviceSpec(name="l40s", kind="cuda", arch="sm_89", sms=142)


@pytest.mark.parametrize(
    "field", ["shared_bytes_per_sm", "shared_bytes_per_block", "dram_bytes_per_s"]
)
def test_each_of_them_is_needed(field):
    with pytest.raises(InvalidArgument, match=f"needs {field}$"):
        dataclasses.replace(DEVICES["h200"], **{field: 0})


def test_an_unknown_kind_is_refused():
    with pytest.raises(InvalidArgument, match="kind='tpu' is neither cuda nor cpu"):
        DeviceSpec(name="v5", kind="tpu", arch="v5")


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize(
    ("threads", "registers", "blocks", "limiter"),
    [
        (160, 80, 4, "registers"),  # 8 x 32 registers a warp: 6 warps of each scheduler, 24 in all
        (544, 33, 2, "registers"),  # 12 warps of each, 48 in all, of which a block has 17
        (32, 135, 12, "registers"),
        (128, 128, 4, "registers"),
        (1024, 32, 2, "threads"),
        (32, 16, 32, "blocks"),
    ],
)
def test_occupancy_is_as_nvidias_calculator_has_it(device, threads, registers, blocks, limiter):
    assert DEVICES[device].occupancy(threads, registers, 0) == (blocks, limiter)

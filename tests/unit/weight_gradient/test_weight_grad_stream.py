"""Pixels as one stream, of which the taps of the Hopper kernel read the same copy."""

import pytest
import torch
from convolutions import SIMPLE, weight_grad
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm90 as sm90
from tilewright.impls.weight_gradient._problem import problem_of
from tilewright.impls.weight_gradient._stream import ROW_TAPS, halo_of, stream_of

H200 = DEVICES["h200"]
SM90 = IMPLS["conv2d_weight_grad_sm90"]
TILES = ((64, 192), (128, 192), (64, 576))


def streamed(image, first, rows, pitch):
    """What the copy engine gives of one channel [N, H, W], walked from (-h, -w) of `first` on."""
    n, height, width = image.shape
    found = torch.zeros(n, rows, pitch, dtype=image.dtype)
    found[:, first[0] : first[0] + height, first[1] : first[1] + width] = image
    return found.flatten()


def ring_of_chunks(x, begin, steps, stages, halo, tile_k):
    """Yields what is in the ring, and where the step's first pixel lies, as the producer fills it:
    each step as late as its slot's last use allows."""
    ring = torch.full(((stages + halo + 1) * tile_k,), torch.nan, dtype=x.dtype)
    size = stages + halo
    x = torch.cat([x, torch.zeros((steps + size + 1) * tile_k + begin, dtype=x.dtype)])
    loaded = 0
    for step in range(steps):
        # as many steps ahead as there are stages
        while loaded < min(step + stages, steps) + halo:
            chunk = x[begin + loaded * tile_k :][:tile_k]
            slot = loaded % size
            ring[slot * tile_k :][:tile_k] = chunk
            if slot == 0:
                ring[size * tile_k :] = chunk
            loaded += 1
        yield ring, step * tile_k % (size * tile_k)


@settings(max_examples=60)
@given(st.data())
def test_every_tap_reads_its_pixels_from_the_ring(data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    n, h, w, r = draw(1, 3), draw(3, 9), draw(3, 9), draw(1, 3)
    pad = draw(0, 2), draw(0, 2)
    dilation = (draw(1, 2), draw(1, 3))
    p = h + 2 * pad[0] - (r - 1) * dilation[0]
    q = w + 2 * pad[1] - 2 * dilation[1]
    if p < 1 or q < 1:
        return
    layer = weight_grad(
        f"{n},8,{h},{w}",
        f"{n},8,{p},{q}",
        f"kernel_size=[{r},3], padding=[{pad[0]},{pad[1]}], dilation=[{dilation[0]},{dilation[1]}]",
    )
    problem, tile_k, stages = problem_of(layer), 32, draw(2, 4)
    stream = stream_of(problem)
    rows, pitch = stream.geometry[:2]
    assert stream.pixels == n * rows * pitch
    x = torch.randint(-3, 4, (n, h, w), dtype=torch.float64)
    grad = torch.randint(-3, 4, (n, p, q), dtype=torch.float64)
    truth = torch.nn.grad.conv2d_weight(
        x[:, None], (1, 1, r, 3), grad[:, None], padding=pad, dilation=dilation
    )[0, 0]
    xs, grads = streamed(x, pad, rows, pitch), streamed(grad, (0, 0), rows, pitch)
    steps = stream.steps(tile_k)
    grads = torch.cat([grads, torch.zeros(steps * tile_k - len(grads), dtype=grads.dtype)])
    for tile_n in (192, 576):
        halo = halo_of(problem, tile_n, tile_k)
        if not halo:
            assert r % (tile_n // 192)
            continue
        size = (stages + halo) * tile_k
        for row in range(0, r, tile_n // 192):
            found = torch.zeros(tile_n // 192, 3, dtype=torch.float64)
            begin = row * dilation[0] * pitch
            for step, (ring, first) in enumerate(
                ring_of_chunks(xs, begin, steps, stages, halo, tile_k)
            ):
                for below in range(tile_n // 192):
                    for k in range(0, tile_k, 16):
                        at = (first + below * dilation[0] * pitch + k) % size
                        for tap in range(ROW_TAPS):
                            pixels = ring[at + tap * dilation[1] :][:16]
                            found[below, tap] += (grads[step * tile_k + k :][:16] * pixels).sum()
            assert torch.equal(found, truth[row : row + tile_n // 192])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "more",
    [{}, {"tile_k": 128}, {"split_k": 4, "cluster": 4}, {"split_k": 3, "combine": "grid"}],
    ids=str,
)
def test_tiles_whose_taps_share_a_copy_compile_without_spills(tile, more):
    tile_k = more.get("tile_k", 64)
    halo = halo_of(problem_of(SIMPLE), tile[1], tile_k)
    stages = 8 if tile == (64, 576) and tile_k == 64 else 4
    config = sm90.Config(*tile, **{"stages": stages, "halo": halo, **more})
    space = SM90.space(SIMPLE, H200).restricted({"split_k": [config.split_k]})
    assert space.why_not(config) is None
    built = compiled(SM90.task(config, SIMPLE, H200))
    assert built.resources.spill_bytes == 0
    assert built.resources.stack_bytes == 4 * config.sums  # used where there is a NaN
    assert "serialized" not in built.log


def test_wide_images_have_taps_further_apart():
    assert halo_of(problem_of(SIMPLE), 192, 64) == 1
    assert halo_of(problem_of(SIMPLE), 576, 64) == 2
    wide = weight_grad("1,64,512,512", "1,64,512,512", "kernel_size=3, padding=1")
    assert halo_of(problem_of(wide), 576, 64) == 17
    config = sm90.Config(64, 576, stages=3, halo=17)
    assert SM90.space(wide, H200).why_not(config) is None


@pytest.mark.parametrize(
    ("rest", "tile_n"),
    [
        ("kernel_size=3, padding=1", 128),
        ("kernel_size=3, padding=1", 384),
        ("kernel_size=5, padding=2", 192),
        ("kernel_size=[2,3], padding=[0,1]", 576),
    ],
)
def test_taps_of_other_tiles_and_filters_share_no_copy(rest, tile_n):
    rows = "55" if "[2,3]" in rest else "56"
    layer = weight_grad("8,64,56,56", f"8,64,{rows},56", rest)
    assert halo_of(problem_of(layer), tile_n, 64) == 0
    assert "share no copy" in SM90.space(layer, H200).restricted({"halo": [1]}).why_not(
        sm90.Config(64, tile_n, stages=2, halo=1)
    )

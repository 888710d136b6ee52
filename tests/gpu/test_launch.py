"""Launching compiled kernels on a GPU: streams, graphs, threads, clusters, devices, refusals."""

import threading
import time

import pytest
import torch

from tilewright.build import CompileTask
from tilewright.compile import nvrtc
from tilewright.compile.cache import compiled
from tilewright.compile.launch import CudaKernel
from tilewright.device import spec_of
from tilewright.errors import LaunchError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

SOURCE = r"""
extern "C" __global__ void add(const float* x, const float* y, float* out, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + y[i];
}
// Every kind of argument, misaligned on purpose.
extern "C" __global__ void mix(double* out, int i, long long q, float f, double d) {
  out[0] = i; out[1] = q; out[2] = f; out[3] = d;
}
// Writes its dynamic shared memory from end to end.
extern "C" __global__ void fill(int* out, int words) {
  extern __shared__ int memory[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = i;
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = memory[words - 1];
}
"""
CLUSTER_SOURCE = r"""
extern "C" __global__ void cluster_size(int* out) {
  unsigned size, rank;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  asm volatile("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
  if (threadIdx.x == 0) out[blockIdx.x] = size * 100 + rank;
}
"""
ROOM = 64 << 20
ROOM_SOURCE = f"""
__device__ char room[{ROOM}];
extern "C" __global__ void large(char* out) {{ out[0] = room[threadIdx.x]; }}
"""
N = 1000


def kernel(entry, signature, source=SOURCE):
    flags = nvrtc.flags_for(spec_of(0).arch)
    return CudaKernel(compiled(CompileTask("nvrtc", source, flags, entry)), entry, signature)


@pytest.fixture
def add():
    """A kernel that is not loaded yet."""
    return kernel("add", "PPPq")


def launch_add(add, x, y, out):
    stream = torch.cuda.current_stream(x.device).cuda_stream
    pointers = x.data_ptr(), y.data_ptr(), out.data_ptr()
    add.launch((-(-N // 256), 1, 1), (256, 1, 1), 0, stream, x.device.index, *pointers, N)


def operands(device="cuda:0"):
    x, y = torch.randn(2, N, device=device).unbind()
    return x, y, torch.full_like(x, torch.nan)


def test_the_cubin_of_this_compiler_loads_on_this_driver(add):
    add.load(0)


def test_a_launch_computes(add):
    x, y, out = operands()
    launch_add(add, x, y, out)
    assert torch.equal(out, x + y)


def test_every_kind_of_argument_arrives():
    out = torch.zeros(4, dtype=torch.float64, device="cuda:0")
    stream = torch.cuda.current_stream().cuda_stream
    values = (-7, (1 << 40) + 1, 0.1, -1e-300)
    one = (1, 1, 1)
    kernel("mix", "Piqfd").launch(one, one, 0, stream, 0, out.data_ptr(), *values)
    single = torch.tensor(0.1, dtype=torch.float32).item()
    assert out.tolist() == [-7, (1 << 40) + 1, single, -1e-300]


def test_a_launch_is_ordered_in_the_stream_it_names(add):
    x, y, out = operands()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # ahead in this stream only: x doubles after it
        x.mul_(2)
        launch_add(add, x, y, out)
        result = out.clone()
    stream.synchronize()
    assert torch.equal(result, x + y)


def test_a_captured_launch_replays(add):
    x, y, out = operands()
    add.load(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_add(add, x, y, out)
    assert out.isnan().all()
    x.fill_(3)
    graph.replay()
    assert torch.equal(out, x + y)


def test_a_graph_keeps_the_arguments_of_each_launch(add):
    x, y, first = operands()
    second = torch.empty_like(first)
    add.load(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_add(add, x, y, first)
        launch_add(add, x, first, second)
    graph.replay()
    assert torch.equal(second, x + (x + y))


def test_loading_during_capture_is_refused_and_the_capture_survives(add):
    x, y, out = operands()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(LaunchError, match="before the capture"):
            launch_add(add, x, y, out)
        out.copy_(x)
    graph.replay()
    assert torch.equal(out, x)
    launch_add(add, x, y, out)
    assert torch.equal(out, x + y)


def test_loading_in_another_thread_leaves_a_capture_alone(add):
    x, _, out = operands()
    errors = []

    def load():
        try:
            add.load(0)
        except LaunchError as error:
            errors.append(error)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(x)
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert errors == []
    graph.replay()
    assert torch.equal(out, x)


def test_threads_with_streams_of_their_own_do_not_mix(add):
    wrong = []
    barrier = threading.Barrier(4)

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            generator = torch.Generator("cuda:0").manual_seed(seed)
            barrier.wait()
            for _ in range(50):
                x, y = torch.randn(2, N, device="cuda:0", generator=generator).unbind()
                out = torch.full_like(x, torch.nan)
                launch_add(add, x, y, out)
                if not torch.equal(out, x + y):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_thread_that_never_touched_cuda_can_launch(add):
    x, y, out = operands()
    torch.cuda.synchronize()
    arguments = x.data_ptr(), y.data_ptr(), out.data_ptr(), N
    launch = threading.Thread(target=add.launch, args=((4, 1, 1), (256, 1, 1), 0, 0, 0, *arguments))
    launch.start()
    launch.join()
    assert torch.equal(out, x + y)


def test_a_block_may_use_all_the_shared_memory_the_device_offers():
    shared_bytes = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    assert shared_bytes > 48 * 1024
    out = torch.zeros(3, dtype=torch.int32, device="cuda:0")
    stream = torch.cuda.current_stream().cuda_stream
    words = shared_bytes // 4
    arguments = out.data_ptr(), words
    kernel("fill", "Pi").launch((3, 1, 1), (128, 1, 1), shared_bytes, stream, 0, *arguments)
    assert out.tolist() == [words - 1] * 3


@pytest.mark.parametrize("cluster", [1, 2, 8, 16])
def test_blocks_form_clusters_of_the_size_asked_for(cluster):
    if torch.cuda.get_device_capability(0) < (9, 0):
        pytest.skip("clusters need sm_90")
    out = torch.full((32,), -1, dtype=torch.int32, device="cuda:0")
    stream = torch.cuda.current_stream().cuda_stream
    kernel("cluster_size", "P", CLUSTER_SOURCE).launch(
        (32, 1, 1), (32, 1, 1), 0, stream, 0, out.data_ptr(), cluster=cluster
    )
    assert out.tolist() == [cluster * 100 + block % cluster for block in range(32)]


def test_a_refused_launch_is_an_error_and_the_next_one_works(add):
    x, y, out = operands()
    stream = torch.cuda.current_stream().cuda_stream
    arguments = x.data_ptr(), y.data_ptr(), out.data_ptr(), N
    for grid, block, shared_bytes in (
        ((1, 70000, 1), (256, 1, 1), 0),
        ((0, 1, 1), (256, 1, 1), 0),
        ((4, 1, 1), (2048, 1, 1), 0),
        ((4, 1, 1), (256, 1, 1), 1 << 20),
    ):
        with pytest.raises(LaunchError, match=r"add on cuda:0: CUDA_ERROR_.*grid="):
            add.launch(grid, block, shared_bytes, stream, 0, *arguments)
    launch_add(add, x, y, out)
    assert torch.equal(out, x + y)


def test_a_cubin_for_another_architecture_is_a_launch_error():
    arch = "sm_90" if torch.cuda.get_device_capability(0)[0] == 8 else "sm_80"
    task = CompileTask("nvrtc", SOURCE, (f"--gpu-architecture={arch}",), "add")
    with pytest.raises(LaunchError, match="another architecture"):
        CudaKernel(compiled(task), "add", "PPPq").load(0)


def test_a_tensor_on_cuda_1_works_while_cuda_0_is_current(add):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x, y, out = operands(device)
        launch_add(add, x, y, out)
        assert torch.equal(out, x + y)
        assert torch.cuda.current_device() == 0


@pytest.mark.alone
def test_a_kernel_loads_where_pytorch_keeps_what_tensors_left_free(needs_memory):
    needs_memory(1 << 30)
    large = kernel("large", "P", ROOM_SOURCE)
    tensors = [torch.empty(torch.cuda.mem_get_info(0)[0] - ROOM // 2, dtype=torch.uint8, device=0)]
    with pytest.raises(LaunchError, match="free some: delete tensors"):
        large.load(0)
    tensors.clear()
    assert torch.cuda.mem_get_info(0)[0] < ROOM
    large.load(0)


@pytest.mark.alone
def test_the_host_cost_of_a_launch_is_small(add):
    x, y, out = operands()
    launch_add(add, x, y, out)
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    arguments = x.data_ptr(), y.data_ptr(), out.data_ptr(), N
    launch = add.launcher(0, (4, 1, 1), (256, 1, 1), 0, 1, stream)
    any_us = fastest_us(lambda: add.launch((4, 1, 1), (256, 1, 1), 0, stream, 0, *arguments))
    one_shape_us = fastest_us(lambda: launch(stream, arguments))
    pytorchs_us = fastest_us(lambda: torch.add(x, y, out=out))
    # The driver's own share is about 2 us; a slow host needs more for all of it.
    assert one_shape_us < any_us < max(6, pytorchs_us), f"torch.add(out=) takes {pytorchs_us:.1f}"


def fastest_us(call):
    """Of 20 times 100 calls: so few at a time that the launch queue never fills."""
    found = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(100):
            call()
        found.append((time.perf_counter() - started) * 1e4)
        torch.cuda.synchronize()
    return min(found)

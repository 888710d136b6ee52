"""Launching against a driver made of recorders: what it is told, what its refusals become."""

import ctypes
import struct
import threading
from dataclasses import replace

import pytest
import torch

from tilewright.build import CompileTask
from tilewright.compile import cuda, cxx, tensor_map
from tilewright.compile.cache import Compiled, compiled
from tilewright.compile.launch import CppFunction, CudaKernel, PackedCppFunction
from tilewright.errors import LaunchError, OutOfMemory

# As much of libcuda as a launch needs: context 0x100 + n belongs to device n, the kernel's third
# argument is written where its first one points to.
DRIVER = r"""
#include <cstdint>
#include <cstring>
struct Config {
  unsigned grid[3], block[3], shared; uint64_t stream; const void* attributes; unsigned n;
};
struct Attribute { unsigned id, pad, cluster[3]; };
static thread_local uint64_t current = 0x100;
extern "C" {
int loads, capturing, mode = 0, refuse, full, devices = 2, attributes_set[2];
Config config; Attribute attribute; uint64_t function, launched_in;
void set_thread_context(uint64_t c) { current = c; }
uint64_t get_thread_context() { return current; }
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* n) { *n = devices; return 0; }
int cuDeviceGet(int* d, int n) { *d = n; return n < 2 ? 0 : 101; }
int cuDeviceGetAttribute(int* v, int a, int) { *v = a == 97 ? 232448 : 1; return 0; }
int cuDevicePrimaryCtxRetain(uint64_t* c, int d) { *c = 0x100 + d; return 0; }
int cuCtxGetCurrent(uint64_t* c) { *c = current; return 0; }
int cuCtxSetCurrent(uint64_t c) { current = c; return 0; }
int cuThreadExchangeStreamCaptureMode(int* m) { int old = mode; mode = *m; *m = old; return 0; }
int cuStreamIsCapturing(uint64_t, int* c) {
  *c = capturing == 1;
  return capturing == 2 ? 906 : 0;
}
int cuStreamGetCaptureInfo_v2(
    uint64_t stream, int* c, uint64_t* id, void* graph, void* nodes, void* count) {
  *c = capturing;
  *id = stream + 0x1000000000;
  return graph || nodes || count;
}
int cuModuleLoadData(uint64_t* m, const char*) {
  *m = 0x200;
  return mode == 2 ? (++loads, 0) : 900;
}
int cuModuleGetFunction(uint64_t* f, uint64_t, const char* name) {
  *f = 0x300 + current;
  return strcmp(name, "scale") ? 500 : 0;
}
int cuFuncGetAttribute(int* v, int a, uint64_t) { *v = a == 1 ? 1024 : -1; return 0; }
int cuFuncSetAttribute(uint64_t, int a, int v) {
  if (full) return 2;
  attributes_set[a == 14] = v;
  return 0;
}
int cuLaunchKernelEx(const Config* c, uint64_t f, void** p, void**) {
  if (refuse) return refuse;
  if (f != 0x300 + current) return current ? 400 : 201;
  config = *c; function = f; launched_in = current;
  if (c->n) attribute = *(const Attribute*)c->attributes;
  if (auto out = *(int64_t**)p[0]) *out = *(int64_t*)p[2] + *(int*)p[1] + int64_t(*(double*)p[3]);
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, uint64_t, int, size_t) { *n = 2; return 0; }
int cuOccupancyMaxActiveClusters(int* n, uint64_t, const Config*) { *n = 3; return 0; }
int cuTensorMapEncodeTiled(
    char* map, int type, unsigned rank, uint64_t address, const uint64_t* sizes,
    const uint64_t* strides, const unsigned* box, const unsigned* steps, int, int swizzle, int,
    int) {
  uint64_t told[] = {(uint64_t)type, rank, address, sizes[rank - 1], strides[rank - 2],
                     box[rank - 1], steps[rank - 1], (uint64_t)swizzle};
  memcpy(map, told, sizeof told);
  return (uint64_t)map % 64 ? 1 : refuse;
}
int cuTensorMapEncodeIm2col(
    char* map, int type, unsigned rank, uint64_t address, const uint64_t* sizes,
    const uint64_t* strides, const int* lower, const int* upper, unsigned channels, unsigned pixels,
    const unsigned* steps, int, int, int, int) {
  uint64_t told[] = {(uint64_t)type, rank, address, sizes[rank - 1], strides[rank - 2],
                     (uint64_t)lower[0], (uint64_t)upper[1], channels, pixels, steps[1]};
  memcpy(map, told, sizeof told);
  return (uint64_t)map % 64 ? 1 : refuse;
}
int cuGetErrorName(int e, const char** s) {
  *s = e == 1 ? "CUDA_ERROR_INVALID_VALUE" : nullptr;
  return 0;
}
int cuGetErrorString(int e, const char** s) {
  *s = e == 1 ? "invalid argument" : nullptr;
  return 0;
}
}
"""
SIGNATURE = "Piqd"
ONE = (1, 1, 1)


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_void_p),
        ("n", ctypes.c_uint),
    ]


class Driver:
    """What the recorders saw."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.get_thread_context.restype = ctypes.c_uint64
        self.library.set_thread_context.argtypes = [ctypes.c_uint64]

    def number(self, name, kind=ctypes.c_int):
        return kind.in_dll(self.library, name)

    @property
    def config(self):
        return Config.in_dll(self.library, "config")


@pytest.fixture
def driver(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    path = compiled(CompileTask("cxx", DRIVER, cxx.DEFAULT_FLAGS, "libcuda")).path
    caches = (
        cuda.driver,
        cuda.primary_context,
        cuda.device_count,
        cuda._device,
        cuda.device_attribute,
    )
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(cuda, "_LIBRARY", str(path))
    driver = Driver(path)
    driver.library.set_thread_context(0x100)
    contexts = {0x100: 0, 0x101: 1}  # of another context, too, the runtime knows the device
    current = driver.library.get_thread_context
    monkeypatch.setattr(cuda, "current_device", lambda: lambda: contexts.get(current(), 0))
    yield driver
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def kernel(tmp_path):
    cubin = tmp_path / "scale.cubin"
    cubin.write_bytes(b"\x7fELF\0image")
    return CudaKernel(Compiled("key", cubin, None, "", 0.1), "scale", SIGNATURE)


def test_a_kernel_is_found_under_the_name_that_it_has_in_the_binary(driver, tmp_path):
    cubin = tmp_path / "several.cubin"
    cubin.write_bytes(b"\x7fELF\0image")
    several = Compiled("key", cubin, None, "", 0.1, {"own": "scale"})
    assert sum_through(CudaKernel(several, "own", SIGNATURE)) == sum_through(
        CudaKernel(replace(several, symbols={}), "scale", SIGNATURE)
    )
    with pytest.raises(LaunchError, match="finding own"):
        sum_through(CudaKernel(replace(several, symbols={}), "own", SIGNATURE))


def sum_through(kernel, device_index=0, **options):
    """Launch, and return what the driver found in the arguments."""
    out = ctypes.c_int64()
    arguments = ctypes.addressof(out), -5, 1 << 40, 7.5
    kernel.launch(ONE, ONE, 0, 0, device_index, *arguments, **options)
    return out.value


def test_arguments_reach_the_driver_with_the_alignment_of_c(driver, kernel):
    assert sum_through(kernel) == (1 << 40) - 5 + 7


def test_launch_configuration_reaches_the_driver(driver, kernel):
    kernel.launch((7, 6, 5), (4, 3, 2), 1000, 0xABC, 0, 0, 1, 2, 3.0)
    config = driver.config
    assert (tuple(config.grid), tuple(config.block)) == ((7, 6, 5), (4, 3, 2))
    assert (config.shared, config.stream, config.n) == (1000, 0xABC, 0)


def test_a_new_shape_replaces_the_last_one(driver, kernel):
    kernel.launch((7, 1, 1), ONE, 0, 0, 0, 0, 1, 2, 3.0, cluster=4)
    kernel.launch((8, 1, 1), ONE, 0, 0, 0, 0, 1, 2, 3.0)
    assert (driver.config.grid[0], driver.config.n) == (8, 0)


def test_cluster_is_a_launch_attribute(driver, kernel):
    sum_through(kernel, cluster=16)
    assert driver.config.n == 1
    assert list((ctypes.c_uint * 5).in_dll(driver.library, "attribute")) == [4, 0, 16, 1, 1]


def test_starting_all_blocks_together_is_a_launch_attribute_beside_the_cluster(driver, kernel):
    sum_through(kernel, cooperative=True)
    assert driver.config.n == 1
    assert list((ctypes.c_uint * 3).in_dll(driver.library, "attribute")) == [2, 0, 1]
    sum_through(kernel, cluster=2, cooperative=True)
    assert driver.config.n == 2
    told = (ctypes.c_uint * 21).from_address(driver.config.attributes)  # 72 bytes each
    assert (told[0], told[2], told[18], told[20]) == (4, 2, 2, 1)


def test_a_tensor_map_is_passed_by_value(driver, tmp_path):
    cubin = tmp_path / "scale.cubin"
    cubin.write_bytes(b"\x7fELF\0image")
    kernel = CudaKernel(Compiled("key", cubin, None, "", 0.1), "scale", "PiqdTTi")
    offsets = kernel._local.frame._arguments
    kernel.launch(ONE, ONE, 0, 0, 0, 0, 1, 2, 3.0, b"a" * 128, b"b" * 128, 9)
    found = [ctypes.string_at(offsets[i], 128) for i in (4, 5)]
    assert found == [b"a" * 128, b"b" * 128]
    assert ctypes.c_int.from_address(offsets[6]).value == 9


def test_a_tiled_tensor_map_reaches_the_driver(driver):
    made = tensor_map.tiled("bf16", 4096, (64, 100), (128,), (64, 32))
    assert len(made) == 128
    assert struct.unpack_from("8Q", made) == (9, 2, 4096, 100, 128, 32, 1, 3)


def test_an_im2col_tensor_map_reaches_the_driver(driver):
    sizes, strides = (64, 56, 28, 8), (128, 128 * 56, 128 * 56 * 28)
    made = tensor_map.im2col("f16", 4096, sizes, strides, (-1, -1), (-1, -2), 64, 32, (2, 1))
    expected = (6, 4, 4096, 8, 128 * 56 * 28, 2**32 - 1, 2**32 - 2, 64, 32, 2)
    assert tuple(n % 2**32 for n in struct.unpack_from("10Q", made)) == expected


def test_a_refused_tensor_map_is_named(driver):
    driver.number("refuse").value = 1
    with pytest.raises(
        LaunchError, match=r"cuTensorMapEncodeTiled of f16\[64, 100\].*INVALID_VALUE"
    ):
        tensor_map.tiled("f16", 4096, (64, 100), (128,), (64, 32))


def test_loading_allows_all_the_shared_memory_of_a_block_and_large_clusters(driver, kernel):
    kernel.load(0)
    assert list((ctypes.c_int * 2).in_dll(driver.library, "attributes_set")) == [232448 - 1024, 1]


def test_a_kernel_is_loaded_once_per_device(driver, kernel):
    for device_index in (0, 1, 0, 1):
        sum_through(kernel, device_index)
    assert driver.number("loads").value == 2


def test_threads_launching_at_once_load_once_and_keep_their_arguments_apart(driver, kernel):
    wrong = []
    barrier = threading.Barrier(8)

    def work(n):
        out = ctypes.c_int64()
        barrier.wait()
        for i in range(300):
            kernel.launch(ONE, ONE, 0, 0, 0, ctypes.addressof(out), n, i, 0.0)
            if out.value != n + i:
                wrong.append((n, i, out.value))

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert driver.number("loads").value == 1


@pytest.mark.parametrize("before", [0, 0x100, 0x777])
def test_another_devices_context_is_current_only_for_the_launch(driver, kernel, before):
    driver.library.set_thread_context(before)
    for _ in range(2):  # loading, then launching what is loaded
        sum_through(kernel, device_index=1)
        assert driver.number("launched_in", ctypes.c_uint64).value == 0x101
        assert driver.number("function", ctypes.c_uint64).value == 0x300 + 0x101
        assert driver.library.get_thread_context() == before


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("before", [0, 0x100, 0x777])
def test_a_launcher_launches_one_shape_on_any_stream_and_in_its_context(
    driver, kernel, before, devices
):
    driver.number("devices").value = devices
    driver.library.set_thread_context(before)
    launch = kernel.launcher(0, (7, 6, 5), (4, 3, 2), 1000, 2, 0)
    out = ctypes.c_int64()
    for n, stream in enumerate([0xABC, 0xDEF, 0xABC]):
        launch(stream, [ctypes.addressof(out), n, 1 << 40, 7.5])
        assert out.value == (1 << 40) + n + 7
        found = driver.config
        assert (*found.grid, *found.block) == (7, 6, 5, 4, 3, 2)
        assert (found.shared, found.stream, found.n) == (1000, stream, 1)
        assert driver.number("launched_in", ctypes.c_uint64).value == 0x100
        assert driver.library.get_thread_context() == before
        if n == 1:
            sum_through(kernel)  # of another shape, between


def test_a_launcher_starts_all_blocks_together_or_beside_the_kernel_before(driver, kernel):
    for options, identifier in (({"cooperative": True}, 2), ({"overlapping": True}, 6)):
        launch = kernel.launcher(0, ONE, ONE, 0, 1, 0, **options)
        launch(0, [0, 1, 2, 3.0])
        assert driver.config.n == 1
        told = list((ctypes.c_uint * 3).in_dll(driver.library, "attribute"))
        assert told == [identifier, 0, 1]


def test_launchers_of_one_kernel_keep_their_shapes_apart(driver, kernel):
    launches = [kernel.launcher(0, (n, 1, 1), ONE, 0, 1, 0) for n in (3, 4)]
    for n, launch in [*enumerate(launches, start=3)] * 2:
        out = ctypes.c_int64()
        launch(0, [ctypes.addressof(out), n, 10, 0.5])
        assert (driver.config.grid[0], out.value) == (n, 10 + n)


def test_a_refused_launcher_names_its_shape(driver, kernel):
    launch = kernel.launcher(0, (9, 1, 1), ONE, 0, 1, 0)
    driver.number("refuse").value = 1
    with pytest.raises(LaunchError, match=r"INVALID_VALUE.*grid=\(9, 1, 1\)"):
        launch(0, [0, 1, 2, 3.0])
    driver.number("refuse").value = 0
    launch(0, [0, 1, 2, 3.0])
    assert driver.config.grid[0] == 9


@pytest.mark.parametrize("before", [0, 0x777])
def test_where_there_is_one_device_a_launch_goes_to_its_context(driver, kernel, before):
    driver.number("devices").value = 1
    driver.library.set_thread_context(before)
    for _ in range(2):
        assert sum_through(kernel) == (1 << 40) - 5 + 7
        assert driver.number("launched_in", ctypes.c_uint64).value == 0x100
        assert driver.library.get_thread_context() == before


@pytest.mark.parametrize("capturing", [1, 2])
def test_loading_is_refused_while_a_graph_is_captured(driver, kernel, capturing):
    driver.number("capturing").value = capturing
    with pytest.raises(LaunchError, match="before the capture"):
        sum_through(kernel)
    assert driver.number("loads").value == 0


@pytest.fixture
def memory_kept_by_torch(driver, monkeypatch):
    """What the driver finds full until PyTorch gives back what it keeps; the times that it did."""
    given_back = []
    driver.number("full").value = 1

    def empty_cache():
        given_back.append(driver.number("mode").value)
        driver.number("full").value = 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    return given_back


def test_memory_that_pytorch_keeps_is_given_back_for_a_kernel_to_load(
    driver, kernel, memory_kept_by_torch
):
    assert sum_through(kernel) == (1 << 40) + 2
    assert memory_kept_by_torch == [2]  # as relaxed as loads are, while others capture
    assert driver.number("loads").value == 2
    sum_through(kernel, 1)
    assert memory_kept_by_torch == [2]


def test_a_gpu_too_full_for_a_kernel_to_load_is_named_with_the_way_out(driver, kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    driver.number("full").value = 1
    with pytest.raises(LaunchError, match=r"scale on cuda:0.*free some: delete tensors"):
        sum_through(kernel)
    driver.number("full").value = 0
    assert sum_through(kernel) == (1 << 40) + 2


def test_a_loaded_kernel_launches_while_a_graph_is_captured(driver, kernel):
    kernel.load(0)
    driver.number("capturing").value = 1
    assert sum_through(kernel) == (1 << 40) + 2


def test_a_capture_is_known_by_its_number(driver):
    driver.number("capturing").value = 1
    assert cuda.capture_id(7) == 0x1000000007


def test_a_refused_launch_is_named_with_its_shape_and_the_limits(driver, kernel):
    driver.number("refuse").value = 1
    with pytest.raises(LaunchError) as caught:
        kernel.launch((1, 70000, 1), (32, 1, 1), 300000, 0, 0, 0, 1, 2, 3.0)
    for part in ("scale on cuda:0", "CUDA_ERROR_INVALID_VALUE", "(1, 70000, 1)", "300000", "65535"):
        assert part in str(caught.value)


@pytest.mark.parametrize("grid", [(-1, 1, 1), (1 << 32, 1, 1)])
def test_a_grid_that_is_no_unsigned_int_is_refused(driver, kernel, grid):
    sum_through(kernel)
    with pytest.raises(LaunchError, match="INVALID_VALUE"):
        kernel.launch(grid, ONE, 0, 0, 0, 0, 1, 2, 3.0)
    assert sum_through(kernel) == (1 << 40) + 2


def test_an_unknown_driver_error_keeps_its_number(driver, kernel):
    driver.number("refuse").value = 719
    with pytest.raises(LaunchError, match="CUresult 719"):
        sum_through(kernel)


def test_a_missing_device_entry_or_cubin_is_a_launch_error(driver, kernel, tmp_path):
    with pytest.raises(LaunchError, match="cuda:5"):
        sum_through(kernel, device_index=5)
    with pytest.raises(LaunchError, match="finding nothing on cuda:0"):
        CudaKernel(kernel.compiled, "nothing", "P").load(0)
    kernel.compiled.path.unlink()
    with pytest.raises(LaunchError, match="build again"):
        kernel.load(0)


def test_without_a_driver_a_launch_says_so(monkeypatch, kernel):
    monkeypatch.setattr(cuda, "_LIBRARY", "libno_such_driver.so.1")
    cuda.driver.cache_clear()
    with pytest.raises(LaunchError, match="no NVIDIA driver"):
        sum_through(kernel)


CPP = r"""
#include <cstdint>
extern "C" void mix(double* out, int64_t n, int32_t i, float f, double d) {
  #pragma omp parallel for
  for (int64_t k = 0; k < n; ++k) out[k] = k + i + f + d;
}
"""


def test_a_cpp_function_gets_every_kind_of_argument(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    mix = CppFunction(compiled(CompileTask("cxx", CPP, cxx.DEFAULT_FLAGS, "mix")), "mix", "Pqifd")
    out = (ctypes.c_double * 3)()
    mix(ctypes.addressof(out), 3, -2, 0.5, 1e-3)
    assert list(out) == [k - 2 + 0.5 + 1e-3 for k in range(3)]


PACKED = r"""
#include <cstdint>
struct Given { double* out; float f; int64_t n; int32_t i; double d; };
extern "C" int64_t mix(const Given* g) {
  for (int64_t k = 0; k < g->n; ++k) g->out[k] = k + g->i + g->f + g->d;
  return g->n == 5 ? 4096 : 0;
}
"""


def test_a_packed_cpp_function_gets_a_structure_laid_out_as_in_c(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    built = compiled(CompileTask("cxx", PACKED, cxx.DEFAULT_FLAGS, "mix"))
    out = (ctypes.c_double * 3)()
    PackedCppFunction(built, "mix", "Pfqid")(ctypes.addressof(out), 0.5, 3, -2, 1e-3)
    assert list(out) == [k - 2 + 0.5 + 1e-3 for k in range(3)]


def test_a_packed_cpp_function_that_found_no_memory_says_for_how_much(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    built = compiled(CompileTask("cxx", PACKED, cxx.DEFAULT_FLAGS, "mix"))
    out = (ctypes.c_double * 5)()
    with pytest.raises(OutOfMemory, match="no memory for the 4096 bytes"):
        PackedCppFunction(built, "mix", "Pfqid")(ctypes.addressof(out), 0.5, 5, -2, 1e-3)


def test_a_library_without_the_function_is_a_launch_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    library = compiled(CompileTask("cxx", CPP, cxx.DEFAULT_FLAGS, "mix"))
    with pytest.raises(LaunchError, match="nothing cannot be loaded"):
        CppFunction(library, "nothing", "")

"""NVRTC without a GPU: cubins for every architecture, resources, refusals, and which library."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.build import CompileTask, Resources
from tilewright.compile import nvrtc, resources
from tilewright.compile.cache import compiled
from tilewright.compile.resources import call_resources, parse_ptxas, ptx, sass
from tilewright.errors import CompileError, CompilerMissing

pytestmark = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))

ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a"]
ADD = r"""
extern "C" __global__ void add(const float* x, const float* y, float* out, long long n) {
  __shared__ float tile[100];
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  tile[threadIdx.x % 100] = n;
  __syncthreads();
  if (i < n) out[i] = x[i] + y[i] + 0 * tile[(threadIdx.x + 1) % 100];
}
extern "C" __global__ void other(float* x) { x[threadIdx.x] = 1; }
"""
# 60 values and their addresses live at once, whatever the registers allow
HUNGRY = r"""
extern "C" __global__ void hungry(float* p, int n) {
  float a[60];
  #pragma unroll
  for (int i = 0; i < 60; ++i) a[i] = p[i * n + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 60; ++i) p[i * n + threadIdx.x] = a[59 - i] * a[(i * 7) % 60];
}
"""


def task(source, entry, *flags, arch="sm_90a"):
    return CompileTask("nvrtc", source, (*nvrtc.flags_for(arch), *flags), entry)


@pytest.fixture(autouse=True)
def cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))


def test_what_nvrtc_has_compiled_before_still_reports_its_resources():
    flags = task(ADD, "add").flags
    logs = [nvrtc.compile_cubin(ADD, flags, "add")[1] for _ in range(2)]
    assert parse_ptxas(logs[0], "add") == parse_ptxas(logs[1], "add")


@pytest.mark.parametrize(("release", "passed"), [("12.6", False), ("13.0", True)])
def test_nvrtcs_own_cache_is_passed_by_where_it_has_one(release, passed, monkeypatch):
    given = []
    monkeypatch.setattr(nvrtc, "version", lambda: release)
    monkeypatch.setattr(nvrtc, "_compile", lambda s, flags, *_: given.extend(flags) or (b"x", ""))
    nvrtc.compile_cubin(ADD, task(ADD, "add").flags, "add")
    assert ("--no-cache" in given) == ("--minimal" in given) == passed


def test_the_minimal_language_gives_the_same_cubin():
    options = ("--no-cache", *task(ADD, "add").flags)
    plain, minimal = (
        nvrtc._compile(ADD, (*options, *more), "add", "CUBIN")[0] for more in ((), ("--minimal",))
    )
    assert plain == minimal


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_compiles_with_its_real_resources(arch):
    found = compiled(task(ADD, "add", arch=arch))
    assert found.path.read_bytes()[:4] == b"\x7fELF"
    assert found.path.suffix == ".cubin"
    assert found.resources is not None
    assert 8 <= found.resources.registers <= 64
    assert found.resources.spill_bytes == 0
    assert found.resources.shared_bytes == 400
    assert compiled(task(ADD, "add", arch=arch)) == found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_short_of_registers_reports_its_spills(arch):
    roomy = compiled(task(HUNGRY, "hungry", arch=arch)).resources
    tight = compiled(task(HUNGRY, "hungry", "--maxrregcount=32", arch=arch)).resources
    assert roomy is not None
    assert tight is not None
    assert roomy.registers > tight.registers
    assert tight.registers == 32
    assert roomy.spill_bytes == 0
    assert tight.spill_bytes > 400
    assert tight.stack_bytes > 0


def test_a_kernel_has_its_own_resources_and_what_is_compiled_the_most_of_any():
    found = compiled(task(ADD, "other"))
    assert parse_ptxas(found.log, "other").shared_bytes == 0
    assert found.resources.shared_bytes == parse_ptxas(found.log, "add").shared_bytes == 400


LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k2' for 'sm_80'
ptxas info    : Function properties for k2
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    896 bytes stack frame, 724 bytes spill stores, 1132 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 960 bytes cumulative stack size, 400 bytes smem
ptxas info    : Function properties for _Z1gfi
ptxas         .     64 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
"""


def test_a_report_of_several_kernels_is_read_one_by_one():
    assert parse_ptxas(LOG, "k2") == Resources(8, 0, 0, 0)
    assert parse_ptxas(LOG, "k") == Resources(32, 724 + 1132 + 4 + 8, 960, 400)


def test_of_a_call_the_kernel_that_takes_most_decides():
    both = LOG.replace("Used 8 registers", "Used 40 registers")
    spilled = parse_ptxas(both, "k")
    for entry in ("k", "k2"):
        assert call_resources(both, entry) == Resources(40, spilled.spill_bytes, 960, 400)


def test_a_kernel_that_the_source_lacks_is_an_error_that_lists_what_it_has():
    with pytest.raises(CompileError, match=r"no kernel sub \(it has: .*add"):
        compiled(task(ADD, "sub"))


def test_a_rejection_carries_the_log_with_its_line():
    with pytest.raises(CompileError, match=r"rejected bad \(.*sm_90a(.|\n)*bad\.cu\(2\): error"):
        compiled(task("\n__global__ void bad() { return undeclared; }", "bad"))


def test_an_architecture_that_nvrtc_does_not_know_is_an_error():
    with pytest.raises(CompileError, match=r"sm_42.*INVALID_OPTION"):
        compiled(task(ADD, "add", arch="sm_42"))


def test_ptx_is_text_for_the_same_architecture():
    text = ptx(task(ADD, "add"))
    assert ".target sm_90a" in text
    assert ".entry add" in text
    assert "\0" not in text


def test_sass_is_the_output_of_the_disassembler(monkeypatch, tmp_path):
    tool = tmp_path / "nvdisasm"
    tool.write_text('#!/bin/sh\ngrep -aoE "text[.]\\w+" "$2" | sort -u')
    tool.chmod(0o755)
    monkeypatch.setattr(resources, "find_tool", {"nvdisasm": str(tool)}.get)
    assert sass(task(ADD, "add")) == "text.add\ntext.other\n"


def test_cuobjdump_serves_where_nvdisasm_is_not(monkeypatch, tmp_path):
    tool = tmp_path / "cuobjdump"
    tool.write_text('#!/bin/sh\necho "not a cubin: $2" >&2; exit 1')
    tool.chmod(0o755)
    monkeypatch.setattr(resources, "find_tool", {"cuobjdump": str(tool)}.get)
    with pytest.raises(CompileError, match=r"cuobjdump cannot read .*not a cubin"):
        sass(task(ADD, "add"))


def test_without_a_disassembler_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "find_tool", {}.get)
    with pytest.raises(CompilerMissing, match="pip install triton"):
        sass(task(ADD, "add"))


def test_a_disassembler_is_found_in_a_wheel(monkeypatch, tmp_path):
    folder = tmp_path / "triton/backends/nvidia/bin"
    folder.mkdir(parents=True)
    (folder / "tool-of-a-wheel").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert resources.find_tool("tool-of-a-wheel") == str(folder / "tool-of-a-wheel")


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_compiling_imports_no_torch():
    code = f"""
import sys
from tilewright.compile import cache, cxx, launch, nvrtc, pool, resources
nvrtc.compile_cubin({ADD!r}, {task(ADD, "add").flags!r}, "add")
print("torch" in sys.modules)
"""
    assert run(code) == "False\n"


def test_without_cuda_bindings_the_remedy_is_named():
    code = """
import sys
sys.modules["cuda.bindings"] = None
from tilewright.compile import nvrtc
print(nvrtc.missing())
"""
    assert "pip install 'tilewright[cuda]'" in run(code)


def test_without_the_library_the_remedy_is_named(monkeypatch):
    from cuda.bindings import nvrtc as bindings

    def absent():
        raise RuntimeError("libnvrtc.so not found")

    nvrtc._load.cache_clear()
    monkeypatch.setattr(bindings, "nvrtcVersion", absent)
    try:
        with pytest.raises(CompilerMissing, match=r"pip install 'tilewright\[cuda\]'"):
            nvrtc.version()
    finally:
        nvrtc._load.cache_clear()


@pytest.mark.parametrize(
    ("cuda", "wheel", "soname"),
    [("13.0", "cu13", "libnvrtc.so.13"), ("12.8", "cuda_nvrtc", "libnvrtc.so.12")],
)
def test_the_nvrtc_of_torch_goes_first(monkeypatch, tmp_path, cuda, wheel, soname):
    installed(tmp_path, f"cuda: Optional[str] = '{cuda}'", "cu13/lib/libnvrtc.so.13")
    library = tmp_path / "nvidia" / wheel / "lib" / soname
    library.parent.mkdir(parents=True, exist_ok=True)
    library.touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert nvrtc._library_of_torch() == library


def test_a_torch_without_cuda_has_no_say(monkeypatch, tmp_path):
    installed(tmp_path, "cuda: Optional[str] = None", "cu13/lib/libnvrtc.so.13")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert nvrtc._library_of_torch() is None


def installed(site, cuda, library):
    """A site-packages folder with a torch that says `cuda`, and an NVRTC."""
    (site / "torch").mkdir()
    (site / "torch/__init__.py").touch()
    (site / "torch/version.py").write_text(f"__version__ = '2.11.0'\n{cuda}\nhip = None\n")
    (site / "nvidia" / library).parent.mkdir(parents=True)
    (site / "nvidia" / library).touch()


def test_a_library_loaded_first_is_the_one_that_compiles(tmp_path):
    installed = next(
        p for root in sys.path for p in Path(root).glob("nvidia/cu*/lib/libnvrtc.so.*")
    )
    other = tmp_path / installed.name
    shutil.copy(installed, other)
    code = f"""
from pathlib import Path
from tilewright.compile import nvrtc
nvrtc._library_of_torch = lambda: Path({str(other)!r})
nvrtc.version()
maps = Path("/proc/self/maps").read_text()
print({str(other)!r} in maps, {str(installed)!r} in maps)
"""
    assert run(code) == "True False\n"


def test_flags_reach_the_key():
    first = task(ADD, "add")
    assert compiled(first).key != compiled(replace(first, flags=(*first.flags, "-lineinfo"))).key

"""What an implementation is: what it supports, its config space, its heuristic, its build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._C._dynamo import guards

from tilewright.build import CompileTask, Resources
from tilewright.device import DeviceSpec
from tilewright.errors import InvalidArgument
from tilewright.op import Workload
from tilewright.registry import Registry
from tilewright.space import ConfigSpace, NoConfig, config_dict, config_text
from tilewright.tensor_spec import TensorSpec

OWN_BACKENDS = ("fused", "cuda", "cpp")
"""Backends whose kernels are ours; `own` in a result file is the best of these."""
LIBRARY_BACKENDS = ("cutlass",)
"""Backends of other people's kernels that have configs: searched as ours are, reported as
baselines."""


@dataclass(frozen=True)
class Work:
    """What one launch of a kernel is given, as known before anything is compiled.

    Attributes:
        blocks: of the grid; of a persistent kernel the most, it takes what runs at once.
        most_per_sm: blocks of a persistent kernel on an SM; None for as many as fit.
        loads_bytes: of input that a block may have on its way at once; None where nobody reckons.
        most_blocks: of a persistent kernel on the device; None for as many as fit.
        multiple: of which the number of a persistent kernel's clusters is one.
        cluster: blocks of a cluster.
        estimated_registers: of a thread, as spaces' constraints reckon; 0 where nobody does.
    """

    blocks: int
    persistent: bool
    most_per_sm: int | None
    loads_bytes: int | None = None
    most_blocks: int | None = None
    multiple: int = 1
    cluster: int = 1
    estimated_registers: int = 0


@dataclass(frozen=True)
class Launched:
    """One kernel of a call: its name, threads of a block, shared memory asked for at launch, in
    bytes per block, and its grid."""

    entry: str
    block_threads: int
    shared_bytes: int = 0
    work: Work | None = None


class Executable:
    """A built implementation. Calling it runs on the tensors' device and current stream.

    Outputs and workspace come from `allocator`; calls are thread-safe and CUDA-graph safe.
    """

    takes_pointers: ClassVar[bool] = False
    """Whether a caller that knows the tensors' addresses may give them as `pointers=`."""
    any_device_current: ClassVar[bool] = False
    """Whether it may be called while another device than that of its tensors is current."""
    resources: Resources | None = None
    """Of several kernels, the most that any takes."""
    workspace_bytes: int = 0
    block_threads: int = 0
    """Threads of a block of the first kernel; 0 where it is no kernel of a GPU."""
    later: tuple[Launched, ...] = ()
    """Generated kernels that follow the first one."""
    shared_bytes: int = 0
    """Shared memory asked for at launch, in bytes per block, besides the static part."""
    work: Work | None = None
    """Of its first kernel, where that is a generated one of a GPU."""
    executables: Sequence[Executable] = ()
    """Those that it runs one after another, each of a task of its own; none where it is one."""

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Outputs for the tensor arguments of the workload, in their order."""
        raise NotImplementedError

    def by_addresses(self, device: torch.device) -> Callable[..., Any] | None:
        """The same for tensors on a device that are told by their addresses, one argument each,
        where that is enough: callers that read those anyway have less to do."""
        return None


CPU = torch.device("cpu")


Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
"""(shape, strides, dtype) -> tensor of uninitialised memory"""


class Allocator:
    """Where executables get outputs and workspace; verification puts a guarded one in its place."""

    def __init__(self) -> None:
        self.on: Callable[[torch.device], Empty] = _on

    def empty_strided(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        return self.on(device)(shape, strides, dtype)


def _on(device: torch.device) -> Empty:
    """torch.empty_strided there, half of whose 1 us is its dispatcher, which is passed by."""
    index = device.index  # a CPU has none; asking for the type takes 0.25 us
    if index is not None and index == torch._C._cuda_getDevice():
        return guards._empty_strided_cuda  # type: ignore[attr-defined,no-any-return]
    if device is CPU or device.type == "cpu":
        return guards._empty_strided_cpu  # type: ignore[attr-defined,no-any-return]

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty


allocator = Allocator()


class Implementation:
    """A way to compute one operator, or many. Subclass it in a file below impls/.

    `op` is the operator's name, several of them, or None for an implementation that serves any
    operator. `takes_scalars`
    says that its executables are called with `scalars=`, the values of `w.scalars` in order, where
    these differ from the workload's own. `stands_in` says that it runs in place of aten where aten
    would break what the operator promises: it takes every layout, and building it costs nothing.
    `any_shape` says that a binary of it serves all shapes that are alike in kind, and any indices
    as well as others.
    `races` says that two runs on the same inputs may differ: it serves workloads that say
    `!nondeterministic`, and who asks for it by name has said so. `yields_to` names others that come
    before it where nothing was measured and they claim the workload, too.
    """

    name: ClassVar[str]
    backend: ClassVar[str]
    op: ClassVar[str | tuple[str, ...] | None] = None
    takes_scalars: ClassVar[bool] = False
    stands_in: ClassVar[bool] = False
    any_shape: ClassVar[bool] = False
    races: ClassVar[bool] = False
    yields_to: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            IMPLS.add(cls.name, cls())

    @property
    def keeps_promises(self) -> bool:
        """Whether it may run where an operator promises more than PyTorch's kernels keep."""
        return self.backend in OWN_BACKENDS or self.stands_in

    @property
    def operators(self) -> tuple[str, ...] | None:
        """The names of those that it serves; None for every one."""
        return (self.op,) if isinstance(self.op, str) else self.op

    def serves(self, op: str) -> bool:
        """Whether it is for this operator at all; `unsupported` then looks at the workload."""
        return self.operators is None or op in self.operators

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        """None if this workload can be built for this device, else the reason in words."""
        return None

    def only_compared(self, w: Workload) -> str | None:
        """Why it is timed but never chosen, in words, or None: what it gives is right for operands
        that are finite, say, and not for others."""
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """Whether it is a good choice where nothing was measured and aten must not run."""
        return True

    def claims(self, w: Workload, device: DeviceSpec) -> bool:
        """Whether it serves, supports and suits a workload."""
        return self.serves(w.op) and self.unsupported(w, device) is None and self.suits(w, device)

    def takes_untuned(self, w: Workload, device: DeviceSpec) -> bool:
        """Whether it claims a workload and none of `yields_to` does."""
        others = (IMPLS[name] for name in self.yields_to)
        return self.claims(w, device) and not any(i.claims(w, device) for i in others)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        """Every config that fits; the only statement of what fits."""
        return ConfigSpace(NoConfig)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        """A config of the space that is good untuned, from device numbers."""
        return NoConfig()

    def untuned(self, w: Workload, device: DeviceSpec) -> Any:
        """What runs untuned: the heuristic's config, or another where compilers do with its kernel
        what the heuristic did not expect. May compile, as `build` would.

        Raises:
            CompileError: the compiler refused.
        """
        return self.heuristic(w, device)

    def completed(self, given: Mapping[str, Any], w: Workload, device: DeviceSpec) -> Any:
        """The config with the values that a person gave, and the heuristic's of all other knobs.

        Raises:
            InvalidArgument: there is no such knob, or the config does not fit.
        """
        space = self.space(w, device)
        all_given = space.values.keys() <= given.keys()
        others = {} if all_given else config_dict(self.heuristic(w, device))
        config = space.config({**others, **given})
        if reason := space.why_not(config):
            told = f"{self.name}({config_text(config)})"
            raise InvalidArgument(f"{w.op}: {told} does not fit: {reason}")
        return config

    def promising(self, w: Workload, device: DeviceSpec) -> list[Any]:
        """Configs that a search measures first, best first by the implementation's own model."""
        return []

    def forecast(self, config: Any, w: Workload, device: DeviceSpec) -> dict[str, Any]:
        """What a config amounts to on a device, in numbers for people to read, and `predicted_us`
        where the implementation has a model of its time. Empty without either."""
        return {}

    def describe(self, config: Any, w: Workload, device: DeviceSpec) -> list[str]:
        """What `build` makes, one line for each kernel, where there is more to say than the config:
        what it reads and reduces, and why it is a kernel of its own."""
        return []

    def compile_key(self, config: Any, w: Workload) -> str:
        """What is baked into the binary, told without writing its source: workloads of one key
        share it. The cache goes by the source itself."""
        return f"{config} {w}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask | None:
        """What `build` will compile of the config, so that a tuner can compile many at once
        beforehand."""
        return None

    def tasks(self, config: Any, w: Workload, device: DeviceSpec) -> tuple[CompileTask, ...]:
        """All that `build` will compile, in the order in which it runs: `task`, and what runs
        before and after it under configs of its own, as far as is known without compiling."""
        task = self.task(config, w, device)
        return () if task is None else (task,)

    def resources(self, config: Any, log: str) -> Resources | None:
        """Of a config's kernel, from the compiler's log, where that is of a library with kernels of
        several configs."""
        return None

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        """Compile (or find in the cache) and wrap. Needs no GPU until it is called.

        Raises:
            CompileError: the compiler refused.
        """
        raise NotImplementedError


IMPLS: Registry[Implementation] = Registry("impls", "implementation")


def implementations(w: Workload) -> list[Implementation]:
    """Those that serve the workload's operator, whether or not they support its shapes."""
    return [i for i in IMPLS.values() if i.serves(w.op)]


def allocate(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    return allocator.empty_strided(
        spec.shape, spec.real_strides, dtype=spec.torch_dtype, device=device
    )

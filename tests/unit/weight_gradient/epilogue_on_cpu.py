"""What follows the products in the Hopper kernel of the weight gradient, run on a CPU."""

from types import SimpleNamespace

from tensor_cores_on_cpu import OnCpu

from tilewright.compile.cache import compiled
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import _launch
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm90 as sm90
from tilewright.impls.weight_gradient._problem import problem_of
from tilewright.impls.weight_gradient._stream import stream_of

SM90 = IMPLS["conv2d_weight_grad_sm90"]


class _WithoutProducer(sm90.Config):
    @property
    def threads(self):
        return super().threads - 32


class _Phases:
    """Each launch several times, with the number of the phase as an argument: all blocks have ended
    one before any begins the next."""

    def __init__(self, kernel, count):
        self.kernel, self.count = kernel, count

    def launch(self, *args, **how):
        for phase in range(self.count):
            self.kernel.launch(*args[:-2], phase, args[-1], **how)


def epilogue_on_cpu(w, kernel, *config, phases=0, fault=("", ""), **more):
    """The executable of a Hopper config, with `kernel` in place of what copies and multiplies.

    Args:
        kernel: source of `weight_grad`, beside the project's functions.
        config, more: as sm90.Config's.
        phases: the kernel is run so often, and has `int phase` before its Problem; 0: it has not.
        fault: (text, replacement) in the source.
    """

    def build(config, w, device):
        built = compiled(SM90.task(sm90.Config(**vars(config)), w, device))
        problem = stream_of(problem_of(w)) if config.halo else problem_of(w)
        constants = (0,) if phases else ()
        return _launch.WeightGradKernel(built, "PP", config, w, problem, constants)

    def task(config, w, device):
        common = SM90.task(config, w, device).source.split("TW_DEVICE void multiply(")[0]
        return SimpleNamespace(source=common + kernel)

    run = OnCpu(
        SimpleNamespace(build=build, task=task), _WithoutProducer(*config, **more), w, fault
    )
    if phases:
        run.executable.kernel = _Phases(run.executable.kernel, phases)
    return run

"""Functions as models have them: how good untuned kernels are.

    tilewright bench --import benchmarks/held_out_functions.py --suite held_out_functions

Shapes are those of the models that each function names. No schedule had been fitted to any of them
when they were first timed, at 2675026; what those times told has changed some since.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def swiglu(x: Tensor) -> Tensor:
    """Llama's MLP, gate and up from one matrix product. Touvron et al., arXiv 2302.13971."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@tw.fuse
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GPT-2's MLP. Radford et al., 2019."""
    return F.gelu(x + bias, approximate="tanh")


@tw.fuse
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves of a head apart. Su et al., arXiv 2104.09864."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@tw.fuse
def head_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of queries and keys, head by head, as Qwen3 and OLMo 2 have it."""
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


@tw.fuse
def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Attention's weights as BERT has them. Devlin et al., arXiv 1810.04805."""
    return (scores * 0.125).masked_fill(~mask, float("-inf")).softmax(-1)


@tw.fuse
def capped_softmax(scores: Tensor) -> Tensor:
    """Attention's weights of Gemma 2, with capped logits. arXiv 2408.00118."""
    return (torch.tanh(scores / 50.0) * 50.0).softmax(-1)


@tw.fuse
def router(logits: Tensor) -> Tensor:
    """Weights of experts in fp32, as Mixtral has them. arXiv 2401.04088."""
    return logits.float().softmax(-1)


@tw.fuse
def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Of distributions, as label smoothing and mixup make them. arXiv 1710.09412."""
    return -(target * F.log_softmax(logits.float(), -1)).sum(-1).mean()


@tw.fuse
def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """A teacher's distribution at temperature 2. Hinton et al., arXiv 1503.02531."""
    target = (teacher.float() / 2.0).softmax(-1)
    own = F.log_softmax(student.float() / 2.0, -1)
    return (target * (target.log() - own)).sum(-1).mean() * 4.0


@tw.fuse
def z_loss(logits: Tensor) -> Tensor:
    """PaLM's auxiliary loss. Chowdhery et al., arXiv 2204.02311."""
    return logits.float().logsumexp(-1).square().mean() * 1e-4


@tw.fuse
def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """A diffusion transformer's adaptive layer norm. Peebles & Xie, arXiv 2212.09748."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1.0 + scale) + shift


@tw.fuse
def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Before each convolution of a diffusion U-Net. Rombach et al., arXiv 2112.10752."""
    return F.silu(F.group_norm(x, 32, weight, bias))


@tw.fuse
def instance_norm_relu(x: Tensor) -> Tensor:
    """A style network's. Ulyanov et al., arXiv 1607.08022."""
    return F.relu(F.instance_norm(x))


@tw.fuse
def batch_norm_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A residual network's, in training. Ioffe & Szegedy, arXiv 1502.03167."""
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


@tw.fuse
def response_norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """ConvNeXt V2's, of images [N, H, W, C]. Woo et al., arXiv 2301.00808."""
    norm = x.float().square().sum((1, 2), keepdim=True).sqrt()
    share = norm / (norm.mean(-1, keepdim=True) + 1e-6)
    return gamma * (x * share) + beta + x


@tw.fuse
def layer_scale(x: Tensor, branch: Tensor, gamma: Tensor) -> Tensor:
    """ConvNeXt's residual, of images [N, C, H, W]. Liu et al., arXiv 2201.03545."""
    return x + gamma[:, None, None] * branch


@tw.fuse
def excited(x: Tensor, squeezed: Tensor) -> Tensor:
    """Channels weighed, and their mean for the next layer. Hu et al., arXiv 1709.01507."""
    y = x * torch.sigmoid(squeezed)[:, :, None, None]
    return y, y.mean((2, 3))


@tw.fuse
def unit_rows(x: Tensor) -> Tensor:
    """Embeddings of length 1, as CLIP compares them. arXiv 2103.00020."""
    return F.normalize(x, dim=-1)


@tw.fuse
def standardized(x: Tensor) -> Tensor:
    """Columns of features, mean 0 and deviation 1."""
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


@tw.fuse
def fake_quantized(x: Tensor) -> Tensor:
    """Activations on a grid of 8 bits, row by row. Dettmers et al., arXiv 2208.07339."""
    scale = x.abs().amax(-1, keepdim=True).float() / 127.0
    return torch.clamp(torch.round(x / scale), -127.0, 127.0) * scale


@tw.fuse
def focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    """RetinaNet's. Lin et al., arXiv 1708.02002."""
    chance = torch.sigmoid(logits)
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    miss = chance * (1 - target) + (1 - chance) * target
    return ((0.25 * target + 0.75 * (1 - target)) * miss * miss * entropy).sum()


@tw.fuse
def adamw(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor):
    """A step of AdamW. Loshchilov & Hutter, arXiv 1711.05101."""
    mean = mean + 0.1 * (grad - mean)
    square = 0.95 * square + 0.05 * grad * grad
    update = mean / (square.sqrt() + 1e-8)
    return weight * (1.0 - 3e-5) - 3e-4 * update, mean, square


def backward(name: str, grad: str, operands: str) -> str:
    return f"{name}_backward(grad_output={grad}, {operands})"


HEADS = "x=bf16[4,32,2048,128]"
LOGITS = "bf16[2048,32000]"
LATENT = "x=f16[2,320,64,64], weight=f16[320], bias=f16[320]"
DEEP_LATENT = "x=f16[2,1280,16,16], weight=f16[1280], bias=f16[1280]"
IMAGES = "x=f16[32,256,28,28], weight=f32[256], bias=f32[256]"
TOKENS = "x=f16[32,256,1152], shift=f16[32,1,1152], scale=f16[32,1,1152]"
SCORES = "scores=f16[8,16,1024,1024], mask=bool[8,1,1,1024]"
ROTARY = f"{HEADS}, cos=bf16[2048,128], sin=bf16[2048,128]"
BLOCK = "x=f16[32,384,28,28], branch=f16[32,384,28,28], gamma=f16[384]"
RESPONSE = "x=f16[32,28,28,768], gamma=f16[768], beta=f16[768]"
EXCITED = "x=f16[64,256,28,28], squeezed=f16[64,256]"
PARAMETERS = "f32[16777216]"
ANCHORS = "f32[8,30000,80]"

held_out_functions = suite(
    "held_out_functions",
    [
        "swiglu(x=bf16[4096,22016])",
        backward("swiglu", "bf16[4096,11008]", "x=bf16[4096,22016]"),
        "bias_gelu(x=f16[8192,3072], bias=f16[3072])",
        backward("bias_gelu", "f16[8192,3072]", "x=f16[8192,3072], bias=f16[3072]"),
        f"rotary({ROTARY})",
        backward("rotary", "bf16[4,32,2048,128]", f"{ROTARY}, grads=[x]"),
        f"head_norm({HEADS}, weight=bf16[128])",
        backward("head_norm", "bf16[4,32,2048,128]", f"{HEADS}, weight=bf16[128]"),
        f"masked_softmax({SCORES})",
        backward("masked_softmax", "f16[8,16,1024,1024]", SCORES),
        "capped_softmax(scores=bf16[2,8,2048,2048])",
        "router(logits=bf16[16384,64])",
        f"soft_cross_entropy(logits={LOGITS}, target={LOGITS})",
        backward(
            "soft_cross_entropy", "f32[]", f"logits={LOGITS}, target={LOGITS}, grads=[logits]"
        ),
        f"distillation(student={LOGITS}, teacher={LOGITS})",
        f"z_loss(logits={LOGITS})",
        f"modulated_norm({TOKENS})",
        backward("modulated_norm", "f16[32,256,1152]", TOKENS),
        f"group_norm_silu({LATENT})",
        f"group_norm_silu({DEEP_LATENT})",
        backward("group_norm_silu", "f16[2,320,64,64]", LATENT),
        "instance_norm_relu(x=f16[8,64,256,256])",
        f"batch_norm_relu({IMAGES})",
        f"batch_norm_relu({IMAGES.replace('28,28]', '28,28]@channels_last')})",
        backward("batch_norm_relu", "f16[32,256,28,28]", IMAGES),
        backward(
            "batch_norm_relu",
            "f16[32,256,28,28]@channels_last",
            IMAGES.replace("28,28]", "28,28]@channels_last"),
        ),
        f"response_norm({RESPONSE})",
        f"layer_scale({BLOCK})",
        # As autograd asks for them: that of x is grad_output, by torch.compile too.
        backward("layer_scale", "f16[32,384,28,28]", f"{BLOCK}, grads=[branch,gamma]"),
        f"excited({EXCITED})",
        "unit_rows(x=f32[16384,512])",
        backward("unit_rows", "f32[16384,512]", "x=f32[16384,512]"),
        "standardized(x=f32[16384,1024])",
        "fake_quantized(x=f16[8192,4096])",
        f"focal_loss(logits={ANCHORS}, target={ANCHORS})",
        backward("focal_loss", "f32[]", f"logits={ANCHORS}, target={ANCHORS}, grads=[logits]"),
        f"adamw(weight={PARAMETERS}, grad={PARAMETERS}, mean={PARAMETERS}, square={PARAMETERS})",
    ],
)

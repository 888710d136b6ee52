"""`tilewright explain` of what runs on a GPU."""

import pytest
import torch

from tilewright import cli
from tilewright.compile.resources import find_tool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
DISASSEMBLERS = ("nvdisasm", "cuobjdump")
KINDS = {
    "rows": "layer_norm(x=f16[512,768], weight=f16[768], bias=f16[768])",
    "tiles": "softmax(x=f16[6,100,48], dim=1)",
    "elements": "lerp(x=f32[512,768], end=f32[768], weight=0.3)",
}


@pytest.mark.skipif(
    not any(map(find_tool, DISASSEMBLERS)),
    reason=f"no disassembler is installed: {' or '.join(DISASSEMBLERS)}",
)
@pytest.mark.parametrize("kind", KINDS)
def test_explain_shows_the_machine_code_of_a_generated_kernel(kind, capsys):
    assert cli.main(["explain", KINDS[kind], "--impl", "fused", "--show", "sass"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {instruction}" in shown for instruction in ("LDG", "STG", "EXIT")), shown[:400]

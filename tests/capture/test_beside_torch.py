"""A program that uses torch.compile as well: what it patches in nn.Module does not make Dovetail recompile."""
import subprocess
import sys

PROGRAM = """
import torch, dovetail
from torch import nn

def forward(x):
    return nn.ReLU()(x) * 2  # a module made in the frame: torch's compiler wraps nn.Module.__init__

ours, theirs = dovetail.compile(forward), torch.compile(forward, backend="eager")
x = torch.randn(4)
theirs(x)  # its first call wraps nn.Module.__init__, which a program compiled before would have to notice
for _ in range(4):
    assert torch.equal(ours(x), theirs(x))
    torch.compile(lambda x: x + 1, backend="eager")(x)
print(dovetail.stats()["graphs"], dovetail.stats()["recompiles"])
"""


def test_no_recompiles_beside_torch_compile():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["1", "0"], done.stdout + done.stderr

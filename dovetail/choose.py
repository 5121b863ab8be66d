"""Which matrix products are worth kernels of our own: both ways are timed, once for each kind of product.

    chooser(graph, options)(node) -> 0: the library;  n: a kernel, its sum in n parts (see passes.products)

What follows a product in the same kernel need not be written and read again, which counts for it. The
program that is made of the choices is remembered on disk, as are the kernels' blocks.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, cast

import torch

from dovetail import codegen, lower, passes, runtime, schedule
from dovetail.errors import BuildFailed
from dovetail.events import EVENTS
from dovetail.fake import to_torch_device, to_torch_dtype
from dovetail.ir.graph import Graph, Node
from dovetail.ir.types import TensorType
from dovetail.ops.prims import kind_of
from dovetail.options import Options

PARTS: Final = (1, 2, 4, 8)
FEW_TILES: Final = 132 * 64 * 64
"""Results below which a product does not fill a GPU unless its sums are split."""
BYTES_A_MILLISECOND: Final = 4e9
LIBRARY: Final = 0.92
"""How much better a kernel of ours has to be: alone it looks better than in a program."""
FEW_ROWS: Final = 16
LEAST: Final = 256
SHORTEST: Final = 64
"""Terms of a part of a sum."""

_known: Final[dict[str, dict[int, float]]] = {}


def chooser(graph: Graph, options: Options) -> Callable[[Node], int]:
    if not options.tune:
        return lambda node: int(_has_few_rows(node))
    users = {node.name: found for node, found in graph.users().items()}

    def choose(node: Node) -> int:
        times = _times(node, options)
        readers = users[node.name]
        fuses = readers and all(kind_of(user.op) in ("pointwise", "view") for user in readers)
        saved = 2 * node.tensor.bytes.value / BYTES_A_MILLISECOND if fuses else 0.0
        best = min(times, key=lambda parts: times[parts] if parts else LIBRARY * (times[0] + saved))
        EVENTS.emit("tuning", kernel=node.name, blocks=f"parts={best}", milliseconds=times[best])
        return best

    return choose


def _has_few_rows(node: Node) -> bool:
    """All the product does is to read a matrix, which a kernel of ours does at memory speed."""
    *_, rows, columns = (size.value for size in node.tensor.shape)
    depth = cast(Node, node.args[-1]).tensor.shape[-2].value
    return rows <= FEW_ROWS and min(columns, depth) >= LEAST and node.tensor.ndim == 2


def _times(node: Node, options: Options) -> dict[int, float]:
    """Milliseconds by number of parts; 0 is the library."""
    kinds = [arg.tensor for arg in node.args if isinstance(arg, Node)]
    device = to_torch_device(node.tensor.device)
    described = f"{node.op} {[*map(str, kinds)]} {node.tensor}"
    if described not in _known:
        try:
            with torch.cuda.device(device):
                _known[described] = dict(_measure(node, kinds, device, options))
        except (BuildFailed, torch.OutOfMemoryError) as error:
            EVENTS.emit("tuning", kernel=node.name, blocks="", error=str(error)[:200])
            _known[described] = {0: 0.0}
    return _known[described]


def _measure(
    node: Node, kinds: list[TensorType], device: torch.device, options: Options
) -> Iterator[tuple[int, float]]:
    made = []
    for kind in kinds:
        size, stride = ([x.value for x in part] for part in (kind.shape, kind.stride))
        empty = torch.empty_strided(size, stride, dtype=to_torch_dtype(kind.dtype), device=device)
        made.append(empty.zero_())
    call = getattr(torch.ops.aten, node.op.split(".")[1])
    yield 0, runtime.milliseconds(lambda: call(*made))
    depth = kinds[-1].shape[-2].value
    for parts in PARTS if node.tensor.numel.value < FEW_TILES else PARTS[:1]:
        if parts == 1 or depth % (SHORTEST * parts) == 0:
            loops = lower.lower(passes.alone(node.op, kinds, node.tensor, parts))
            program = codegen.emit(schedule.plan(schedule.schedule(loops, options)), options)
            yield parts, runtime.time_kernels(program.kernels, device, options)

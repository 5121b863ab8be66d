"""One Group as one C++ function.

    Group -> Launchable

    // softmax: for i < 8 | r0 < 64
    extern "C" void kernel(const float* x, float* o) {
        for (int64_t i = 0; i < 8; ++i) {
            f32v m_acc = splat<f32v>(-inf);
            for (int64_t r0 = 0; r0 < 64; r0 += 16) { const f32v t0 = load(x + (64*i + r0)); m_acc = ...; }
            const float m = fold(m_acc);
            ...

Values come from values.py, loops from loops.py, accumulators from reduce.py.
"""
from __future__ import annotations

from typing import Final

from dovetail.codegen import analysis
from dovetail.codegen.analysis import Launchable, Shape, token, writes_in
from dovetail.codegen.cpp.loops import Body
from dovetail.codegen.cpp.ops import C_TYPE, fits_int32
from dovetail.codegen.cpp.prelude import emit_prelude
from dovetail.codegen.cpp.reduce import place_dtype
from dovetail.codegen.cpp.values import KernelWriter, indented
from dovetail.ir.loop import Buffer, Scalar, roots_of
from dovetail.ir.schedule import LINE, Group


def emit_kernel(group: Group, buffers: dict[str, Buffer], vector_bytes: int, cache_bytes: int) -> Launchable:
    """Bytes of a vector register, 0 for plain loops; bytes of the largest cache."""
    shape = analysis.analyse(group, buffers)
    is_serial = any(w.index_scalar is not None for w in writes_in(group.nests) if not w.reduce)
    widest = _widest(group, shape) if vector_bytes else 8
    lanes = max(vector_bytes // widest, 1)
    writer = KernelWriter(group, shape, buffers, lanes, widest)
    writer.column = shape.contiguous in group.ranges[: group.outer] and lanes > 1
    writer.streamed = _streamed(group, shape, cache_bytes)
    body = Body(writer, group, shape, is_serial).emit()
    kinds = [f"{'' if a.is_written else 'const '}{C_TYPE[a.buffer.type.dtype]}*" for a in shape.args]
    params = [f"{kind} {token(a.buffer.name)}" for kind, a in zip(kinds, shape.args)]
    params += [f"int64_t {s.name}" for s in shape.symbols]
    params += [f"double {name}" for name in shape.numbers]
    params += ["int32_t* bad"] if writer.may_fail else []
    head = f'extern "C" void {token("")}({", ".join(params)}) {{'
    lines = [f"namespace v{lanes} {{", head, *map(indented, body), "}", "}"]
    text, prelude = "\n".join(lines) + "\n", emit_prelude(lanes, widest, writer.functions)
    comment = "".join(f"// {line}\n" for line in str(group).splitlines())
    comment += "".join(f"//   {a.buffer}\n" for a in shape.args)
    may_fail = writer.may_fail
    return analysis.launchable(group, shape, "c++", text, comment, _KEYWORDS, prelude, may_fail=may_fail)


def _streamed(group: Group, shape: Shape, cache_bytes: int) -> frozenset[str]:
    """Large results of a kernel that touches more than the cache holds: nothing of them would be left there
    for the next kernel, and a line that is stored past the cache need not be read first. (Rows that end
    within a line would have each such line written twice.)"""
    sizes = [a.buffer.type.bytes for a in shape.args]
    if not all(size.is_const for size in sizes) or sum(size.value for size in sizes) < cache_bytes:
        return frozenset()
    if len(group.ranges) > 1 and shape.contiguous and shape.contiguous.size.lo % (LINE // 4):
        return frozenset()
    large = [a.buffer for a, size in zip(shape.args, sizes) if a.is_written and size.value > cache_bytes // 2]
    read = {name for nest in group.nests for name, _ in nest.loads}
    return frozenset(b.name for b in large if b.name not in read and b.type.dtype.bytes >= 4)


def _widest(group: Group, shape: Shape) -> int:
    """Bytes of the widest element computed in vectors. Addresses of whole vectors are not; but the functions
    of a float type, which an address may use too, come with its vectors."""
    var = shape.contiguous.var if shape.contiguous else None
    writes = writes_in(group.nests)
    searches = [w for w in writes if w.reduce in ("argmax", "argmin")]
    roots = [root for w in writes for root in ((w.value,) if w in searches else roots_of(w))]
    changing = analysis.varies(roots, {var} if var is not None else set(), set())
    floats = [node.dtype.bytes for node in analysis.scalars_of(group) if node.dtype.is_float]
    widest = max([4, *floats, *(place_dtype(w).bytes for w in searches)])
    seen: set[Scalar] = set()
    while roots:
        node = roots.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in changing:
            widest = max(widest, node.dtype.bytes)
        if node.op == "index" and node in changing and not fits_int32(node.args[0]):  # type: ignore[arg-type]
            widest = 8
        if node.op != "load_at" or var is None or analysis.step_of(node.operands[0], var) != 1:
            roots += node.operands
    values = [w.value for w in writes if w.reduce]
    return max([widest, *(value.dtype.bytes for value in values)])


_KEYWORDS: Final = frozenset(
    """
    alignas alignof and asm auto bool break case catch char class const constexpr continue decltype default
    delete do double else enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not nullptr operator or private protected public register return short signed
    sizeof static struct switch template this throw true try typedef typeid typename union unsigned using
    virtual void volatile while xor INLINE MASKED
    """.split()
)

"""The CPU: C++ with vectors and OpenMP."""
from dovetail.codegen.cpp.kernel import emit_kernel

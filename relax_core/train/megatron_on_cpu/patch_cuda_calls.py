"""Replaces CUDA calls and device names in Megatron's source by CPU ones in an AST pass.

The pass also leaves out TensorBoard, which Megatron imports if it is installed: its import takes 0.2 s, and ranks
report to the metrics service.
"""

from __future__ import annotations

import ast
from types import CodeType

NAMESPACE = "__relax_cpu_namespace__"  # the name under which a module sees its stand-in for torch.cuda

_LEFT_OUT = "torch.utils.tensorboard"
_STRINGS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


class _PatchCudaCalls(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replaces ``torch.cuda`` by the stand-in, and ``x.is_cuda`` by ``x.is_cpu``."""
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(NAMESPACE, node.ctx), node)
        if node.attr == "is_cuda":
            node.attr = "is_cpu"
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Replaces ``pin_memory=True``, which needs a GPU."""
        self.generic_visit(node)
        if node.arg == "pin_memory" and isinstance(node.value, ast.Constant):
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replaces ``x.cuda(...)`` by ``x.cpu()``."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.func.attr = "cpu"
            node.args, node.keywords = [], []
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        """Replaces the import of TensorBoard by the error of one that is not installed, for which Megatron is ready."""
        if node.module != _LEFT_OUT:
            return node
        missing = ast.Call(ast.Name("ImportError", ast.Load()), [ast.Constant(f"{_LEFT_OUT} is left out")], [])
        return ast.copy_location(ast.Raise(missing), node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replaces device and tensor type names."""
        if isinstance(node.value, str) and node.value in _STRINGS:
            return ast.copy_location(ast.Constant(_STRINGS[node.value]), node)
        return node


def compile_for_cpu(source: bytes, filename: str) -> CodeType:
    """Compiles one module of Megatron for a CPU; line numbers stay those of the source."""
    tree = ast.parse(source, filename)
    if b"cuda" in source or b"pin_memory" in source:
        _PatchCudaCalls().visit(tree)
        ast.fix_missing_locations(tree)
    code = compile(tree, filename, "exec", dont_inherit=True)
    assert isinstance(code, CodeType)
    return code

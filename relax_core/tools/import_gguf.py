"""`relax import-gguf FILE OUT` converts a GGUF file to a Hugging Face folder that a run can load.

The package gguf reads the file and dequantises the tensors. So the result has the weights of the quantised model, not
of the original model. config.json, tokenizer, chat template and end tokens come from the file's metadata. The
documentation of ggml describes the format.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.contracts.output_path import check_output_folder
from relax_core.contracts.untrusted_files import check_regular
from relax_core.contracts.untrusted_values import shown
from relax_core.data.chat_template import SETTINGS
from relax_core.families.architecture import Architecture
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import CONFIG_FILE, GENERATION_FILE, size_problems
from relax_core.observe.standard_streams import unread_streams

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer
    from torch import Tensor

DTYPES = ("float32", "bfloat16")
INSTALL = "pip install 'relax-core[real]'"
USAGE = 2
TOKENIZER_FILE, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
_EPSILON_DIGITS = 6  # GGUF stores rms_norm_eps as float32, so 1e-05 becomes 9.999999747378752e-06
_QUANTISED_BITS = 16  # types with fewer bits per weight are quantised
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Describes how a GGUF architecture maps to a model family of Relax.

    ``pairs`` is True if rows of query and key are stored in the order for llama.cpp's rotary embedding. llama.cpp
    rotates pairs of adjacent rows; Hugging Face rotates row i of a head's first half with row i of the second half.
    """

    model_type: str
    class_name: str
    pairs: bool = False
    experts: bool = False


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(model_type="llama", class_name="LlamaForCausalLM", pairs=True),
    "qwen2": _Family(model_type="qwen2", class_name="Qwen2ForCausalLM"),
    "qwen3": _Family(model_type="qwen3", class_name="Qwen3ForCausalLM"),
    "qwen3moe": _Family(model_type="qwen3_moe", class_name="Qwen3MoeForCausalLM", experts=True),
}
# module name of a layer in a Hugging Face folder → name in a GGUF file
_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
# llama.cpp's name of a pre-tokenizer → its patterns. They split text before the byte-level merges.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {"qwen2": rf"{_WORDS}\p{{N}}{_REST}", "llama-bpe": rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"}
_PLAIN = ("default", "gpt-2")  # only the pattern of GPT-2
_GIVE = "Give the original tokenizer with --tokenizer FOLDER."
_SINGLE_DIGITS = "smollm"  # single digits, then the pattern of GPT-2


class _File:
    """Reads the metadata of a GGUF file. Raises ValueError with the key for a missing or wrong value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _reader(path)
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.value("general.architecture", str))
        if self.architecture not in FAMILIES:
            raise ValueError(
                f"{path}: general.architecture={shown(self.architecture)}: Relax imports {', '.join(FAMILIES)}."
            )
        self.family = FAMILIES[self.architecture]

    def value(self, key: str, kind: type | tuple[type, ...], *, default: Any = None) -> Any:
        """Returns the value of a key, or ``default`` if the key is missing.

        Without ``default``, a missing key is an error.
        """
        field = self._reader.fields.get(key)
        if field is None:
            if default is None:
                raise ValueError(f"{self.path}: the file has no {key}. Use a complete GGUF file of a language model.")
            return default
        found = field.contents()
        if not isinstance(found, kind) or isinstance(found, bool) is not (kind is bool):
            raise ValueError(f"{self.path}: {key}={shown(found)}: a value of another type is expected.")
        return found

    def own(self, key: str, kind: type | tuple[type, ...] = int, *, default: Any = None) -> Any:
        """Returns the value of a key of the file's architecture."""
        return self.value(f"{self.architecture}.{key}", kind, default=default)

    def has(self, key: str) -> bool:
        return key in self._reader.fields

    @property
    def quantised(self) -> list[str]:
        """Returns the names of the quantised types in the file, sorted."""
        bits = {tensor.tensor_type.name: tensor.n_bytes * 8 / tensor.n_elements for tensor in self.tensors.values()}
        return sorted(name for name, of in bits.items() if of < _QUANTISED_BITS)


def _reader(path: Path) -> GGUFReader:
    check_regular(path)
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(f"FILE={path}: a GGUF file needs the package gguf: {INSTALL}.") from error
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"FILE={path} cannot be read as GGUF ({cause}). Fetch the file again.") from error


def import_gguf(file: Path, target: Path, *, tokenizer: Path | None = None, dtype: str = DTYPES[0]) -> list[str]:
    """Converts a GGUF file to a Hugging Face folder. The folder appears completely or not at all.

    ``tokenizer`` is a folder with the original tokenizer; it replaces the tokenizer of the file. ``dtype`` is the dtype
    of the written weights: float32 stores dequantised weights exactly, bfloat16 takes half the space. Returns the types
    of the quantised weights, such as ``Q4_1``. The list is empty if no weights are quantised.

    Raises:
        ValueError: if the file is not a GGUF file, is truncated, lacks a tensor, or needs code that Relax lacks.
        OSError: if ``target`` cannot be written. The error names the free bytes. No partial folder remains.
    """
    from relax_core.train.hf.hf_export import export_hf_folder
    from relax_core.train.hf.stored_weights import stored_weights

    source = _File(file)
    with tempfile.TemporaryDirectory(prefix="relax-gguf-") as name:
        folder = Path(name)
        _write_json(folder / CONFIG_FILE, _hf_config(source, dtype))
        if tokenizer is None:
            _write_tokenizer(source, folder)
        else:
            _copy_tokenizer(tokenizer, folder)
        architecture = folder_architecture(folder)
        shapes = {weight.name: weight.shape for weight in stored_weights(architecture)}
        _check_tensors(source, shapes, experts=architecture.experts.count if architecture.experts else 0)
        _check_room(shapes, target, dtype)
        export_hf_folder(
            _tensors(source, architecture, shapes),
            shapes=shapes,
            own_dtype=dtype,
            dtype=dtype,
            source_folder=folder,
            target=target,
            replace=False,
        )
    return source.quantised


def _hf_config(source: _File, dtype: str) -> dict[str, Any]:
    family, embedding = source.family, source.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{source.path}: the tensor token_embd.weight is missing. Fetch the file again.")
    _refuse_other_rotary(source)
    heads = source.own("attention.head_count")
    hidden = source.own("embedding_length")
    wrong = [] if heads > 0 and hidden > 0 else [f"{heads} heads and a width of {hidden}"]
    head_dim = source.own("attention.key_length", default=hidden // max(heads, 1))
    if source.own("attention.value_length", default=head_dim) != head_dim:
        wrong.append("keys and values of different lengths")
    if source.own("rope.dimension_count", default=head_dim) != head_dim:
        wrong.append("a rotary embedding of a part of each head")
    values: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": source.own("feed_forward_length"),
        "num_hidden_layers": source.own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.own("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": source.own("context_length"),
        "rms_norm_eps": _rounded(source.own("attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _rounded(source.own("rope.freq_base", float, default=10000.0)),
        },
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "vocab_size": int(embedding.shape[-1]),
        "dtype": dtype,
    }
    if family.model_type == "llama":
        values["mlp_bias"] = False
    if family.experts:
        values |= {
            "num_experts": source.own("expert_count"),
            "num_experts_per_tok": source.own("expert_used_count"),
            "moe_intermediate_size": source.own("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if source.has(f"tokenizer.ggml.{key}_token_id"):
            values[f"{name}_token_id"] = source.value(f"tokenizer.ggml.{key}_token_id", int)
    wrong += list(size_problems(values))
    if wrong:
        raise ValueError(f"{source.path}: {wrong[0]}: no family of Relax has it. Use another file.")
    return values


def _refuse_other_rotary(source: _File) -> None:
    """Raises ValueError for scaled rotary frequencies, because a GGUF file lacks their parameters."""
    kind = source.own("rope.scaling.type", str, default="none")
    if "rope_freqs.weight" in source.tensors or kind != "none":
        scaled = "the tensor rope_freqs.weight" if kind == "none" else f"{source.architecture}.rope.scaling.type={kind}"
        raise ValueError(
            f"{source.path}: {scaled} scales the rotary frequencies, and the file lacks the parameters of config.json. "
            "Use the model's Hugging Face folder."
        )


def _rounded(number: float) -> float:
    return float(f"{number:.{_EPSILON_DIGITS}g}")


def _gguf_name(name: str) -> tuple[str, int | None]:
    """Returns the name of the GGUF tensor that contains a tensor of the folder, and the index of its expert or None."""
    if (layer := _LAYER.fullmatch(name)) is None:
        module, _, kind = name.rpartition(".")
        return f"{_OUTSIDE[module]}.{kind}", None
    number, module, kind = layer.groups()
    if expert := _EXPERT.fullmatch(module):
        return f"blk.{number}.ffn_{expert[2]}_exps.{kind}", int(expert[1])
    return f"blk.{number}.{_MODULES[module]}.{kind}", None


def _check_tensors(source: _File, shapes: Mapping[str, Sequence[int]], *, experts: int) -> None:
    """Raises ValueError for a missing tensor, a tensor with a wrong shape, or a tensor that the model does not use.

    A GGUF tensor of experts contains all ``experts`` of a layer.
    """
    used: set[str] = set()
    for name, shape in shapes.items():
        stored, expert = _gguf_name(name)
        tensor = source.tensors.get(stored)
        if tensor is None:
            raise ValueError(f"{source.path}: the tensor {stored} is missing ({name}). Fetch the file again.")
        found = tuple(int(size) for size in reversed(tensor.shape))
        wanted = tuple(shape) if expert is None else (experts, *shape)
        if found != wanted:
            raise ValueError(f"{source.path}: the tensor {stored} has shape {found}; its metadata requires {wanted}.")
        used.add(stored)
    if unused := sorted(source.tensors.keys() - used):
        raise ValueError(
            f"{source.path}: family {source.family.model_type} does not use the tensor {unused[0]}"
            f"{f' and {len(unused) - 1} more' if unused[1:] else ''}. The file is of another model."
        )


def _check_room(shapes: Mapping[str, Sequence[int]], target: Path, dtype: str) -> None:
    """Raises OSError, before any write, if the disk of ``target`` lacks the space."""
    from math import prod

    import torch

    needed = getattr(torch, dtype).itemsize * sum(prod(shape) for shape in shapes.values())
    parent = next(ancestor for ancestor in (target, *target.absolute().parents) if ancestor.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(
            f"OUT={target}: the folder needs {needed:,} bytes, and {free:,} are free there. Make room"
            + (" or give --dtype bfloat16." if dtype == DTYPES[0] else ".")
        )


def _tensors(
    source: _File, architecture: Architecture, shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the folder's tensors as float32 in the order of ``shapes``. Only one tensor is in memory at a time."""
    import torch
    from gguf.quants import dequantize

    heads = {"q_proj": architecture.num_heads, "k_proj": architecture.num_kv_heads}
    for name in shapes:
        stored, expert = _gguf_name(name)
        tensor = source.tensors[stored]
        data = tensor.data if expert is None else tensor.data[expert]
        try:
            values = torch.from_numpy(dequantize(data, tensor.tensor_type).copy())
        except NotImplementedError as error:
            raise ValueError(
                f"{source.path}: {stored} has type {tensor.tensor_type.name}, which the package gguf does not "
                "dequantise. Use a file with Q8_0, Q4_K_M or another common type."
            ) from error
        projection = name.rsplit(".", 2)[-2]
        if source.family.pairs and projection in heads:
            values = unpaired(values, heads=heads[projection])
        yield name, values.reshape(tuple(shapes[name]))


def unpaired(weight: Tensor, *, heads: int) -> Tensor:
    """Returns the rows of a query or key weight ``[heads * head_dim, ...]`` in the order of Hugging Face.

    llama.cpp stores row i of a head's first half next to row i of the second half.
    """
    rows = weight.shape[0]
    paired = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return paired.transpose(1, 2).reshape(weight.shape)


def _write_tokenizer(source: _File, folder: Path) -> None:
    tokens = source.value("tokenizer.ggml.tokens", list)
    kinds = source.value("tokenizer.ggml.token_type", list)
    tokenizer = _tokenizer(source, tokens, kinds)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    special = {
        f"{name}_token": tokens[number]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (number := _token_id(source, key, count=len(tokens))) is not None
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.own("context_length"),
        **special,
    }
    _write_json(folder / SETTINGS, settings)
    if source.has("tokenizer.chat_template"):
        template = source.value("tokenizer.chat_template", str)
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    ends = {_token_id(source, key, count=len(tokens)) for key in ("eos", "eot")} - {None}
    if ends:
        _write_json(folder / GENERATION_FILE, {"eos_token_id": sorted(end for end in ends if end is not None)})


def _token_id(source: _File, key: str, *, count: int) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    if not source.has(name):
        return None
    number = source.value(name, int)
    if not 0 <= number < count:
        raise ValueError(f"{source.path}: {name}={number}: the file has the tokens 0 to {count - 1}.")
    return int(number)


def _tokenizer(source: _File, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    """Returns the byte-level BPE tokenizer of a file. Raises ValueError for any other kind of tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    kind, pre = source.value("tokenizer.ggml.model", str), source.value("tokenizer.ggml.pre", str, default="default")
    if kind != "gpt2":
        raise ValueError(f"{source.path}: tokenizer.ggml.model={shown(kind)}: only byte-level BPE is imported. {_GIVE}")
    if len(kinds) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"{source.path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens.")
    vocabulary = {text: number for number, text in enumerate(tokens)}
    merges = []
    for merge in source.value("tokenizer.ggml.merges", list):
        left, space, right = str(merge).partition(" ")
        if not space or any(part not in vocabulary for part in (left, right, left + right)):
            raise ValueError(f"{source.path}: tokenizer.ggml.merges has {shown(merge)}, which joins no two tokens.")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = _pre_tokenizer(source, pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    added = [
        AddedToken(text, normalized=False, special=of == _CONTROL)
        for text, of in zip(tokens, kinds, strict=True)
        if of in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    first = _token_id(source, "bos", count=len(tokens))
    if source.value("tokenizer.ggml.add_bos_token", bool, default=False) and first is not None:
        text = tokens[first]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", pair=f"{text} $A {text} $B", special_tokens=[(text, first)]
        )
    return tokenizer


def _pre_tokenizer(source: _File, pre: str) -> Any:
    """Returns the pre-tokenizer, which splits text before merges. Raises ValueError for an unknown name."""
    from tokenizers import Regex, pre_tokenizers

    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _PLAIN:
        return plain
    if pre == _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    if pre in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join((*_PLAIN, _SINGLE_DIGITS, *_PATTERNS))
    raise ValueError(f"{source.path}: tokenizer.ggml.pre={shown(pre)}: Relax knows {known}. {_GIVE}")


def _copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    if not (tokenizer / TOKENIZER_FILE).is_file():
        raise ValueError(f"--tokenizer={tokenizer}: no {TOKENIZER_FILE} there. Name the original model's folder.")
    for name in (TOKENIZER_FILE, SETTINGS, TEMPLATE_FILE, GENERATION_FILE):
        if (tokenizer / name).is_file():
            check_regular(tokenizer / name)
            shutil.copyfile(tokenizer / name, folder / name)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0, or prints the problem to stderr and returns 2."""
    parser = argparse.ArgumentParser(prog="relax import-gguf", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a GGUF file; join a file of several parts first")
    parser.add_argument("out", type=Path, metavar="OUT", help="the new Hugging Face folder")
    parser.add_argument("--tokenizer", type=Path, help="a folder with the original tokenizer, used for the result")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of the weights; float32 is exact")
    parsed = parser.parse_args(arguments)
    try:
        if not parsed.file.is_file():
            raise ValueError(f"FILE={parsed.file}: no such file. Name a GGUF file.")
        check_output_folder(parsed.out, option="OUT")
        quantised = import_gguf(parsed.file, parsed.out, tokenizer=parsed.tokenizer, dtype=parsed.dtype)
    except (ValueError, OSError) as error:
        print(f"relax: {error}", file=sys.stderr)
        return USAGE
    how = f"dequantised from {', '.join(quantised)}" if quantised else "converted"
    print(f"relax: {parsed.out}: weights {how} to {parsed.dtype}; model=folder model.path={parsed.out} trains it")
    return 0


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())

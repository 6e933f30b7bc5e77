"""The tiny model: random weights, a byte-level tokenizer, a chat template. For tests and first tries.

It says nothing sensible, but it is a whole model to everything around it: its directory can be given to
the gateway as `--tokenizer`, its tokens are the bytes of UTF-8, and it starts in a second.
"""

import os
import tempfile
from pathlib import Path

import msgspec
import tokenizers

from sumibi.core.errors import EnvironmentProblem
from sumibi.engine.fetch import models_directory

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_EOS = 258
"""Id of `<|im_end|>`: 256 bytes come first."""

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256 + len(_SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "float32",
    "eos_token_id": _EOS,
}

_TOKENIZER_CONFIG = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "pad_token": "<|endoftext|>"}

_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def make_directory() -> Path:
    """Write the model's files, weights excepted, to the user's cache; returns the directory.

    Written anew each time, each file replaced whole, so several engines may start at once. Raises
    EnvironmentProblem if the cache cannot be written.
    """
    directory = models_directory() / "tiny"
    files = {
        "config.json": msgspec.json.encode(_CONFIG),
        "tokenizer.json": _tokenizer().to_str().encode(),
        "tokenizer_config.json": msgspec.json.encode(_TOKENIZER_CONFIG),
        "chat_template.jinja": _TEMPLATE.encode(),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _replace(directory / name, content)
    except OSError as cause:
        raise EnvironmentProblem(f"cannot write the tiny model's files to {directory}: {cause}") from cause
    return directory


def _tokenizer() -> tokenizers.Tokenizer:
    """One token a byte: id i is byte i, in the printable alphabet that byte-level BPE writes bytes in."""
    vocabulary = {char: byte for byte, char in _byte_alphabet().items()}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    )
    return backend


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's mapping: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _replace(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(temporary).replace(path)

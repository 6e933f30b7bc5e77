"""Llama tokenizers that transformers does not take as their file has them.

`tokenizer.json` of a converted sentencepiece model puts a `▁` in front of every text and of all that follows
a special token, by a normaliser. From version 5 on transformers takes only vocabulary and merges out of the
file of a `LlamaTokenizer` and splits by rules of its own, unless the model's type is one whose checkpoints
are known to name that class wrongly. The two differ at leading spaces and after special tokens. Engines
load tokenizers by transformers, so its rules are what counts. Checked against it in the tests.
"""

from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

_TYPES = """
arctic aria bigbird_pegasus camembertv2-base canary chameleon chatlm cohere_asr deepseek_ocr deepseek_ocr2
deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deepseek_vl_hybrid deepseek_vl_v2 ernie4_5
ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2
gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax
hyperclovax_vision_v2 hyperclovax_vlm internlm2 jamba janus kimi_k25 kimi_linear kosmos-2 llava
llava_next mimo_v2_flash minicpm3 minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3
mistral mistral3 mixtral modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 nystromformer olmo2
olmo3 olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral
qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp smolvlm stablelm step3_vl step3p5 umt5 vipllava
voxtral voxtral_realtime xlm-roberta-xl
"""
_TAKEN_AS_FILED = frozenset(_TYPES.split())
"""Model types for which transformers 5.19 takes `tokenizer.json` as it is, whatever class is named."""


def build_anew(backend: tokenizers.Tokenizer, config: dict[str, Any], model_type: object) -> None:
    """Change `backend`, read from `tokenizer.json`, to what transformers makes of it.

    `config` is `tokenizer_config.json`, `model_type` that of `config.json` (None if there is none).
    """
    named = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if named != "LlamaTokenizer" or str(model_type) in _TAKEN_AS_FILED:
        return
    if not isinstance(backend.model, tokenizers.models.BPE) or "ByteLevel" in str(backend.pre_tokenizer):
        return  # byte-level, and called Llama by mistake: transformers' own rules would garble every text
    prefix = config.get("add_prefix_space") is not False
    scheme = "never" if not prefix else "always" if config.get("legacy") else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)

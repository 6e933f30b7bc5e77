"""The forward pass against transformers in float32: architectures, caching, batching, the real model."""

import copy
import logging

import pytest
import torch
from tokenizers import Tokenizer

from sumibi.core.errors import ModelError
from sumibi.engine import linear
from sumibi.engine.batch import SequenceStep, StepBatch
from sumibi.engine.checkpoint import ModelConfig
from sumibi.engine.model import Model

BLOCK_TOKENS = 8
ARCHITECTURES = {
    "llama": ("LlamaConfig", {}),
    "llama-untied-biases": (
        "LlamaConfig",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-no-grouping": ("LlamaConfig", {"num_key_value_heads": 6, "head_dim": 8}),
    "llama-3-rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
}


def load(directory, *, dtype="float32", block_tokens=BLOCK_TOKENS, num_blocks=64):
    return Model.load(
        directory, dtype=dtype, device="cpu", block_tokens=block_tokens, num_blocks=num_blocks, threads=1
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Make a small random model with transformers: its directory and the model. Cached by name."""
    import transformers

    made = {}

    def make(name):
        if name not in made:
            kind, changes = ARCHITECTURES[name]
            config = getattr(transformers, kind)(
                **{
                    "vocab_size": 120,
                    "hidden_size": 48,
                    "intermediate_size": 80,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "max_position_embeddings": 256,
                    "initializer_range": 0.3,  # attention that looks at something
                    "tie_word_embeddings": True,
                    "bos_token_id": 1,
                    "eos_token_id": 2,
                    **changes,
                }
            )
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            for parameter in model.parameters():  # norms and biases start as ones and zeros
                if parameter.dim() == 1:
                    torch.nn.init.normal_(parameter, 0.5, 0.3)
            directory = tmp_path_factory.mktemp(name)
            model.save_pretrained(directory)
            made[name] = directory, model
        return made[name]

    return make


def right_logits(model, token_ids):
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def random_tokens(count, *, seed=0, vocab=120):
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole(token_ids, table, start=0):
    """One sequence with all its logits."""
    return StepBatch([SequenceStep(token_ids, start, table, list(range(len(token_ids))))])


def same(found, right, tolerance=1e-4):
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(reference, name):
    directory, model = reference(name)
    tokens = random_tokens(50)
    same(load(directory).forward(whole(tokens, list(range(7)))), right_logits(model, tokens))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_is_near_float32(reference, name):
    directory, model = reference(name)
    tokens = random_tokens(50)
    found = load(directory, dtype="bfloat16").forward(whole(tokens, list(range(7))))
    right = right_logits(model, tokens)
    assert (found - right).abs().mean() < 0.02 * right.std()


@pytest.fixture(scope="module")
def llama(reference):
    directory, model = reference("llama")
    return load(directory), model


def test_chunks_of_any_size_and_scattered_blocks_give_the_logits_of_one_piece(llama):
    model, oracle = llama
    tokens, table = random_tokens(45), [11, 3, 62, 7, 30, 1]
    found, start = [], 0
    for count in (1, 8, 19, 1, 1, 15):
        found.append(model.forward(whole(tokens[start : start + count], table, start)))
        start += count
    same(torch.cat(found), right_logits(oracle, tokens))


def test_a_cached_prefix_serves_two_continuations(llama):
    model, oracle = llama
    prefix, ends = random_tokens(16), [random_tokens(9, seed=1), random_tokens(5, seed=2)]
    model.forward(StepBatch([SequenceStep(prefix, 0, [5, 9])]))
    tables = [[5, 9, 20, 21], [5, 9, 22]]
    steps = [SequenceStep(end, 16, t, [len(end) - 1]) for end, t in zip(ends, tables, strict=True)]
    found = model.forward(StepBatch(steps))
    same(found, torch.stack([right_logits(oracle, prefix + end)[-1] for end in ends]))


def test_rows_come_in_the_order_of_sequences_and_wanted_positions(llama):
    model, oracle = llama
    prompts = [random_tokens(count, seed=count) for count in (12, 30, 7, 20)]
    tables = [[0, 1], [2, 3, 4, 5], [6], [7, 8, 9]]
    cached = [11, 0, 6, 0]  # two decodes between two prefills
    first = [SequenceStep(p[:c], 0, t) for p, c, t in zip(prompts, cached, tables, strict=True) if c]
    assert model.forward(StepBatch(first)).shape == (0, 120)
    wanted = [[0], [3, 4, 29], [0], []]
    steps = [SequenceStep(p[c:], c, t, w) for p, c, t, w in zip(prompts, cached, tables, wanted, strict=True)]
    right = [
        right_logits(oracle, p)[c + at] for p, c, w in zip(prompts, cached, wanted, strict=True) for at in w
    ]
    same(model.forward(StepBatch(steps)), torch.stack(right))


def test_copied_blocks_hold_the_same_keys_and_values(llama):
    model, oracle = llama
    tokens = random_tokens(14)
    model.forward(StepBatch([SequenceStep(tokens[:13], 0, [40, 41])]))
    model.copy_blocks([(41, 50), (40, 51)])
    model.copy_blocks([])
    model.forward(StepBatch([SequenceStep(random_tokens(13, seed=9), 0, [40, 41])]))  # the old ones change
    same(model.forward(whole(tokens[13:], [51, 50], 13)), right_logits(oracle, tokens)[13:])


def test_blocks_read_out_and_written_elsewhere_hold_the_same_keys_and_values(llama):
    model, oracle = llama
    tokens = random_tokens(21)
    model.forward(whole(tokens[:20], [3, 9, 5]))
    buffers = [memoryview(bytearray(model.block_bytes)) for _ in range(3)]
    model.read_blocks([3, 9, 5], buffers)
    model.write_blocks([10, 2, 7], buffers)
    model.forward(whole([1] * 20, [3, 9, 5]))  # the originals are gone
    same(model.forward(whole(tokens[20:], [10, 2, 7], 20)), right_logits(oracle, tokens)[20:])
    assert model.block_bytes == BLOCK_TOKENS * model.kv_bytes_per_token


def test_padding_writes_no_block_of_anyones(llama):
    model, _ = llama
    before = [layer.cache[:, :-1].clone() for layer in model._layers]
    model.forward(StepBatch([SequenceStep([5], 0, [33], [0])]))
    for layer, old in zip(model._layers, before, strict=True):
        changed = (layer.cache[:, :-1] != old).any(-1).any(0).nonzero().flatten().tolist()
        assert changed == [33]


def test_without_packed_weights_the_same_is_computed_and_said_once(reference, monkeypatch, caplog):
    directory, oracle = reference("llama-untied-biases")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    linear.packing_works.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            model = load(directory)
            load(directory)
    finally:
        linear.packing_works.cache_clear()
    assert [r.getMessage() for r in caplog.records] == [
        "packed CPU weights are off for torch.float32, products will be slower: this torch has no oneDNN"
    ]
    tokens = random_tokens(40)
    same(model.forward(whole(tokens, list(range(5)))), right_logits(oracle, tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_packed_products_are_the_plain_ones(dtype, rows):
    torch.manual_seed(0)
    weight, bias, x, other = (torch.randn(s).to(dtype) for s in ((40, 24), (40,), (rows, 24), (rows, 40)))
    packed, plain = linear.PackedLinear(weight, bias), linear.PlainLinear(weight.float(), bias.float())
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    same(packed(x).float(), plain(x.float()), tolerance)
    same(packed.plus(x, other).float(), plain.plus(x.float(), other.float()), tolerance)
    same(packed.silu(x).float(), plain.silu(x.float()), tolerance)
    same(packed.times(x, other).float(), plain.times(x.float(), other.float()), tolerance)


def test_random_models_are_the_same_for_the_same_seed():
    config = ModelConfig(2, 32, 48, 4, 2, 8, 64, 128)
    models = [
        Model.random(
            config, seed=s, dtype="float32", device="cpu", block_tokens=8, num_blocks=8, threads=1
        ).forward(whole([1, 2, 3], [0]))
        for s in (1, 1, 2)
    ]
    assert torch.equal(models[0], models[1])
    assert not torch.allclose(models[0], models[2])


def test_a_checkpoint_that_lacks_a_tensor_is_told_by_name(reference, tmp_path):
    from safetensors.torch import load_file, save_file

    directory, _ = reference("qwen3")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.1\.self_attn\.k_norm\.weight'"):
        load(tmp_path)


def test_kv_bytes_per_token_count_keys_and_values_of_all_layers(llama):
    assert llama[0].kv_bytes_per_token == 2 * 3 * 2 * 8 * 4


# ---- the real model ----

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def quicksort(items):\n    ",
    "Water boils at",
    "The three primary colours are",
    "To bake bread you need flour,",
    "In 1969, humans first",
    "The derivative of x squared is",
    "Dear customer,\n\nThank you for",
    "Q: What is the largest planet?\nA:",
    "Photosynthesis is the process by which",
    "import numpy as np\n\ndef mean(values):",
    "Roses are red,",
    "The quick brown fox",
    "List of countries in Europe:\n1.",
    "She opened the door and",
    "A neural network is",
    "HTTP status code 404 means",
    "The history of Japan begins",
    "If it rains tomorrow, we will",
]


@pytest.fixture(scope="module")
def real(smollm2):
    return load(smollm2, block_tokens=32, num_blocks=80)


@pytest.fixture(scope="module")
def prompts(smollm2):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    return [encoding.ids for encoding in tokenizer.encode_batch(PROMPTS)]


def greedy(model, prompts, count):
    """`count` tokens after each prompt, all of them in one batch, blocks far apart."""
    blocks = -(-(max(map(len, prompts)) + count) // model.block_tokens)
    tables = [list(range(i, i + blocks * len(prompts), len(prompts))) for i in range(len(prompts))]
    outputs = [[] for _ in prompts]
    new, start = copy.deepcopy(prompts), [0] * len(prompts)
    for _ in range(count):
        steps = [SequenceStep(n, s, t, [len(n) - 1]) for n, s, t in zip(new, start, tables, strict=True)]
        chosen = model.forward(StepBatch(steps)).argmax(-1).tolist()
        start = [s + len(n) for s, n in zip(start, new, strict=True)]
        new = [[token] for token in chosen]
        for output, token in zip(outputs, chosen, strict=True):
            output.append(token)
    return outputs


@pytest.mark.real_model
def test_greedy_tokens_of_twenty_prompts_in_one_batch_are_those_of_transformers(real, prompts, smollm2):
    """Given our tokens so far, the most likely next one is ours, at every position: so by induction
    transformers' own greedy continuation is the same. One pass over each text instead of 64."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for prompt, output in zip(prompts, greedy(real, prompts, 64), strict=True):
        right = right_logits(oracle, prompt + output)[len(prompt) - 1 : -1].argmax(-1)
        assert output == right.tolist()


@pytest.mark.real_model
def test_a_batch_of_eight_gives_each_the_tokens_it_gets_alone(real, prompts):
    eight = greedy(real, prompts[:8], 12)
    assert eight == [greedy(real, [prompt], 12)[0] for prompt in prompts[:8]]


@pytest.mark.real_model
def test_logits_after_a_cached_prefix_are_those_without_it(real, prompts):
    tokens = [token for prompt in prompts for token in prompt]
    at_once = real.forward(StepBatch([SequenceStep(tokens, 0, list(range(10)), [len(tokens) - 1])]))
    real.forward(StepBatch([SequenceStep(tokens[:64], 0, [70, 50, 60], [])]))
    rest = SequenceStep(tokens[64:], 64, [70, 50, *range(20, 30)], [len(tokens) - 65])
    assert (real.forward(StepBatch([rest])) - at_once).abs().max() <= 1e-4


@pytest.mark.real_model
def test_bfloat16_agrees_with_float32_as_far_as_it_can(smollm2, real, prompts):
    """Mean divergence 0.0015 nats a token is what transformers' own bfloat16 has; twice that is allowed."""
    tokens = [token for prompt in prompts for token in prompt]
    right = real.forward(whole(tokens, list(range(10)))).log_softmax(-1)
    found = (
        load(smollm2, dtype="bfloat16", num_blocks=64).forward(whole(tokens, list(range(40)))).log_softmax(-1)
    )
    assert ((right.exp() * (right - found)).sum(-1)).mean() < 0.003

"""transformers as a contestant: its forward pass and cache, with nothing around them (no `generate`)."""

import sys

import torch
import transformers
from benchmarks.engine.worker import Contestant, Stopwatch, Task, Took, random_prompts, serve
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers:
    """sdpa attention (its default), bf16, one thread, logits of the last position only."""

    def __init__(self, directory: str) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def run(self, task: Task) -> Took:
        """See Contestant."""
        with torch.inference_mode():
            cache = DynamicCache(config=self._model.config)
            tokens = torch.tensor(random_prompts(task))
            with Stopwatch() as watch:
                tokens = self._next(tokens, cache)
                tokens.tolist()
            if task.steps:
                with Stopwatch() as watch:
                    for _ in range(task.steps):
                        tokens = self._next(tokens, cache)
                        tokens.tolist()
        return watch.took

    def _next(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1)


def _make() -> tuple[Contestant, str]:
    about = f"transformers {transformers.__version__}, torch {torch.__version__}, sdpa, bf16, one thread"
    return Transformers(sys.argv[1]), about


if __name__ == "__main__":
    serve(_make)

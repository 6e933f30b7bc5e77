"""vLLM's CPU build as a contestant, in its own environment (it shares no package with ours).

Its engine runs in this process, so that process CPU time is all of it. It offers no way to time its
decodes alone: a run with one token is taken off one with all of them.
"""

import sys

from benchmarks.engine.worker import Contestant, Stopwatch, Task, Took, random_prompts, serve
from vllm import LLM, SamplingParams
from vllm import __version__ as vllm_version


class Vllm:
    """bf16, eager, no prefix cache (the same prompts run twice)."""

    def __init__(self, directory: str) -> None:
        self._llm = LLM(
            directory,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=8,
            block_size=32,
            enforce_eager=True,
            enable_prefix_caching=False,
        )

    def run(self, task: Task) -> Took:
        """See Contestant."""
        prefill = self._generate(task, 1)
        if not task.steps:
            return prefill
        whole = self._generate(task, task.steps + 1)
        return Took(whole.cpu_s - prefill.cpu_s, whole.wall_s - prefill.wall_s)

    def _generate(self, task: Task, tokens: int) -> Took:
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(task)]
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        with Stopwatch() as watch:
            self._llm.generate(prompts, params, use_tqdm=False)
        return watch.took


def _make() -> tuple[Contestant, str]:
    return Vllm(sys.argv[1]), f"vllm {vllm_version}, bf16, one thread"


if __name__ == "__main__":
    serve(_make)

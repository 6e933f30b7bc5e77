"""An engine simulated token by token: slow, simple, without memory limits or caches. For comparison."""

from dataclasses import dataclass

from sumibi.core.latency import LatencyModel


@dataclass
class Naive:
    arrival_s: float
    prompt: int
    output: int
    computed: int = 0
    generated: int = 0
    first_s: float = 0.0
    end_s: float = 0.0


def play(jobs: list[Naive], model: LatencyModel, *, chunk_tokens: int, max_sequences: int) -> list[float]:
    """Serve `jobs` (in order of arrival), filling in their times. Returns every interval between tokens."""
    coming, waiting, running = list(jobs), list[Naive](), list[Naive]()
    intervals: list[float] = []
    t = 0.0
    while coming or waiting or running:
        if not waiting and not running:
            t = max(t, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= t:
            waiting.append(coming.pop(0))
        decoding = [job for job in running if job.computed == job.prompt]
        budget = chunk_tokens - len(decoding)
        chunks: list[tuple[Naive, int]] = []
        for job in running:
            if job.computed < job.prompt and budget:
                tokens = min(budget, job.prompt - job.computed)
                budget -= tokens
                chunks.append((job, tokens))
        while waiting and budget and len(running) < max_sequences:
            job = waiting.pop(0)
            running.append(job)
            tokens = min(budget, job.prompt)
            budget -= tokens
            chunks.append((job, tokens))
        step = sum(model.b_s * n + model.q_s * n * (job.computed + n / 2) for job, n in chunks)
        step += sum(model.d1_s + model.d2_s * (job.prompt + job.generated) for job in decoding)
        step += max(model.a_s if chunks else 0.0, model.d0_s if decoding else 0.0)
        t += max(step, model.d0_s)
        for job in decoding:
            job.generated += 1
            intervals.append(step)
        for job, tokens in chunks:
            job.computed += tokens
            if job.computed == job.prompt:
                job.generated = 1
                job.first_s = t
        for job in [job for job in running if job.generated == job.output]:
            job.end_s = t
            running.remove(job)
    return intervals
